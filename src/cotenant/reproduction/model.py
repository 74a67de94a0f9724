"""The model of a reproduction: what a paper claims, what is run for it, and the results.

Theory of operation. A paper is a list of claims and of cases. A case is one run of one arm on one workload with one
seed; it is work that another process can do, and gives figures by name. When the cases are done, or as many of them as
there was time for, the paper draws its conclusions: each claim measured on each workload, with a verdict that follows
from the figures by one rule, and tables and charts.
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
from cotenant.simulator.traces.rows import open_text
from cotenant.simulator.traces.trace_job import BadTrace

Stopped = Callable[[], bool]
REACHED_SHARE = 0.02  # of the published figure: within it, and within the spread, two figures are equal


class BadData(Exception):
    """An unusable data directory; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Data:
    """The directory of public traces; None: only bundled data is used."""

    directory: Path | None = None

    def check(self) -> None:
        """Check that the directory exists.

        Raises:
            BadData: it is not a directory.
        """
        if self.directory is not None and not self.directory.is_dir():
            raise BadData(f"{self.directory} is not a directory; docs/reproduction.md lists its expected contents")

    def file(self, name: str) -> Path | None:
        """Return a file of the data by its path in the directory; None if only bundled data is used.

        Raises:
            BadData: the file is not in the directory.
        """
        if self.directory is None:
            return None
        path = self.directory / name
        if not path.is_file():
            raise BadData(
                f"{self.directory} has no {name}; docs/reproduction.md lists the expected contents of the directory"
            )
        return path


BUNDLED = Data()


