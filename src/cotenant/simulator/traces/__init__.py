"""Traces: jobs that were once submitted, read from files in several formats.

Published traces are not always in the order of submission; such a one is sorted, jobs of one second staying in the
file's order, and the trace's notes say so. Times are counted from the first submission.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cotenant.simulator.traces.formats import FORMATS, Format, format_named, format_of
from cotenant.simulator.traces.jobs import BadRow, BadTrace, TraceJob, workers
from cotenant.simulator.traces.rows import Row, Table, open_text

__all__ = ["FORMATS", "SAMPLE", "BadRow", "BadTrace", "Format", "Trace", "TraceJob", "load", "stream", "workers"]

SAMPLE = "sample"
SAMPLE_PATH = Path(__file__).parent.parent / "samples" / "itp_cluster10.csv"


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order of their submission, which is counted in seconds from the first one's."""

    source: str
    format: str
    jobs: tuple[TraceJob, ...]
    skipped: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.jobs)


def load(source: str | Path, format_name: str | None = None, *, skip_bad_rows: bool = False) -> Trace:
    """Read a whole trace; `sample` is the bundled one. The format may be left out where the header tells.

    Raises:
        BadTrace: the file cannot be read or holds no jobs; a BadRow where one row is at fault, unless such rows are
            to be skipped. The skipped are listed in the trace.
    """
    jobs: list[TraceJob] = []
    skipped: list[BadRow] = []
    known = format_named(format_name) if format_name else None
    for item in stream(source, format_name):
        if isinstance(item, Format):
            known = item
        elif isinstance(item, TraceJob):
            jobs.append(item)
        elif skip_bad_rows:
            skipped.append(item)
        else:
            raise item
    if not jobs or known is None:
        why = f"; all {len(skipped)} rows are bad, the first: {skipped[0]}" if skipped else " after its header"
        raise BadTrace(f"{source} has no jobs{why}")
    return _in_order(Trace(str(source), known.name, tuple(jobs), tuple(skipped)))


def stream(source: str | Path, format_name: str | None = None) -> Iterator[Format | TraceJob | BadRow]:
    """Read a trace piece by piece: first its format, then, line by line, a job or what is wrong with the line.

    Raises:
        BadTrace: the file cannot be read, or its header is not one of the format.
    """
    path = SAMPLE_PATH if source == SAMPLE else Path(source)
    known = format_named(format_name) if format_name else None
    with open_text(path) as text:
        table = Table(str(source), text)
        known = format_of(table.source, table.header, known.name if known else None)
        yield known
        seen: dict[str, int] = {}
        for row in table.rows():
            yield row if isinstance(row, BadRow) else _read(row, known, seen)


def _read(row: Row, known: Format, seen: dict[str, int]) -> TraceJob | BadRow:
    try:
        job = known.read(row)
    except BadRow as bad:
        return bad
    if job.id in seen:
        expected = "an id of its own for each job"
        return BadRow(row.source, row.line, "job_id", expected, f"{job.id!r}, which line {seen[job.id]} has")
    seen[job.id] = row.line
    return job


def _in_order(trace: Trace) -> Trace:
    backwards = sum(after.submitted_seconds < before.submitted_seconds for before, after in pairwise(trace.jobs))
    jobs = sorted(trace.jobs, key=lambda job: job.submitted_seconds) if backwards else list(trace.jobs)
    notes = trace.notes
    if backwards:
        notes = (*notes, f"{backwards} rows were submitted before the row above them; the jobs were sorted")
    first = jobs[0].submitted_seconds
    if first:
        jobs = [replace(job, submitted_seconds=job.submitted_seconds - first) for job in jobs]
    return replace(trace, jobs=tuple(jobs), notes=notes)
