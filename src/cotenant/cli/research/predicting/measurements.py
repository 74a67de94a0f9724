r"""Measurements in CSV, and every mistake in them at once with its line and column.

The header says what was measured: each kind has columns that it needs, others that it may have, and what is left is
named and passed over. Fields are parted by commas, semicolons or tabs, as the header has it; a `#` begins a comment.

>>> read_measurements("cores,rate\n1,10.5\n4,38", "rates.csv").kind.name
'cores'
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotenant.cli.jobs.job_file import STDIN, Mistake, source_of
from cotenant.cli.outcome import CommandError, ExitCode, usage
from cotenant.cli.source_positions import Place
from cotenant.core.model.validation import CORES_MAX, REPLICAS_MAX, bad_name, shown
from cotenant.core.spelling import nearest

FILE_BYTES_MAX = 64 * 2**20
ROWS_MAX = 1_000_000
MISTAKES_SHOWN_MAX = 20
COUNT_MAX = 10**15
DELIMITERS = (",", ";", "\t")

Value = int | float | str
Row = Mapping[str, Value]
Read = Callable[[str], Value]


class BadMeasurements(CommandError):
    """Measurements that cannot be taken, with all that is wrong with them."""

    def __init__(self, source: str, mistakes: Sequence[Mistake], hint: str = "") -> None:
        count = len(mistakes)
        lines = [str(mistake) for mistake in mistakes[:MISTAKES_SHOWN_MAX]]
        if count > MISTAKES_SHOWN_MAX:
            lines.append(f"and {count - MISTAKES_SHOWN_MAX} more")
        message = f"{source} has {count} mistakes" if count > 1 else f"{source} has a mistake"
        super().__init__(message, hint=hint, details=lines, code=ExitCode.USAGE)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurements: what its columns are called, and what may stand in them."""

    name: str
    about: str
    needs: Mapping[str, Read]
    takes: Mapping[str, Read]

    @property
    def columns(self) -> str:
        """Its columns, those in brackets that may be left out."""
        return ",".join(self.needs) + "".join(f"[,{name}]" for name in self.takes)


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was read: the rows by column, in the order of the file, and the columns that say nothing here."""

    source: str
    kind: Kind
    rows: Sequence[Row]
    ignored: Sequence[str]

    def groups(self) -> Mapping[tuple[str, str], Sequence[Row]]:
        """The rows by model and phase, in the order in which these first stand in the file."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((str(row.get("model", "")), str(row.get("phase", ""))), []).append(row)
        return found


def _count(least: int, most: int) -> Read:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}(\.0+)?", text) or not least <= int(float(text)) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {shown(text)}")
        return int(text.partition(".")[0])

    return read


def _positive(text: str) -> float:
    figure = _number(text)
    if not 0 < figure < math.inf:
        raise ValueError(f"must be finite and more than 0, not {shown(text)}")
    return figure


def _not_negative(text: str) -> float:
    figure = _number(text)
    if not 0 <= figure < math.inf:
        raise ValueError(f"must be finite and not negative, not {shown(text)}")
    return figure


