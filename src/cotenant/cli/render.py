"""Tables: within 80 columns and in colour on a terminal, plain and unshortened anywhere else.

What was written by others (names, reasons) is never taken as markup, and cannot move a terminal's cursor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotenant.cli.outcome import harmless

if TYPE_CHECKING:  # rich is slow to import, and a pipe needs none of it
    from rich.console import Console
    from rich.table import Table

WIDTH_MAX = 120
GAP = "  "
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
    # health of policies
    "yes": "green",
    "no": "bold red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: `elastic` is shortened where room is scarce, `styled` takes its colour from its words."""

    title: str
    right: bool = False
    elastic: bool = False
    styled: bool = False


Row = Sequence[str]


def print_table(columns: Sequence[Column], rows: Iterable[Row], nothing: str = "") -> None:
    """Print rows under their titles; `nothing` stands on stderr where there are none."""
    cleaned = [[harmless(cell) for cell in row] for row in rows]
    if not cleaned and nothing:
        print(nothing, file=sys.stderr)
    elif sys.stdout.isatty():
        console().print(table(columns, cleaned))
    else:
        print("\n".join(plain_lines(columns, cleaned)))


def plain_lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Align a table with spaces.

    >>> plain_lines([Column("ID"), Column("GPUS", right=True)], [["a1", "8"]])
    ['ID  GPUS', 'a1     8']
    """
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return [
        GAP.join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]


def table(columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """Make a table that keeps ids and numbers whole and shortens the rest."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    lines = list(rows)
    for index, column in enumerate(columns):
        widest = max([len(column.title), *(len(line[index]) for line in lines)])
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=min(widest, 8) if column.elastic else widest,
        )
    for line in lines:
        made.add_row(
            *(
                Text(cell, style=STYLES.get(cell, "") if column.styled else "")
                for cell, column in zip(line, columns, strict=True)
            )
        )
    return made


def console() -> Console:
    """Open a console on stdout, not wider than reads well."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    if made.width > WIDTH_MAX:
        made.width = WIDTH_MAX
    return made


def print_card(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one a line; pairs without a value are left out."""
    kept = [(name, harmless(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        print(f"{name.ljust(width)}  {value}")


def joined(words: Sequence[str], count_max: int, noun: str) -> str:
    """Name a few, count many.

    >>> joined(["n1", "n2"], 2, "nodes"), joined(["n1", "n2", "n3"], 2, "nodes")
    ('n1,n2', '3 nodes')
    """
    return ",".join(words) if len(words) <= count_max else f"{len(words)} {noun}"
