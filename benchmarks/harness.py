"""Benchmark harness: rows with a reference measured in the same run, and their output.

Machines are shared and noisy, so a figure alone says little. Each row also carries a reference that exists on every
machine (an empty call, a raw commit), measured within the same minutes, and the ratio to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from cotenant import telemetry


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `bar` describes the goal; `holds` is None without a goal."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = ""
    bar: str = ""
    holds: bool | None = None

    @property
    def ratio(self) -> float | None:
        """Return the figure divided by its reference.

        >>> Row("a", 50.0, "1/s", reference=200.0).ratio
        0.25
        """
        return self.value / self.reference if self.reference else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly.

    >>> percentile([1.0, 2.0, 3.0], 50)
    2.0
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rate_per_second(work: Callable[[], object], *, seconds: float = 0.5, rounds: int = 3) -> float:
    """Return the calls per second of a function: the median of a few rounds."""
    rates = []
    for _ in range(rounds):
        count, begin = 0, time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds:
            work()
            count += 1
        rates.append(count / passed)
    return statistics.median(rates)


def main(measure: Callable[[bool], Sequence[Row]], description: str) -> None:
    """Run a benchmark's `measure(quick)` and print its rows; exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON array")
    parser.add_argument("--quick", action="store_true", help="run the short form, about a minute")
    arguments = parser.parse_args()
    os.environ.setdefault("COTENANT_LOG", "error")
    telemetry.setup("benchmark")  # logs go to stderr; stdout has only rows
    rows = measure(arguments.quick)
    if arguments.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
    else:
        print_table(rows)
    sys.exit(any(row.holds is False for row in rows))


def print_table(rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("figure", "value", "unit", "reference", "its value", "ratio", "bar", "met"):
        table.add_column(title, justify="right" if title in ("value", "its value", "ratio") else "left")
    for row in rows:
        holds = {None: "", True: "[green]yes[/]", False: "[bold red]no[/]"}[row.holds]
        reference = "" if row.reference is None else f"{row.reference:,.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.reference_name, reference, ratio, row.bar, holds)
    Console(width=max(120, Console().width)).print(table)
