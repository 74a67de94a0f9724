"""Tables and cards: within the terminal's width and in color on a terminal, plain and untruncated elsewhere.

Texts from elsewhere (names, reasons) are never interpreted as markup and cannot move a terminal's cursor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

from cotenant.cli.outcome import sanitize

if TYPE_CHECKING:  # rich is slow to import, and pipes do not need it
    from rich.console import Console
    from rich.text import Text

WIDTH_MAX = 120
GAP = "  "
ELASTIC_WIDTH_MIN = 6
STYLES = {
    # phases of jobs
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "stopping": "magenta",
    "suspended": "blue",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "dim",
    # states of nodes
    "ready": "green",
    "cordoned": "yellow",
    "draining": "magenta",
    "away": "red",
    "lost": "bold red",
    # verdicts on claims
    "exceeded": "bold green",
    "reached": "green",
    "missed": "bold red",
    "open": "dim",
    # certificates
    "valid": "green",
    "due": "yellow",
    "expired": "bold red",
    "not yet valid": "bold red",
    # replicas
    "leads": "bold green",
    "follows": "green",
    "serves": "green",
    "waits": "yellow",
    # health of policies
    "yes": "green",
    "no": "bold red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: `elastic` columns are truncated when space is scarce, `styled` ones are colored by their value."""

    title: str
    right: bool = False
    elastic: bool = False
    styled: bool = False


Row = Sequence[str]


def print_table(columns: Sequence[Column], rows: Iterable[Row], nothing: str = "") -> None:
    """Print rows under their titles; without rows, print `nothing` on stderr."""
    cleaned = [[sanitize(cell) for cell in row] for row in rows]
    if not cleaned and nothing:
        print(nothing, file=sys.stderr)
    elif sys.stdout.isatty():
        out = console()
        out.print(styled(columns, cleaned, out.width), soft_wrap=True)
    else:
        print("\n".join(plain_lines(columns, cleaned)))


def plain_lines(columns: Sequence[Column], rows: Sequence[Row], width_max: int | None = None) -> list[str]:
    """Return a table aligned with spaces; with `width_max`, elastic columns are truncated to fit.

    >>> plain_lines([Column("ID"), Column("GPUS", right=True)], [["a1", "8"]])
    ['ID  GPUS', 'a1     8']
    """
    return ["".join(cells).rstrip() for cells in _cells(columns, rows, width_max)]


def styled(columns: Sequence[Column], rows: Sequence[Row], width_max: int) -> Text:
    """Return a table with colors."""
    from rich.text import Text

    made = Text(no_wrap=True, overflow="crop")
    for number, cells in enumerate(_cells(columns, rows, width_max)):
        if number:
            made.append("\n")
        for cell, column in zip(cells, columns, strict=True):
            style = STYLES.get(cell.strip(), "") if column.styled else ""
            made.append(cell, style=style if number else "bold")
    return made


def _cells(columns: Sequence[Column], rows: Sequence[Row], width_max: int | None) -> list[list[str]]:
    """Return cells padded to their column's width, including the gap to the next column."""
    lines = [[column.title for column in columns], *rows]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(columns))]
    if width_max is not None:
        widths = _shrunk(columns, widths, width_max - len(GAP) * (len(columns) - 1))
    last = len(columns) - 1
    return [
        [
            _padded(_shortened(cell, widths[index]), widths[index], columns[index].right) + GAP * (index < last)
            for index, cell in enumerate(line)
        ]
        for line in lines
    ]


def _shrunk(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Return widths reduced, always at the widest elastic column, until all columns fit or none can shrink."""
    left = list(widths)
    elastic = [index for index, column in enumerate(columns) if column.elastic]
    while sum(left) > room and elastic:
        widest = max(elastic, key=lambda index: (left[index], index))
        if left[widest] <= ELASTIC_WIDTH_MIN:
            break
        left[widest] -= 1
    return left


def _shortened(cell: str, width: int) -> str:
    if _width(cell) <= width:
        return cell
    kept = cell
    while _width(kept) >= width:
        kept = kept[:-1]
    return f"{kept}…"


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _width(text: str) -> int:
    """Return how many terminal columns a text takes.

    >>> _width("abc"), _width("漢字")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def console() -> Console:
    """Return a console on stdout, limited to a readable width."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    if made.width > WIDTH_MAX:
        made.width = WIDTH_MAX
    return made


def print_card(pairs: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs, one per line; pairs without a value are omitted."""
    kept = [(name, sanitize(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        print(f"{name.ljust(width)}  {value}")


def join_or_count(words: Sequence[str], count_max: int, noun: str) -> str:
    """Return a few words joined by commas, or the count of many.

    >>> join_or_count(["n1", "n2"], 2, "nodes"), join_or_count(["n1", "n2", "n3"], 2, "nodes")
    ('n1,n2', '3 nodes')
    """
    return ",".join(words) if len(words) <= count_max else f"{len(words)} {noun}"
