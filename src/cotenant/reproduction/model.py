"""The words of a reproduction: what a paper claims, what is run for it, and what came of it.

Theory of operation. A paper is a list of claims and of cases. A case is one run of one arm on one workload with one
seed; it is work that another process can do, and gives figures by name. When the cases are done, or as many of them as
there was time for, the paper draws its conclusions: each claim measured on each workload, with a verdict that follows
from the figures by one rule, and tables and charts for those who would rather look.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cotenant.simulator.comparison.summary import Spread

Stopped = Callable[[], bool]
REACHED_SHARE = 0.02  # of the published figure: within it, and within the spread, two figures are the same


class BadData(Exception):
    """A directory of data that cannot be used, and why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Data:
    """Where public traces lie; None: only what is bundled is used."""

    directory: Path | None = None

    def check(self) -> None:
        """Look whether it is there.

        Raises:
            BadData: it is no directory.
        """
        if self.directory is not None and not self.directory.is_dir():
            raise BadData(f"{self.directory} is no directory; docs/reproduction.md tells what it has to hold")

    def file(self, name: str) -> Path | None:
        """Find a file of the data by its path in the directory; None where only what is bundled is to be used.

        Raises:
            BadData: there is a directory and the file is not in it.
        """
        if self.directory is None:
            return None
        path = self.directory / name
        if not path.is_file():
            raise BadData(f"{self.directory} has no {name}; docs/reproduction.md tells what the directory has to hold")
        return path


BUNDLED = Data()


