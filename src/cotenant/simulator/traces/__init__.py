"""Traces: recorded submissions of jobs, read from files in several formats.

Published traces are not always in order of submission; such a trace is sorted, jobs of the same second keeping the
file's order, and a note says so. Times are counted from the first submission.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from cotenant.simulator.snapshots import Snapshot, SnapshotState, is_snapshot, state_of
from cotenant.simulator.snapshots import read as read_snapshot
from cotenant.simulator.traces.formats import FORMATS, Format, format_named, format_of, format_of_row
from cotenant.simulator.traces.parquet import ParquetTable, is_parquet
from cotenant.simulator.traces.rows import Row, Table, open_text
from cotenant.simulator.traces.trace_job import BadRow, BadTrace, TraceJob, workers
from cotenant.simulator.traces.writing import write

__all__ = [
    "FORMATS",
    "SAMPLE",
    "BadRow",
    "BadTrace",
    "Format",
    "Trace",
    "TraceJob",
    "load",
    "stream",
    "trace_of_snapshot",
    "workers",
    "write",
]

SAMPLE = "sample"
SNAPSHOT = "snapshot"
SAMPLE_PATH = Path(__file__).parent.parent / "samples" / "itp_cluster10.csv"
WATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission, with times in seconds since the first one's.

    `overlay` is what was added to what the trace records. The jobs of a snapshot have a `snapshot_state`, from which
    their simulation starts.
    """

    source: str
    format: str
    jobs: tuple[TraceJob, ...]
    skipped: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()
    overlay: Mapping[str, str] = field(default_factory=dict)
    snapshot_state: SnapshotState | None = None

    def __len__(self) -> int:
        return len(self.jobs)


def load(
    source: str | Path,
    format_name: str | None = None,
    *,
    skip_bad_rows: bool = False,
    watch: Callable[[int], None] | None = None,
) -> Trace:
    """Return a whole trace; `sample` is the bundled one. The format is detected from the header if not given.

    `watch` receives the number of rows read, every few thousand rows.

    Raises:
        BadTrace: the file cannot be read or has no jobs; a BadRow for an invalid row, unless such rows are to be
            skipped. Skipped rows are listed in the trace.
    """
    if format_name == SNAPSHOT or (format_name is None and is_snapshot(Path(source))):
        return trace_of_snapshot(read_snapshot(source), str(source))
    jobs: list[TraceJob] = []
    skipped: list[BadRow] = []
    known = format_named(format_name) if format_name else None
    for number, item in enumerate(stream(source, format_name)):
        if watch and number % WATCH_ROWS == 0:
            watch(number)
        if isinstance(item, Format):
            known = item
        elif isinstance(item, TraceJob):
            jobs.append(item)
        elif skip_bad_rows:
            skipped.append(item)
        else:
            raise item
    if not jobs or known is None:
        after = " after its header" if known and known.has_header else ""
        why = f"; all {len(skipped)} rows are invalid, the first: {skipped[0]}" if skipped else after
        raise BadTrace(f"{source} has no jobs{why}")
    return _in_order(Trace(str(source), known.name, tuple(jobs), tuple(skipped)))


def trace_of_snapshot(snapshot: Snapshot, source: str) -> Trace:
    """Return the jobs of a snapshot, with the state from which a simulation continues.

    Raises:
        BadTrace: it has no jobs.
    """
    snapshot_state, jobs, notes = state_of(snapshot)
    if not jobs:
        raise BadTrace(f"{source} has no jobs: none was waiting or running when it was taken")
    return Trace(source, SNAPSHOT, tuple(jobs), notes=tuple(notes), snapshot_state=snapshot_state)


def stream(source: str | Path, format_name: str | None = None) -> Iterator[Format | TraceJob | BadRow]:
    """Yield a trace piece by piece: first its format, then, line by line, a job or an error.

    Raises:
        BadTrace: the file cannot be read, or its header does not match the format.
    """
    path = SAMPLE_PATH if source == SAMPLE else Path(source)
    wanted = format_named(format_name) if format_name else None
    with _table(path, str(source), wanted) as (table, known):
        yield known
        seen: dict[str, int] = {}
        for row in table.rows():
            yield row if isinstance(row, BadRow) else _read(row, known, seen)


@contextmanager
def _table(path: Path, source: str, wanted: Format | None) -> Iterator[tuple[Table | ParquetTable, Format]]:
    """Open a file as a table, and detect its format."""
    if is_parquet(path):
        parquet = ParquetTable(source, path)
        yield parquet, format_of(source, parquet.header, wanted)
        return
    with open_text(path) as text:
        begin = _leading_lines(text)
        lines = itertools.chain(begin, text)
        looks = format_of_row(begin[-1] if begin else "")
        known = wanted or looks
        if wanted and looks and wanted.has_header:
            columns = ", ".join(wanted.columns)
            raise BadTrace(
                f"{source}: format {wanted.name} needs a header with {columns}; found a row of format {looks.name}"
            )
        if known and not known.has_header:
            yield Table(source, lines, known.columns, known.delimiter), known
        else:
            table = Table(source, lines)
            yield table, format_of(source, table.header, known)


def _leading_lines(lines: Iterator[str]) -> list[str]:
    begin: list[str] = []
    for line in lines:
        begin.append(line)
        if line.strip():
            break
    return begin


def _read(row: Row, known: Format, seen: dict[str, int]) -> TraceJob | BadRow:
    try:
        job = known.read(row)
    except BadRow as bad:
        return bad
    if job.id in seen:
        expected = "a unique id for each job"
        found = f"{job.id!r}, which is also the id of {row.unit} {seen[job.id]}"
        return BadRow(row.source, row.line, "job_id", expected, found, row.unit)
    seen[job.id] = row.line
    return job


def _in_order(trace: Trace) -> Trace:
    """Return the jobs sorted by submission, with time starting at the first; deadlines move with it."""
    backwards = sum(after.submitted_seconds < before.submitted_seconds for before, after in pairwise(trace.jobs))
    jobs = sorted(trace.jobs, key=lambda job: job.submitted_seconds) if backwards else list(trace.jobs)
    notes = trace.notes
    if backwards:
        notes = (*notes, f"{backwards} rows were submitted before the row above them; the jobs were sorted")
    first = jobs[0].submitted_seconds
    if first:
        jobs = [_earlier(job, first) for job in jobs]
    return replace(trace, jobs=tuple(jobs), notes=notes)


def _earlier(job: TraceJob, seconds: float) -> TraceJob:
    deadline_seconds = None if job.deadline_seconds is None else job.deadline_seconds - seconds
    return replace(job, submitted_seconds=job.submitted_seconds - seconds, deadline_seconds=deadline_seconds)
