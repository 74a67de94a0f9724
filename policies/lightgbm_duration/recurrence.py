"""Recent run times of ended jobs, by the facts they share with a new job.

A job is looked up on six levels, from all facts of its submission down to none: the identical facts; tenant, kind, GPUs
and shape (a "similar" job); tenant and kind; the submitter; tenant and GPUs; all jobs. For each key, the latest run
times are kept in arrival order and sorted, so that quantiles cost nothing when queried. The result for a level is a row
of figures that a model can learn from, computed only from ends that came before: a target encoding that never uses the
future. Rows lie in one array, so that those of many jobs are gathered at once. Memory is bounded: the least recently
used key is dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.policies.lightgbm_duration.finished_jobs import End, Facts

LATEST, LONG = 32, 1000  # run times behind the short and the long quantiles
NEWEST_KEPT = 3
LEVELS = ("exact", "like", "kind", "submitter", "size", "all")
FIGURES = (
    *("count", "last", "ended"),
    *("newest", "newest 3", "submitted"),  # of ended jobs, the most recently submitted; when that was
    *("p10", "p50", "p90"),  # of the latest
    *("long p10", "long p50", "long p90"),
    "surprises",  # share of surprising ends
)
COUNT, LAST, ENDED, NEWEST, NEWEST_MEAN, SUBMITTED, SHORT, LONGER, SURPRISES = *range(6), slice(6, 9), slice(9, 12), 12
SURPRISE = math.log(3.0)  # a run time this far from the median of its job class, in logarithms, is a surprise
SURPRISES_PRIOR = 4.0  # weight, in ends, of the share of the level above
KINDS_ENOUGH = 3  # ends of a job class before one of them can be a surprise

Keys = tuple[Hashable, ...]


def keys_of(facts: Facts) -> Keys:
    """Return the keys of a job, level by level."""
    (_, tenant), (_, kind), (_, gpus), (_, shape), (_, submitter) = facts[:5]
    return (
        facts,
        ("like", tenant, kind, gpus, shape),
        ("kind", tenant, kind),
        ("submitter", tenant, submitter),
        ("size", tenant, gpus),
        "all",
    )


@dataclass(slots=True)
class _Runs:
    """The latest run times of one key, in logarithms of seconds: in arrival order, and sorted."""

    slot: int
    came: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)
    count: int = 0
    judged: int = 0
    surprises: int = 0
    newest: list[tuple[float, float]] = field(default_factory=list)  # submission and run time, the latest last

    def add(self, figure: float, submitted: float) -> None:
        self.count += 1
        insort(self.newest, (submitted, figure))
        del self.newest[:-NEWEST_KEPT]
        self.came.append(figure)
        insort(self.ordered, figure)
        if len(self.came) > LONG:
            del self.ordered[bisect_left(self.ordered, self.came.popleft())]


class RecurrenceTable:
    """The rows of figures of all remembered keys.

    >>> table, facts = RecurrenceTable(), (("tenant", "a"), ("kind", "b"), ("gpus", 1.0), ("shape", "1"), ("user", "c"))
    >>> table.learn(End(facts, 0.0, 60.0, run_seconds=60.0))
    >>> round(float(np.exp(table.rows(table.slots(facts))[0, SHORT][1])))
    60
    """

    def __init__(self, keys_max: int = 30_000) -> None:
        self._keys_max = keys_max
        self._runs: OrderedDict[Hashable, _Runs] = OrderedDict()
        self._rows: Floats = np.empty((64, len(FIGURES)))
        self._rows[0] = _empty_row()

    def slots(self, facts: Facts) -> Sequence[int]:
        """Return the row numbers of a job's levels; 0 is the row of unknown keys."""
        runs = self._runs
        return [found.slot if (found := runs.get(key)) else 0 for key in keys_of(facts)]

    def rows(self, slots: Sequence[int] | Sequence[Sequence[int]]) -> Floats:
        """Gather rows. Run times are logarithms of seconds; unknown figures are NaN."""
        gathered: Floats = self._rows[np.asarray(slots, dtype=np.int64)]
        return gathered

    def surprising(self, end: End) -> bool | None:
        """Return whether an end was a surprise: as recorded, else by its distance from its class; None if unknown."""
        if end.surprising is not None:
            return end.surprising
        kind = self._runs.get(keys_of(end.facts)[LEVELS.index("kind")])
        if kind is None or kind.count < KINDS_ENOUGH:
            return None
        return abs(math.log(end.run_seconds) - _quantile(kind.ordered, 0.5)) > SURPRISE

    def learn(self, end: End) -> None:
        """Add an end on every level."""
        submitted = end.ended_seconds if math.isnan(end.submitted_seconds) else end.submitted_seconds
        figure, surprising, above = math.log(end.run_seconds), self.surprising(end), 0.2
        for key in reversed(keys_of(end.facts)):
            runs = self._touch(key)
            runs.add(figure, submitted)
            if surprising is not None:
                runs.judged += 1
                runs.surprises += surprising
            above = (runs.surprises + SURPRISES_PRIOR * above) / (runs.judged + SURPRISES_PRIOR)
            self._write(runs, end.ended_seconds, above)

    def _write(self, runs: _Runs, ended_seconds: float, surprises: float) -> None:
        """Compute the row of a key."""
        came, newest = runs.came, runs.newest
        latest = [came[place] for place in range(-min(LATEST, len(came)), 0)]
        latest.sort()
        ordered = runs.ordered
        self._rows[runs.slot] = (
            *(math.log1p(runs.count), came[-1], ended_seconds),
            *(newest[-1][1], math.fsum(one[1] for one in newest) / len(newest), newest[-1][0]),
            *(_quantile(latest, 0.1), _quantile(latest, 0.5), _quantile(latest, 0.9)),
            *(_quantile(ordered, 0.1), _quantile(ordered, 0.5), _quantile(ordered, 0.9)),
            surprises,
        )

    def _touch(self, key: Hashable) -> _Runs:
        """Return the runs of a key, adding it if needed, as the most recently used."""
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = _Runs(self._free_slot())
        self._runs.move_to_end(key)
        return runs

    def _free_slot(self) -> int:
        if len(self._runs) >= self._keys_max:
            _, forgotten = self._runs.popitem(last=False)
            return forgotten.slot
        slot = len(self._runs) + 1
        if slot == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        return slot


def _empty_row() -> Floats:
    row = np.full(len(FIGURES), np.nan)
    row[COUNT] = 0.0
    return row


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly, as numpy does."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
