"""Columns of Slurm's lists: formats such as `%.18i %R` and `name:20,state`, and the rows that they give."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from cotenant.cli.slurm.outcome import SlurmError

T = TypeVar("T")
_FIELD = re.compile(r"%(\.?)(\d*)([A-Za-z])")
_LONG = r"(?s)([A-Za-z_-]+)(?::(\.?)(-?)(\d*)(.*))?"
LONG_WIDTH = 20


class Column(NamedTuple, Generic[T]):
    """A column: its heading and its value; one that is `whole` is as wide as its longest value, and never cut off."""

    heading: str
    value: Callable[[T], str]
    whole: bool = False


class Cell(NamedTuple, Generic[T]):
    """A column in a format, between the texts around it; without a width it is as wide as its value."""

    column: Column[T]
    width: int = 0
    right: bool = False
    before: str = ""
    after: str = ""


def read_format(text: str, columns: Mapping[str, Column[T]], kind: str) -> list[Cell[T]]:
    """Return the cells of a format with `%` and letters.

    Raises:
        SlurmError: a letter has no column.
    """
    cells: list[Cell[T]] = []
    end = 0
    for match in _FIELD.finditer(text):
        if match[3] not in columns:
            raise SlurmError(f"Invalid {kind} format specification: {match[3]}")
        before = text[end : match.start()]
        cells.append(Cell(columns[match[3]], int(match[2] or 0), bool(match[1]), before))
        end = match.end()
    if not cells:
        raise SlurmError(f'Format specification is invalid: "{text}"')
    cells[-1] = cells[-1]._replace(after=text[end:])
    return cells


def read_long_format(text: str, columns: Mapping[str, Column[T]], kind: str) -> list[Cell[T]]:
    """Return the cells of a format with names, such as `jobid:20,name:.10`.

    Raises:
        SlurmError: a name has no column.
    """
    cells = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(_LONG, part)
        found = columns.get(match[1].lower().replace("-", "").replace("_", "")) if match else None
        if not match or found is None:
            raise SlurmError(f"Invalid {kind} format specification: {part}")
        width = int(match[4]) if match[4] else LONG_WIDTH
        cells.append(Cell(found, width, bool(match[2]), after=match[5] or ""))
    return cells


def lines(cells: Sequence[Cell[T]], rows: Iterable[T], *, heading: bool) -> Iterable[str]:
    """Yield the lines of a list."""
    table = [[cell.column.value(row) for cell in cells] for row in rows]
    longest = [max(map(len, column)) for column in zip(*table, strict=True)] or [0] * len(cells)
    fitting = [
        cell._replace(width=max(cell.width, length)) if cell.width and cell.column.whole else cell
        for cell, length in zip(cells, longest, strict=True)
    ]
    for values in ([[cell.column.heading for cell in cells]] if heading else []) + table:
        yield "".join(map(_padded, fitting, values))


def _padded(cell: Cell[T], text: str) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in text)
    if cell.width:
        cut = shown if cell.column.whole else shown[: cell.width]
        shown = cut.rjust(cell.width) if cell.right else cut.ljust(cell.width)
    return f"{cell.before}{shown}{cell.after}"
