"""What a run of all benchmarks is beside the last committed one, and how both are written down.

Figures are compared by their ratio to the reference of the same run, for machines differ and are shared. One without a
reference is compared as it is, unless it is a time or a rate, which says nothing about another machine. A figure has
become worse when its ratio has gone the wrong way by more than the spread: what the committed runs were apart, or a
stated tolerance where that is more or there was only one run.
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
    """A figure of the committed runs: the median, the least and the most of its ratio (or value), by how many runs."""

    median: float
    least: float
    most: float
    runs: int

    @property
    def spread(self) -> float:
        """By what factor another run may differ without being called another.

        >>> BaselineFigure(1.0, 1.0, 1.0, 2).spread, BaselineFigure(1.0, 0.9, 1.1, 2).spread, BaselineFigure(1.0, 0.5, 1.5, 3).spread
        (1.02, 1.3, 3.0)
        """
        if self.runs < EXACT_RUNS_MIN:
            return TOLERANCE_ONCE
        if self.least == self.most:
            return TOLERANCE_EXACT
        return max(TOLERANCE, self.most / self.least) if self.least > 0 else TOLERANCE_ONCE


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that is not what it was. `worse` is None where nobody says which way is better."""

    benchmark: str
    name: str
    before: float
    now: float
    spread: float
    worse: bool | None

    def __str__(self) -> str:
        """Write it in one line."""
        how = {True: "worse", False: "better", None: "other"}[self.worse]
        times = f"{self.now / self.before:.2f} times" if self.before else "not"
        return (
            f"{how}: {self.benchmark}: {self.name}: {self.before:.4g} → {self.now:.4g}, {times} what it was "
            f"(spread {self.spread:.2f})"
        )


def better_direction(row: Mapping[str, Any]) -> str:
    """Tell which way is better: by the bar, else by the unit.

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
    """What of a row can be held beside another machine's: its ratio, or the figure where it is no time."""
    if row["ratio"] is not None:
        return float(row["ratio"])
    if row["reference_name"] or row["unit"] in (*TIMES, *RATES):
        return None
    return float(row["value"])


def summarize_runs(runs: Sequence[Iterable[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Sum up the runs of one benchmark for the committed file, by the names of their rows."""
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
    """Tell which figures of a benchmark differ from the committed ones by more than the spread."""
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
    """Whether a figure is further from the committed median than the spread.

    >>> differs(BaselineFigure(1.0, 0.9, 1.1, 2), 1.25), differs(BaselineFigure(1.0, 0.9, 1.1, 2), 1.4), differs(BaselineFigure(0.0, 0.0, 0.0, 2), 1)
    (False, True, True)
    """
    if before.median <= 0 or now <= 0:
        return now != before.median and abs(now - before.median) > (before.spread - 1) * abs(before.median)
    return max(now / before.median, before.median / now) > before.spread


# How it is written ------------------------------------------------------------------------------------------------

HEAD = (
    "| figure | value | unit | beside | its value | ratio | bar | holds | was |\n|---|--:|---|---|--:|--:|---|---|--:|"
)


def markdown(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Write a whole result, with the committed figures in the last column."""
    taken = result["taken"]
    parts = [f"# Benchmarks, {taken['form']} form, {taken['time']}", conditions(taken)]
    for name, done in result["benchmarks"].items():
        seconds = f"{done['seconds']:.0f} s, {done['processor_seconds']:.0f} s of processor"
        parts.append(f"## {name}\n\n{seconds}" + (f"; **{done['error']}**" if done["error"] else ""))
        if done["rows"]:
            kept = baseline.get("benchmarks", {}).get(name, {})
            parts.append("\n".join([HEAD, *(_line(row, kept) for row in done["rows"])]))
    if left_out := result.get("left_out"):
        parts.append("\n".join(["## Not run\n", *(f"- {name}: {why}" for name, why in left_out.items())]))
    return "\n\n".join(parts) + "\n"


def conditions(taken: Mapping[str, Any]) -> str:
    """Tell on what machine a result was taken, and whether it was quiet."""
    load = f"{taken['load_per_core']:.2f} processes per core wanted to run when it began"
    noisy = ": **the machine was loaded**, so times are not to be taken at their word" if taken["noisy"] else ""
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
