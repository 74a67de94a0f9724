"""The trace formats: which columns each has and how a row becomes a job. One entry here adds a format."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cotenant.simulator.traces.jobs import BadTrace, TraceJob, workers
from cotenant.simulator.traces.rows import Row


@dataclass(frozen=True, slots=True)
class Format:
    """How a trace is written: the columns that it must have (others are passed over) and how a row is read."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], TraceJob]

    def lacks(self, header: Sequence[str]) -> tuple[str, ...]:
        """Name the columns that a header would need to be of this format."""
        return tuple(column for column in self.columns if column not in header)


def _tiresias(row: Row) -> TraceJob:
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("submit_time"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpu")),
        model=row.fields.get("model_name", ""),
    )


def _itp(row: Row) -> TraceJob:
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("submission_time"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpu")),
    )


def _philly(row: Row) -> TraceJob:
    return TraceJob(
        id=f"line-{row.line}",  # the published files name no jobs
        submitted_seconds=row.unix_seconds("timestamp"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpus")),
    )


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format("itp", ("job_id", "submission_time", "duration", "num_gpu"), _itp),
            Format("philly", ("timestamp", "duration", "num_gpus"), _philly),
            Format("tiresias", ("job_id", "num_gpu", "submit_time", "duration"), _tiresias),
        )
    }
)


def format_named(name: str) -> Format:
    """Look a format up.

    Raises:
        BadTrace: there is none of that name; the nearest are named.
    """
    if known := FORMATS.get(name.lower()):
        return known
    near = difflib.get_close_matches(name.lower(), FORMATS, n=2, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise BadTrace(f"{name!r} is no trace format; {meant}known are {', '.join(FORMATS)}")


def format_of(source: str, header: Sequence[str], wanted: str | None) -> Format:
    """Tell the format of a header, or check that it is the wanted one.

    Raises:
        BadTrace: the header lacks columns; what it looks like is named.
    """
    fitting = [known for known in FORMATS.values() if not known.lacks(header)]
    if wanted is None:
        if fitting:
            return max(fitting, key=lambda known: len(known.columns))
        nearest = min(FORMATS.values(), key=lambda known: (len(known.lacks(header)) / len(known.columns), known.name))
        missing = ", ".join(nearest.lacks(header))
        raise BadTrace(
            f"{source}: the header ({', '.join(header)}) is of no known format; "
            f"the nearest is {nearest.name}, for which it lacks {missing}"
        )
    known = format_named(wanted)
    if missing := ", ".join(known.lacks(header)):
        looks = f"; it looks like a header of format {fitting[0].name}" if fitting else ""
        raise BadTrace(f"{source}: the header of format {known.name} needs {missing}, found {', '.join(header)}{looks}")
    return known