def table(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    """Read a table with a heading line, row by row.

    Raises:
        BadData: it cannot be read, has not these columns, or no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in columns if name not in (rows.fieldnames or ())]:
                raise BadData(f"{path} is no trace as it is expected: it has no column {' and no '.join(missing)}")
            first = next(rows, None)
            if first is None:
                raise BadData(f"{path} is no trace as it is expected: it has no rows")
            yield first
            yield from rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} cannot be read: {error}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a number that is none raises into a word on the file that it is in."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadData(f"{path} is no trace as it is expected: {error}") from error


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants: a minute's version or the whole, with which seeds, on which data."""

    quick: bool
    seeds: tuple[int, ...]
    data: Data = Data()


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of one case: figures by name, and series of them for charts, in the order of what they are over."""

    values: Mapping[str, float]
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class Work(Protocol):
    """Work that another process can be given: it can be pickled. What it is is in its `repr`, to be known again."""

    def run(self, stopped: Stopped) -> Figures | None:
        """Do it; None where it was stopped. What is raised ends the reproduction with the case's name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one arm on one workload with one seed. `repeatable` False: another time its figures are others."""

    workload: str
    arm: str
    seed: int
    work: Work
    repeatable: bool = True

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the paper's other cases."""
        return self.workload, self.arm, self.seed

    def __str__(self) -> str:
        """Its name, for people."""
        return f"{self.arm} on {self.workload}, seed {self.seed}"


class Better(StrEnum):
    """Which way is better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Claim:
    """A headline figure of a paper, and whether more of it is better. `source`: where it stands, and how sure it is.

    `most`: the paper reports the best of several settings, so ours is the best too. `figure` False: it says only which
    way something goes, `published` is 0, and there is nothing to exceed.
    """

    name: str
    text: str
    published: float
    unit: str
    better: Better
    source: str
    most: bool = False
    figure: bool = True


class Verdict(StrEnum):
    """How ours stands to the published figure."""

    EXCEEDED = "exceeded"
    REACHED = "reached"
    MISSED = "missed"
    OPEN = "open"  # it was not measured: there was no time, or no data


def verdict_of(claim: Claim, ours: Spread) -> Verdict:
    """Judge a figure: the same as the published one within 2 % of it or one standard deviation, else better or worse.

    >>> claim = Claim("a", "", 20.0, "%", Better.HIGHER, "")
    >>> [verdict_of(claim, Spread((one,))).value for one in (25.0, 19.8, 15.0)]
    ['exceeded', 'reached', 'missed']
    """
    gain = ours.mean - claim.published if claim.better is Better.HIGHER else claim.published - ours.mean
    same = max(REACHED_SHARE * abs(claim.published), ours.sd)
    if not claim.figure:
        return Verdict.REACHED if gain > same else Verdict.MISSED
    if abs(gain) <= same:
        return Verdict.REACHED
    return Verdict.EXCEEDED if gain > 0 else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Measured:
    """A claim measured on one workload: ours over the seeds, and why it is as it is where that is not plain.

    `learned` False: the predictions were perfect, so that the figure is a bound for what can be had.
    """

    claim: Claim
    workload: str
    arm: str
    base: str
    ours: Spread | None
    learned: bool = True
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """How ours stands to the published figure."""
        return verdict_of(self.claim, self.ours) if self.ours else Verdict.OPEN


Cell = str | float


@dataclass(frozen=True, slots=True)
class Table:
    """A table: numbers are written by their column's format, such as ".1f" or "+.1%"; texts as they stand."""

    name: str
    title: str
    columns: tuple[str, ...]
    formats: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class Shape(StrEnum):
    """How a chart is drawn."""

    BARS = "bars"  # a group of bars for each x, a bar for each line
    LINES = "lines"  # over numbers
    STEPS = "steps"  # the share that is no larger: `x` of each line are its values, sorted


@dataclass(frozen=True, slots=True)
class Line:
    """One arm's figures in a chart; `low` and `high` are the ends of its spread, or nothing."""

    label: str
    y: tuple[float, ...]
    x: tuple[float, ...] = ()  # empty: those of the chart
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: `name` for its file, `caption` says which way is better. `marks` are published figures, to compare."""

    name: str
    title: str
    caption: str
    shape: Shape
    x_label: str
    y_label: str
    x: tuple[str, ...] | tuple[float, ...]
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = ()
    log_x: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What a paper's cases show."""

    measured: tuple[Measured, ...]
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


class Done:
    """The figures of the cases that were done."""

    def __init__(self, figures: Mapping[tuple[str, str, int], Figures]) -> None:
        self._figures = figures

    def seeds(self, workload: str, *arms: str) -> list[int]:
        """List the seeds with which all of some arms were run on a workload."""
        having = [{seed for load, arm, seed in self._figures if (load, arm) == (workload, one)} for one in arms]
        return sorted(set.intersection(*having)) if having else []

    def of(self, workload: str, arm: str) -> dict[int, Figures]:
        """Give an arm's figures on a workload by seed."""
        return {seed: self._figures[workload, arm, seed] for seed in self.seeds(workload, arm)}

    def spread(self, workload: str, arm: str, name: str) -> Spread | None:
        """Give a figure of an arm over the seeds; None where no case was done."""
        return spread_of(figures.values[name] for figures in self.of(workload, arm).values())

    def mean(self, workload: str, arm: str, name: str) -> float:
        """Give the mean of a figure over the seeds; nan where no case was done."""
        spread = self.spread(workload, arm, name)
        return spread.mean if spread else math.nan

    def versus(
        self, workload: str, arm: str, base: str, name: str, how: Callable[[float, float], float]
    ) -> Spread | None:
        """Set a figure of an arm against another arm's, seed by seed: `how` is given both, this arm's first."""
        mine, theirs = self.of(workload, arm), self.of(workload, base)
        both = self.seeds(workload, arm, base)
        return spread_of(how(mine[seed].values[name], theirs[seed].values[name]) for seed in both)


def spread_of(values: Iterable[float]) -> Spread | None:
    """Make a spread of the figures that are numbers; None where none is."""
    finite = tuple(value for value in values if math.isfinite(value))
    return Spread(finite) if finite else None


def line_of(label: str, spreads: Sequence[Spread | None], missing: float = 0.0) -> Line:
    """Make a chart's line of means and of the ends of their spreads; `missing` where nothing was measured."""
    return Line(
        label,
        tuple(spread.mean if spread else missing for spread in spreads),
        low=tuple(min(spread.per_seed) if spread else missing for spread in spreads),
        high=tuple(max(spread.per_seed) if spread else missing for spread in spreads),
    )


def gain_percent(ours: float, theirs: float) -> float:
    """Say how much more ours is, in percent; nan where theirs is 0.

    >>> gain_percent(150.0, 100.0)
    50.0
    """
    return 100.0 * (ours / theirs - 1.0) if theirs else math.nan


class Paper(Protocol):
    """A paper that can be reproduced. `unsaid`: what it does not say, and what stands in its place here."""

    name: str
    title: str
    reference: str
    claims: Sequence[Claim]
    assumptions: Sequence[str]
    unsaid: Sequence[str]

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Say what is to be run, the most telling cases first: of a run that is cut short those are done.

        Raises:
            BadData: the data that was given cannot be used.
        """

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Conclude from the cases that were done, be it none."""