def _number(text: str) -> float:
    """Read a number; a loss may be none, such as nan: that the training diverged is a fact about it."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {shown(text)}") from None


def _name(text: str) -> str:
    if wrong := bad_name(text):
        raise ValueError(wrong)
    return text


_CORES = _count(1, CORES_MAX)
_REPLICAS = _count(1, REPLICAS_MAX)
MODEL: Mapping[str, Read] = {"model": _name}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("cores", "rates by CPU cores", {"cores": _CORES, "rate": _positive}, {"phase": _name, **MODEL}),
        Kind(
            "scaling",
            "rates by GPUs and nodes",
            {"gpus": _REPLICAS, "nodes": _REPLICAS, "rate": _positive},
            {"cores": _CORES, **MODEL},
        ),
        Kind(
            "parameter-server",
            "rates by workers and parameter servers",
            {"workers": _REPLICAS, "servers": _REPLICAS, "rate": _positive},
            {"cores": _CORES, "server_cores": _CORES, "gpus": _not_negative, **MODEL},
        ),
        Kind("loss", "losses by step", {"step": _count(0, COUNT_MAX), "loss": _number}, MODEL),
        Kind("latency", "times of batches by their size", {"batch": _count(1, 10**6), "seconds": _positive}, MODEL),
    )
}
OTHER_NAMES = {
    "cpus": "cores",
    "rate_per_second": "rate",
    "steps_per_second": "rate",
    "ps": "servers",
    "parameter_servers": "servers",
    "worker_cores": "cores",
    "ps_cores": "server_cores",
    "steps": "step",
    "batch_size": "batch",
    "batch_seconds": "seconds",
}


def load_measurements(path: str, kind: str = "") -> Measurements:
    """Read a file, or stdin where the path is `-`; without a kind, its header tells.

    Raises:
        CommandError: the file cannot be read.
        BadMeasurements: what stands in it cannot be taken.
    """
    source = source_of(path)
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise usage(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise usage(f"{source} has more than {FILE_BYTES_MAX // 2**20} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadMeasurements(source, [Mistake(Place(source, line), "", "is no UTF-8 text")]) from None
    return read_measurements(text, source, kind)


def read_measurements(text: str, source: str, kind: str = "") -> Measurements:
    """Read a CSV text.

    Raises:
        BadMeasurements: naming every mistake in it.
    """
    lines = _lines(text)
    number, header = next(lines, (1, ""))
    if not header:
        raise BadMeasurements(source, [Mistake(Place(source), "", "has nothing in it")], _hint())
    delimiter = max(DELIMITERS, key=header.count)
    titles = [(OTHER_NAMES.get(_title(field), _title(field)), place) for field, place in _fields(header, delimiter)]
    names = [name for name, _ in titles]
    mistakes = [
        Mistake(Place(source, number, place), name, "stands twice")
        for index, (name, place) in enumerate(titles)
        if name in names[:index]
    ]
    known = _recognised(names, kind, Place(source, number))
    reads = {**known.takes, **known.needs}
    rows: list[Row] = []
    for number, line in lines:
        fields = list(_fields(line, delimiter))
        if len(fields) != len(names):
            wrong = f"has {len(fields)} fields, not {len(names)} as the header"
            mistakes.append(Mistake(Place(source, number, fields[min(len(fields), len(names)) - 1][1]), "", wrong))
            continue
        rows.append(_row(Place(source, number), names, fields, reads, mistakes))
        if len(rows) > ROWS_MAX:
            mistakes.append(Mistake(Place(source, number), "", f"is one row too many; {ROWS_MAX} are taken"))
            break
    if not (rows or mistakes):
        mistakes.append(Mistake(Place(source, number), "", "is followed by no measurement"))
    if mistakes:
        raise BadMeasurements(source, mistakes)
    return Measurements(source, known, rows, [name for name in names if name not in reads])


def _row(
    place: Place,
    names: Sequence[str],
    fields: Sequence[tuple[str, int]],
    reads: Mapping[str, Read],
    mistakes: list[Mistake],
) -> Row:
    """Read a row; what cannot be read is added to the mistakes. An empty field is taken as one that is not there."""
    row: dict[str, Value] = {}
    for name, (field, column) in zip(names, fields, strict=True):
        if name not in reads:
            continue
        try:
            if field or reads[name] is not _name:
                row[name] = reads[name](field)
        except ValueError as error:
            mistakes.append(Mistake(place._replace(column=column), name, str(error)))
    return row


def _recognised(names: Sequence[str], wanted: str, place: Place) -> Kind:
    """Find the kind that a header is of: of those whose columns it has, the one that takes the most of it.

    Raises:
        CommandError: no such kind is known.
        BadMeasurements: columns are missing.
    """
    if wanted and wanted not in KINDS:
        raise usage(f"--kind: there is no kind {shown(wanted)}", hint=f"known are {', '.join(KINDS)}")
    if wanted:
        known = KINDS[wanted]
        if missing := [name for name in known.needs if name not in names]:
            told = f"has no column {', '.join(missing)}, which {wanted} needs"
            raise BadMeasurements(place.source, [Mistake(place, "", told)], f"{wanted} has the columns {known.columns}")
        return known
    fitting = [kind for kind in KINDS.values() if all(name in names for name in kind.needs)]
    if not fitting:
        told = f"has the columns {', '.join(map(shown, names[:8]))}, which are of no kind of measurements"
        raise BadMeasurements(place.source, [Mistake(place, "", told)], _hint(names))
    return max(fitting, key=lambda kind: len(kind.needs))


def _hint(names: Iterable[str] = ()) -> str:
    """Tell the columns of all kinds; where a header is all but one of them, of that one."""
    near = [kind for kind in KINDS.values() if any(nearest(name, kind.needs) for name in names)]
    return "the columns may be " + "; or ".join(kind.columns for kind in near or KINDS.values())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _title(field: str) -> str:
    return field.lower().replace(" ", "_").replace("-", "_")


def _fields(line: str, delimiter: str) -> Iterator[tuple[str, int]]:
    """Yield each field of a line and the column at which it begins, quotes and spaces around it left out.

    >>> list(_fields('4, "a,b"', ","))
    [('4', 1), ('a,b', 4)]
    """
    pattern = re.compile(rf' *(?:"((?:[^"]|"")*)" *|([^{delimiter}]*))({delimiter}|$)')
    at = 0
    while (match := pattern.match(line, at)) is not None:
        quoted, plain, end = match.groups()
        yield (plain.strip(), match.start(2) + 1) if quoted is None else (quoted.replace('""', '"'), match.start(1))
        if not end:
            return
        at = match.end()
    yield line[at:], at + 1  # a quote goes on behind its end: what follows is one field
