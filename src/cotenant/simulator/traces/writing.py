"""Writes traces in our own format: CSV, gzipped by its file name, or Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from cotenant.simulator.traces import cotenant_format, parquet
from cotenant.simulator.traces.trace_job import BadTrace, TraceJob

ENDINGS = (".csv", ".csv.gz", ".parquet")


def write(jobs: Iterable[TraceJob], path: Path) -> None:
    """Write jobs; the file is written completely or not at all.

    Raises:
        BadTrace: the name's ending is not in `ENDINGS`, the file cannot be written, or a job has several roles.
    """
    ending = next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), "")
    if not ending:
        raise BadTrace(f"{path}: the ending selects the format, and must be one of {', '.join(ENDINGS)}")
    try:
        with _atomic_replacement(path) as draft:
            rows = (tuple(column.write(job) for column in cotenant_format.COLUMNS) for job in jobs)
            if ending == ".parquet":
                parquet.write(draft, [(column.name, column.kind) for column in cotenant_format.COLUMNS], rows)
            else:
                _write_csv(draft, rows, packed=ending.endswith(".gz"))
    except OSError as error:
        raise BadTrace(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the wanted one in the end."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o666 & ~_umask())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_csv(path: Path, rows: Iterable[tuple[object, ...]], *, packed: bool) -> None:
    with path.open("wb") as raw:
        # without a name and a time inside, equal jobs give equal bytes
        plain = cast(IO[bytes], gzip.GzipFile("", "wb", fileobj=raw, mtime=0)) if packed else raw
        with io.TextIOWrapper(plain, encoding="utf-8", newline="") as text:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(column.name for column in cotenant_format.COLUMNS)
            writer.writerows(tuple(_written(value) for value in row) for row in rows)


def _written(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            return str(value)
