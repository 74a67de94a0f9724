"""Rows of a CSV file, one by one: plain or gzipped, with or without a byte order mark, with any line endings."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, cast

from cotenant.simulator.traces.trace_job import BadRow, BadTrace

GZIP_MAGIC = b"\x1f\x8b"
SECONDS_MAX = 1e10  # about 300 years: beyond that, a sum of seconds cannot resolve milliseconds
MILLISECONDS = 1000.0  # in a second
GPUS_MAX = 1_000_000
FOUND_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One row, its fields by column, with its place in the file for errors."""

    source: str
    line: int
    fields: Mapping[str, str]
    unit: str = "line"  # what `line` counts: a Parquet file has only rows

    def has(self, column: str) -> bool:
        """Return whether an optional column has a value."""
        return bool(self.fields.get(column))

    def text(self, column: str) -> str:
        """Return a required text."""
        if not (found := self.fields[column]):
            raise self.bad(column, "some text")
        return found

    def seconds(self, column: str) -> float:
        """Return a time on the trace's clock, in seconds."""
        return self._number(column, "a number of seconds", least=-SECONDS_MAX)

    def milliseconds(self, column: str) -> float:
        """Return a time on the trace's clock that is given in milliseconds; in seconds."""
        most = SECONDS_MAX * MILLISECONDS
        return self._number(column, "a number of milliseconds", least=-most, most=most) / MILLISECONDS

    def number(self, column: str, what: str, most: float) -> float:
        """Return a number from 0 on; `what` is its unit in errors."""
        return self._number(column, f"a number of {what} from 0 to {most:g}", least=0, most=most)

    def duration_seconds(self, column: str) -> float:
        """Return a time span above 0, in seconds."""
        return self.above_zero(column, "seconds", SECONDS_MAX)

    def above_zero(self, column: str, what: str, most: float) -> float:
        """Return a number above 0; `what` is its unit in errors."""
        expected = f"a number of {what} above 0"
        value = self._number(column, expected, least=0, most=most)
        if value == 0:
            raise self.bad(column, expected)
        return value

    def gpus(self, column: str) -> int:
        """Return a number of whole GPUs, at least 1."""
        expected = f"an integer number of GPUs from 1 to {GPUS_MAX}"
        value = self._number(column, expected, least=1, most=GPUS_MAX)
        if not value.is_integer():
            raise self.bad(column, expected)
        return int(value)

    def count(self, column: str, most: int, *, least: int = 0) -> int:
        """Return an integer."""
        expected = f"an integer from {least} to {most}"
        value = self._number(column, expected, least=least, most=most)
        if not value.is_integer():
            raise self.bad(column, expected)
        return int(value)

    def unix_seconds(self, column: str) -> float:
        """Return a date and time in unix seconds; UTC without a zone."""
        try:
            moment = datetime.fromisoformat(self.fields[column])
        except ValueError:
            raise self.bad(column, "a date and time such as 2017-09-26 22:24:39") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def _number(self, column: str, expected: str, *, least: float, most: float = SECONDS_MAX) -> float:
        try:
            value = float(self.fields[column])
        except ValueError:
            raise self.bad(column, expected) from None
        if not (math.isfinite(value) and least <= value <= most):
            raise self.bad(column, expected)
        return value

    def bad(self, column: str, expected: str) -> BadRow:
        """Return the error that a column does not have the expected value."""
        return BadRow(self.source, self.line, column, expected, _shown(self.fields.get(column, "")), self.unit)


def _shown(text: str) -> str:
    if not text:
        return "nothing"
    return repr(text if len(text) <= FOUND_CHARS_MAX else text[:FOUND_CHARS_MAX] + "…")


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a file as text; gzip is detected by the first bytes, whatever the name.

    Raises:
        BadTrace: the file cannot be read, or is not UTF-8 text; also while it is being read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)] == GZIP_MAGIC
            plain = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            with io.TextIOWrapper(plain, encoding="utf-8-sig", newline="") as text:
                yield text
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadTrace(f"{path} is not UTF-8 text: invalid byte 0x{byte:02x}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTrace(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise BadTrace(f"{path} cannot be read: {error.strerror or error}") from error


class Table:
    """A CSV file being read: its header, then its rows. If the file has no header, `columns` replace it."""

    def __init__(self, source: str, lines: Iterator[str], columns: Sequence[str] = (), delimiter: str = ",") -> None:
        self.source = source
        self._reader = csv.reader(lines, strict=True, delimiter=delimiter)
        self.header = tuple(columns) or self._read_header()

    def _read_header(self) -> tuple[str, ...]:
        try:
            header = next((record for record in self._reader if any(record)), None)
        except csv.Error as error:
            raise BadRow(self.source, max(1, self._reader.line_num), "", "a CSV header", str(error)) from error
        if header is None:
            raise BadTrace(f"{self.source} is empty; expected a header and one row per job")
        columns = tuple(name.strip().lower() for name in header)
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            raise BadRow(self.source, self._reader.line_num, twice[0], "each column once", "it more than once")
        return columns

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield each row, or its error; blank lines are skipped."""
        while True:
            line = self._reader.line_num + 1
            try:
                record = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(self.source, line, "", "a CSV row", str(error))
                continue
            if any(record):
                yield self._row(line, record)

    def _row(self, line: int, record: Sequence[str]) -> Row | BadRow:
        if len(record) != len(self.header):
            expected = f"{len(self.header)} fields ({', '.join(self.header)})"
            return BadRow(self.source, line, "", expected, f"{len(record)}")
        return Row(self.source, line, {name: field.strip() for name, field in zip(self.header, record, strict=True)})
