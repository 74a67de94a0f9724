"""The trace formats: the columns of each, and how a row becomes a job. One entry here adds a format."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cotenant.simulator.traces import cotenant_format, gavel, muri, openb, simple, synergy
from cotenant.simulator.traces.rows import Row
from cotenant.simulator.traces.trace_job import BadTrace, TraceJob


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format: its required columns (others are ignored), and its reader.

    `numbers` are the numeric columns by which a file without a header is detected; a format with a header has none.
    `optional` are all other known columns, if a format is strict about unknown ones.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], TraceJob]
    numbers: tuple[str, ...] = ()
    delimiter: str = ","
    optional: tuple[str, ...] = ()

    @property
    def has_header(self) -> bool:
        """Whether the first line names the columns."""
        return not self.numbers

    def missing_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that a header lacks to be of this format."""
        return tuple(column for column in self.columns if column not in header)

    def is_row(self, line: str) -> bool:
        """Return whether a line looks like a row of this format, which has no header."""
        fields = line.rstrip("\r\n").split(self.delimiter)
        return len(fields) == len(self.columns) and all(
            _is_number(fields[self.columns.index(column)]) for column in self.numbers
        )


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format("cotenant", cotenant_format.REQUIRED, cotenant_format.read, optional=cotenant_format.OPTIONAL),
            Format("gavel", gavel.COLUMNS, gavel.read, numbers=gavel.NUMBERS, delimiter="\t"),
            Format("itp", ("job_id", "submission_time", "duration", "num_gpu"), simple.itp),
            Format("muri", muri.COLUMNS, muri.read),
            Format("openb", openb.COLUMNS, openb.read),
            Format("philly", ("timestamp", "duration", "num_gpus"), simple.philly),
            Format("synergy", synergy.COLUMNS, synergy.read, numbers=synergy.NUMBERS),
            Format("tiresias", ("job_id", "num_gpu", "submit_time", "duration"), simple.tiresias),
        )
    }
)


def format_named(name: str) -> Format:
    """Return a format by name.

    Raises:
        BadTrace: there is no such format; the nearest names are suggested.
    """
    if known := FORMATS.get(name.lower()):
        return known
    near = difflib.get_close_matches(name.lower(), FORMATS, n=2, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise BadTrace(f"unknown trace format {name!r}; {meant}known are {', '.join(FORMATS)} and snapshot")


def format_of_row(line: str) -> Format | None:
    """Return the format of a file without a header by its first row; None if it matches none."""
    return next((known for known in FORMATS.values() if known.numbers and known.is_row(line)), None)


def format_of(source: str, header: Sequence[str], wanted: Format | None) -> Format:
    """Return the format of a header, or check that it is the wanted one.

    Raises:
        BadTrace: the header lacks columns; the message names the nearest format.
    """
    headed = [known for known in FORMATS.values() if known.has_header]
    fitting = [known for known in headed if not known.missing_columns(header)]
    if wanted is None:
        if fitting:
            return _checked(source, max(fitting, key=lambda known: len(known.columns)), header)
        nearest = min(headed, key=lambda known: (len(known.missing_columns(header)) / len(known.columns), known.name))
        missing = ", ".join(nearest.missing_columns(header))
        raise BadTrace(
            f"{source}: unknown format, header ({', '.join(header)}); "
            f"the nearest is {nearest.name}, which also requires {missing}"
        )
    if missing := ", ".join(wanted.missing_columns(header)):
        looks = f"; it looks like a header of format {fitting[0].name}" if fitting else ""
        raise BadTrace(
            f"{source}: the header of format {wanted.name} needs {missing}, found {', '.join(header)}{looks}"
        )
    return _checked(source, wanted, header)


def _checked(source: str, known: Format, header: Sequence[str]) -> Format:
    """Reject a column that is almost a known one: if it were ignored, the jobs would silently change."""
    meant = (*known.columns, *known.optional)
    for column in header if known.optional else ():
        if column not in meant and (near := difflib.get_close_matches(column, meant, n=1, cutoff=0.8)):
            raise BadTrace(f"{source}: unknown column {column!r} in format {known.name}; did you mean {near[0]}?")
    return known


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
