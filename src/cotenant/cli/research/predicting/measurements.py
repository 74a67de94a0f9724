r"""Measurements in CSV: parse them, and report all mistakes at once with their lines and columns.

The header determines the kind of measurements: each kind has required and optional columns; other columns are named
and ignored. Fields are separated by commas, semicolons or tabs, as in the header; `#` starts a comment.

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
from cotenant.cli.outcome import CommandError, ExitCode, usage_error
from cotenant.cli.source_positions import SourcePosition
from cotenant.core.model.validation import CORES_MAX, REPLICAS_MAX, name_error, shown
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
    """Invalid measurements, with all their mistakes."""

    def __init__(self, source: str, mistakes: Sequence[Mistake], hint: str = "") -> None:
        count = len(mistakes)
        lines = [str(mistake) for mistake in mistakes[:MISTAKES_SHOWN_MAX]]
        if count > MISTAKES_SHOWN_MAX:
            lines.append(f"and {count - MISTAKES_SHOWN_MAX} more")
        message = f"{source} has {count} mistakes" if count > 1 else f"{source} has a mistake"
        super().__init__(message, hint=hint, details=lines, code=ExitCode.USAGE)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurements: its columns and their parsers."""

    name: str
    about: str
    needs: Mapping[str, Read]
    takes: Mapping[str, Read]

    @property
    def columns(self) -> str:
        """Its columns, optional ones in brackets."""
        return ",".join(self.needs) + "".join(f"[,{name}]" for name in self.takes)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Parsed measurements: rows by column in file order, and the ignored columns."""

    source: str
    kind: Kind
    rows: Sequence[Row]
    ignored: Sequence[str]

    def groups(self) -> Mapping[tuple[str, str], Sequence[Row]]:
        """Return the rows by model and phase, in order of first appearance."""
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
    """Return a number; a loss may be nan, which means that training diverged."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {shown(text)}") from None


def _name(text: str) -> str:
    if wrong := name_error(text):
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
    """Return the measurements of a file, or of stdin for `-`; without a kind, the header determines it.

    Raises:
        CommandError: the file cannot be read.
        BadMeasurements: the file has mistakes.
    """
    source = source_of(path)
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise usage_error(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise usage_error(f"{source} is larger than {FILE_BYTES_MAX // 2**20} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadMeasurements(source, [Mistake(SourcePosition(source, line), "", "not UTF-8 text")]) from None
    return read_measurements(text, source, kind)


def read_measurements(text: str, source: str, kind: str = "") -> Measurements:
    """Return the measurements of a CSV text.

    Raises:
        BadMeasurements: names every mistake.
    """
    lines = _lines(text)
    number, header = next(lines, (1, ""))
    if not header:
        raise BadMeasurements(source, [Mistake(SourcePosition(source), "", "is empty")], _hint())
    delimiter = max(DELIMITERS, key=header.count)
    titles = [(OTHER_NAMES.get(_title(field), _title(field)), place) for field, place in _fields(header, delimiter)]
    names = [name for name, _ in titles]
    mistakes = [
        Mistake(SourcePosition(source, number, place), name, "duplicate column")
        for index, (name, place) in enumerate(titles)
        if name in names[:index]
    ]
    known = _detect_kind(names, kind, SourcePosition(source, number))
    reads = {**known.takes, **known.needs}
    rows: list[Row] = []
    for number, line in lines:
        fields = list(_fields(line, delimiter))
        if len(fields) != len(names):
            wrong = f"has {len(fields)} fields, but the header has {len(names)}"
            mistakes.append(
                Mistake(SourcePosition(source, number, fields[min(len(fields), len(names)) - 1][1]), "", wrong)
            )
            continue
        rows.append(_row(SourcePosition(source, number), names, fields, reads, mistakes))
        if len(rows) > ROWS_MAX:
            mistakes.append(Mistake(SourcePosition(source, number), "", f"too many rows; a file may have {ROWS_MAX}"))
            break
    if not (rows or mistakes):
        mistakes.append(Mistake(SourcePosition(source, number), "", "no measurements after the header"))
    if mistakes:
        raise BadMeasurements(source, mistakes)
    return Measurements(source, known, rows, [name for name in names if name not in reads])


def _row(
    place: SourcePosition,
    names: Sequence[str],
    fields: Sequence[tuple[str, int]],
    reads: Mapping[str, Read],
    mistakes: list[Mistake],
) -> Row:
    """Return a row and add its mistakes to `mistakes`. Empty optional names are omitted."""
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


def _detect_kind(names: Sequence[str], wanted: str, place: SourcePosition) -> Kind:
    """Return the kind that matches a header: of those with all required columns, the one that requires the most.

    Raises:
        CommandError: the requested kind is unknown.
        BadMeasurements: columns are missing.
    """
    if wanted and wanted not in KINDS:
        raise usage_error(f"--kind: unknown kind {shown(wanted)}", hint=f"kinds are {', '.join(KINDS)}")
    if wanted:
        known = KINDS[wanted]
        if missing := [name for name in known.needs if name not in names]:
            message = f"column {', '.join(missing)} is missing for kind {wanted}"
            raise BadMeasurements(
                place.source, [Mistake(place, "", message)], f"{wanted} has the columns {known.columns}"
            )
        return known
    fitting = [kind for kind in KINDS.values() if all(name in names for name in kind.needs)]
    if not fitting:
        message = f"columns {', '.join(map(shown, names[:8]))} match no kind of measurements"
        raise BadMeasurements(place.source, [Mistake(place, "", message)], _hint(names))
    return max(fitting, key=lambda kind: len(kind.needs))


def _hint(names: Iterable[str] = ()) -> str:
    """Return a hint with the columns of similar kinds, or of all kinds."""
    near = [kind for kind in KINDS.values() if any(nearest(name, kind.needs) for name in names)]
    return "columns may be " + "; or ".join(kind.columns for kind in near or KINDS.values())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _title(field: str) -> str:
    return field.lower().replace(" ", "_").replace("-", "_")


def _fields(line: str, delimiter: str) -> Iterator[tuple[str, int]]:
    """Yield each field of a line, without surrounding quotes and spaces, and the column where it begins.

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
    yield line[at:], at + 1  # text after a closing quote: the rest is one field