def table(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table with a header line, plain or gzipped.

    Raises:
        BadData: it cannot be read, lacks a column, or has no rows.
    """
    try:
        with open_text(path) as file:
            rows = csv.DictReader(file)
            if missing := [name for name in columns if name not in (rows.fieldnames or ())]:
                raise BadData(f"{path} is not the expected trace: it has no column {' and no '.join(missing)}")
            first = next(rows, None)
            if first is None:
                raise BadData(f"{path} is not the expected trace: it has no rows")
            yield first
            yield from rows
    except BadTrace as error:
        raise BadData(str(error)) from error
    except csv.Error as error:
        raise BadData(f"{path} cannot be read: {error}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of invalid numbers into an error that names the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadData(f"{path} is not the expected trace: {error}") from error


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's choices: a one-minute or the full version, the seeds, and the data."""

    quick: bool
    seeds: tuple[int, ...]
    data: Data = Data()


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one case by name, and series of them for charts, in order."""

    values: Mapping[str, float]
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class Work(Protocol):
    """Work for another process: it can be pickled. Its `repr` identifies it in the cache."""

    def run(self, stopped: Stopped) -> Figures | None:
        """Do it; None if stopped. An exception ends the reproduction with the case's name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one arm on one workload with one seed. `repeatable` False: its figures differ each time."""

    workload: str
    arm: str
    seed: int
    work: Work
    repeatable: bool = True

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the case within its paper."""
        return self.workload, self.arm, self.seed

    def __str__(self) -> str:
        """Return its name for users."""
        return f"{self.arm} on {self.workload}, seed {self.seed}"


class Better(StrEnum):
    """Which direction is better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Claim:
    """A headline figure of a paper, and its better direction. `source`: where it is stated, and how reliably.

    `most`: the paper reports the best of several settings, so ours is the best too. `figure` False: the paper states
    only a direction, `published` is 0, and it cannot be exceeded.
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
    """How our figure compares with the published one."""

    EXCEEDED = "exceeded"
    REACHED = "reached"
    MISSED = "missed"
    OPEN = "open"  # not measured, for lack of time or data


def verdict_of(claim: Claim, ours: Spread) -> Verdict:
    """Return the verdict on a figure: equal within 2 % or one standard deviation, else better or worse.

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
    """A claim measured on one workload: our figure over the seeds, with an explanation if needed.

    `learned` False: the predictions were perfect, so the figure is a bound. `bound`: the best that could be had on the
    same workload, with everything that the claim is about at no cost. `drawn_names`: what is learned from are names
    that were drawn by the jobs' true run times, because the trace has none.
    """

    claim: Claim
    workload: str
    arm: str
    base: str
    ours: Spread | None
    learned: bool = True
    why: str = ""
    bound: Spread | None = None
    drawn_names: bool = False

    @property
    def predictions(self) -> str:
        """What predictions are based on, in words."""
        return ("learned, drawn names" if self.drawn_names else "learned") if self.learned else "perfect"

    @property
    def verdict(self) -> Verdict:
        """How our figure compares with the published one."""
        return verdict_of(self.claim, self.ours) if self.ours else Verdict.OPEN


Cell = str | float


@dataclass(frozen=True, slots=True)
class Table:
    """A table: numbers are formatted by their column's format, such as ".1f" or "+.1%"; strings as they are."""

    name: str
    title: str
    columns: tuple[str, ...]
    formats: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class Shape(StrEnum):
    """How a chart is drawn."""

    BARS = "bars"  # a group of bars for each x, one bar for each line
    LINES = "lines"  # over numbers
    STEPS = "steps"  # cumulative shares: `x` of each line holds its sorted values


@dataclass(frozen=True, slots=True)
class Line:
    """One arm's figures in a chart; `low` and `high` are the ends of its spread, or empty."""

    label: str
    y: tuple[float, ...]
    x: tuple[float, ...] = ()  # empty: those of the chart
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: `name` is for its file, `caption` gives the better direction. `marks` are published figures."""

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
    """The results of a paper's cases."""

    measured: tuple[Measured, ...]
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


class Done:
    """The figures of the finished cases."""

    def __init__(self, figures: Mapping[tuple[str, str, int], Figures]) -> None:
        self._figures = figures

    def seeds(self, workload: str, *arms: str) -> list[int]:
        """Return the seeds with which all the given arms were run on a workload."""
        having = [{seed for load, arm, seed in self._figures if (load, arm) == (workload, one)} for one in arms]
        return sorted(set.intersection(*having)) if having else []

    def of(self, workload: str, arm: str) -> dict[int, Figures]:
        """Return an arm's figures on a workload by seed."""
        return {seed: self._figures[workload, arm, seed] for seed in self.seeds(workload, arm)}

    def spread(self, workload: str, arm: str, name: str) -> Spread | None:
        """Return a figure of an arm over the seeds; None if no case has finished."""
        return spread_of(figures.values[name] for figures in self.of(workload, arm).values())

    def mean(self, workload: str, arm: str, name: str) -> float:
        """Return the mean of a figure over the seeds; nan if no case has finished."""
        spread = self.spread(workload, arm, name)
        return spread.mean if spread else math.nan

    def versus(
        self, workload: str, arm: str, base: str, name: str, how: Callable[[float, float], float]
    ) -> Spread | None:
        """Compare a figure of an arm with another arm's, seed by seed: `how` gets both, this arm's first."""
        mine, theirs = self.of(workload, arm), self.of(workload, base)
        both = self.seeds(workload, arm, base)
        return spread_of(how(mine[seed].values[name], theirs[seed].values[name]) for seed in both)


def spread_of(values: Iterable[float]) -> Spread | None:
    """Return a spread of the finite figures; None if there are none."""
    finite = tuple(value for value in values if math.isfinite(value))
    return Spread(finite) if finite else None


def line_of(label: str, spreads: Sequence[Spread | None], missing: float = 0.0) -> Line:
    """Return a chart's line of means and the ends of their spreads; `missing` for missing measurements."""
    return Line(
        label,
        tuple(spread.mean if spread else missing for spread in spreads),
        low=tuple(min(spread.per_seed) if spread else missing for spread in spreads),
        high=tuple(max(spread.per_seed) if spread else missing for spread in spreads),
    )


def gain_percent(ours: float, theirs: float) -> float:
    """Return how much larger ours is, in percent; nan if theirs is 0.

    >>> gain_percent(150.0, 100.0)
    50.0
    """
    return 100.0 * (ours / theirs - 1.0) if theirs else math.nan


class Paper(Protocol):
    """A reproducible paper. `unsaid`: what it leaves open, and our choices."""

    name: str
    title: str
    reference: str
    claims: Sequence[Claim]
    assumptions: Sequence[str]
    unsaid: Sequence[str]

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return the cases, the most informative first, since a stopped run has only those.

        Raises:
            BadData: the given data is unusable.
        """

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return conclusions from the finished cases, if any."""
