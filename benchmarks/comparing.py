"""Comparison of benchmark results with the committed ones, and the Markdown report.

Figures are compared by their ratio to the reference of the same run, because machines differ and are shared. A figure
without a reference is compared by its value, except times and rates, which do not transfer between machines. A figure
is worse if it moved in the wrong direction by more than its spread: the spread of the committed runs, or a fixed
tolerance if that is larger or only one run is committed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE, TOLERANCE_ONCE, TOLERANCE_EXACT = 1.3, 1.6, 1.02
EXACT_RUNS_MIN = 2
TIMES = ("s", "ms", "µs", "us", "ns")
LESS_IS_BETTER = (*TIMES, "MiB", "KiB", "GiB", "% of a core")
RATES = ("1/s", "/s", "per second", "events/s")
UNKNOWN, LESS, MORE = "", "less", "more"


@dataclass(frozen=True, slots=True)
class BaselineFigure:
    """A committed figure: median, minimum and maximum of its ratio (or value), and the number of runs."""

    median: float
    least: float
    most: float
    runs: int

    @property
    def spread(self) -> float:
        """Return the factor by which another run may differ without counting as changed.

        >>> BaselineFigure(1.0, 1.0, 1.0, 2).spread, BaselineFigure(1.0, 0.9, 1.1, 2).spread
        (1.02, 1.3)
        >>> BaselineFigure(1.0, 0.5, 1.5, 3).spread
        3.0
        """
        if self.runs < EXACT_RUNS_MIN:
            return TOLERANCE_ONCE
        if self.least == self.most:
            return TOLERANCE_EXACT
        return max(TOLERANCE, self.most / self.least) if self.least > 0 else TOLERANCE_ONCE


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that differs from the committed one; `worse` is None if neither direction is better."""

    benchmark: str
    name: str
    before: float
    now: float
    spread: float
    worse: bool | None

    def __str__(self) -> str:
        """Return the change in one line."""
        how = {True: "worse", False: "better", None: "changed"}[self.worse]
        factor = f"{self.now / self.before:.2f} ×" if self.before else "from 0"
        return (
            f"{how}: {self.benchmark}: {self.name}: {self.before:.4g} → {self.now:.4g} "
            f"({factor}, spread {self.spread:.2f})"
        )


def better_direction(row: Mapping[str, Any]) -> str:
    """Return which direction is better, from the bar or else from the unit.

    >>> better_direction({"bar": "≥ 200", "unit": "ms"}), better_direction({"bar": "", "unit": "ms"})
    ('more', 'less')
    """
    bar = str(row["bar"])
    if any(sign in bar for sign in ("≥", ">=", "at least")):
        return MORE
    if any(sign in bar for sign in ("≤", "<=", "at most")) or bar == "0":
        return LESS
    if row["unit"] in RATES:
        return MORE
    return LESS if row["unit"] in LESS_IS_BETTER else UNKNOWN


def comparable_value(row: Mapping[str, Any]) -> float | None:
    """Return the figure that is comparable across machines: the ratio, or the value unless it is a time or rate."""
    if row["ratio"] is not None:
        return float(row["ratio"])
    if row["reference_name"] or row["unit"] in (*TIMES, *RATES):
        return None
    return float(row["value"])


def summarize_runs(runs: Sequence[Iterable[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Summarize the runs of a benchmark for the committed file, by row name."""
    seen: dict[str, list[float]] = {}
    for rows in runs:
        for row in rows:
            if (figure := comparable_value(row)) is not None:
                seen.setdefault(row["name"], []).append(figure)
    return {
        name: {
            "median": float(f"{statistics.median(figures):.6g}"),
            "least": float(f"{min(figures):.6g}"),
            "most": float(f"{max(figures):.6g}"),
            "runs": len(figures),
        }
        for name, figures in seen.items()
    }


def changes(
    benchmark: str, rows: Iterable[Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Yield the figures of a benchmark that differ from the committed ones by more than their spread."""
    for row in rows:
        now = comparable_value(row)
        if now is None or row["name"] not in kept:
            continue
        before = BaselineFigure(**kept[row["name"]])
        if not differs(before, now):
            continue
        way = better_direction(row)
        worse = None if way == UNKNOWN else (now > before.median) == (way == LESS)
        yield Change(benchmark, row["name"], before.median, now, before.spread, worse)


def differs(before: BaselineFigure, now: float) -> bool:
    """Return whether a figure differs from the committed median by more than the spread.

    >>> differs(BaselineFigure(1.0, 0.9, 1.1, 2), 1.25), differs(BaselineFigure(1.0, 0.9, 1.1, 2), 1.4)
    (False, True)
    >>> differs(BaselineFigure(0.0, 0.0, 0.0, 2), 1)
    True
    """
    if before.median <= 0 or now <= 0:
        return now != before.median and abs(now - before.median) > (before.spread - 1) * abs(before.median)
    return max(now / before.median, before.median / now) > before.spread


# Markdown ----------------------------------------------------------------------------------------------------------

HEAD = (
    "| figure | value | unit | reference | its value | ratio | bar | met | committed |\n"
    "|---|--:|---|---|--:|--:|---|---|--:|"
)


def markdown(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Return the report as Markdown, with the committed figures in the last column."""
    taken = result["taken"]
    parts = [f"# Benchmarks, {taken['form']} form, {taken['time']}", conditions(taken)]
    for name, done in result["benchmarks"].items():
        seconds = f"{done['seconds']:.0f} s, {done['processor_seconds']:.0f} s CPU"
        parts.append(f"## {name}\n\n{seconds}" + (f"; **{done['error']}**" if done["error"] else ""))
        if done["rows"]:
            kept = baseline.get("benchmarks", {}).get(name, {})
            parts.append("\n".join([HEAD, *(_line(row, kept) for row in done["rows"])]))
    if left_out := result.get("left_out"):
        parts.append("\n".join(["## Skipped\n", *(f"- {name}: {why}" for name, why in left_out.items())]))
    return "\n\n".join(parts) + "\n"


def conditions(taken: Mapping[str, Any]) -> str:
    """Describe the machine of a result and its load."""
    load = f"{taken['load_per_core']:.2f} runnable processes per core at the start"
    noisy = ": **the machine was loaded**, so times are unreliable" if taken["noisy"] else ""
    return f"{taken['cores']} cores, Python {taken['python']}; {load}{noisy}."


def _line(row: Mapping[str, Any], kept: Mapping[str, Mapping[str, Any]]) -> str:
    was = kept.get(row["name"], {}).get("median")
    holds = {None: "", True: "yes", False: "**no**"}[row["holds"]]
    cells = [
        row["name"], _number(row["value"]), row["unit"], row["reference_name"], _number(row["reference"]),
        _number(row["ratio"]), row["bar"], holds, _number(was),
    ]  # fmt: skip
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
