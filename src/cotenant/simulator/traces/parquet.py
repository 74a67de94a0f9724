"""Parquet files, read and written batch by batch with pyarrow, from the extra `research`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from cotenant.extras import how_to_install
from cotenant.simulator.traces.rows import Row
from cotenant.simulator.traces.trace_job import BadRow, BadTrace

MAGIC = b"PAR1"
BATCH_ROWS = 8192


def is_parquet(path: Path) -> bool:
    """Return whether a file begins like Parquet; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class ParquetTable:
    """A Parquet file being read. Its rows are like those of a CSV file with the same columns, but counted from 1."""

    def __init__(self, source: str, path: Path) -> None:
        self.source = source
        self._file = _reading(source, lambda: _pyarrow("parquet", source).ParquetFile(path))
        names = [str(name) for name in self._file.schema_arrow.names]
        self.header = tuple(name.strip().lower() for name in names)
        if twice := sorted({name for name in self.header if self.header.count(name) > 1}):
            raise BadTrace(f"{source} has the column {twice[0]!r} more than once")

    def rows(self) -> Iterator[Row | BadRow]:
        """Yield each row."""
        number = 0
        batches = _reading(self.source, lambda: self._file.iter_batches(batch_size=BATCH_ROWS))
        while (batch := _reading(self.source, lambda: next(batches, None))) is not None:
            columns = [[_text(value) for value in column.to_pylist()] for column in batch.columns]
            for fields in zip(*columns, strict=True):
                number += 1
                yield Row(self.source, number, dict(zip(self.header, fields, strict=True)), "row")


def write(path: Path, columns: Sequence[tuple[str, str]], rows: Iterable[tuple[Any, ...]]) -> None:
    """Write rows under columns, each a name and a pyarrow type.

    Raises:
        BadTrace: pyarrow is missing.
    """
    pyarrow, parquet = _pyarrow("", str(path)), _pyarrow("parquet", str(path))
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in columns])
    rest = iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rest, BATCH_ROWS)):
            arrays = [
                pyarrow.array(values, field.type)
                for values, field in zip(zip(*batch, strict=True), schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _text(value: object) -> str:
    """Return a value as in CSV; empty for a null, and for the NaN that pandas makes of it."""
    if value is None or value != value:
        return ""
    return str(value).strip()


def _reading(source: str, read: Any) -> Any:
    """Call `read` and report errors in a sentence: pyarrow raises many kinds of errors."""
    try:
        return read()
    except BadTrace:
        raise
    except Exception as error:
        raise BadTrace(f"{source} cannot be read as Parquet: {' '.join(str(error).split()) or error!r}") from error


def _pyarrow(module: str, source: str) -> Any:
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise BadTrace(f"{source} is Parquet, which needs pyarrow: {how_to_install('research')}") from error
