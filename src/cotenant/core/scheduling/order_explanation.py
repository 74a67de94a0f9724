"""Explains which jobs come before a job that the order leaves out, and what they leave of the cluster.

If the order is enforced, two kinds of jobs go before it: those that must not be stopped, wherever they are in the
order, and those before it that fit. Jobs behind it may run as well, because they need less; the job does not wait for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Capacity, Flags, Floats, Ints, Jobs
from cotenant.core.model.refusal import PrecedingJob, Refusal, blocked_by_strict_head, outranked
from cotenant.core.model.resources import Resources

FIRST_NAMED = 2


@dataclass(frozen=True, slots=True)
class Outrankers:
    """The jobs that should run, for waiting jobs by their place among these, from 0.

    `first` are the first rows that may be stopped, `staying` the first that may not, each with its place in the whole
    order; `places` are the places there of the waiting jobs. By place in the whole order there are the `ranked` rows,
    the GPUs requested by earlier waiting jobs (`wanted_milli`), and what earlier jobs that should run leave (`left`),
    by resource: GPUs in thousandths, cores, memory in bytes, below 0 if protected jobs take more than there is;
    `scores` are the order's, by row. A strict order stops at its `head`: its place, its row, what it needs and what is
    left for it.
    """

    first: tuple[tuple[int, int], ...]
    staying: tuple[tuple[int, int], ...]
    places: Ints
    left: Ints
    ranked: Ints
    scores: Floats
    wanted_milli: Ints
    head: tuple[int, int, Resources, Resources] | None = None

    def before(self, place: int) -> list[int]:
        """Return the first rows that go before a job."""
        return self._before(int(self.places[place]))

    def _before(self, at: int) -> list[int]:
        going = [*self.staying, *(one for one in self.first if one[0] < at)]
        return [row for _, row in sorted(going)[:FIRST_NAMED]]

    def refusal(self, place: int, ids: Sequence[str]) -> Refusal:
        """Return why a job waits; `ids` by row."""
        return self.refusal_at(int(self.places[place]), ids)

    def refusal_at(self, at: int, ids: Sequence[str]) -> Refusal:
        """Return why the job at a place in the whole order waits, including a job that is stopped now; `ids` by row."""
        ahead = int(np.searchsorted(self.places, at))
        nearest = None
        if ahead:
            before = int(self.ranked[self.places[ahead - 1]])
            own, other = float(self.scores[self.ranked[at]]), float(self.scores[before])
            nearest = PrecedingJob(ids[before], other, own, int(self.wanted_milli[at]))
        if self.head and self.head[0] < at:
            _, row, needs, left = self.head
            return blocked_by_strict_head(ahead + 1, ahead, ids[row], needs, left, nearest)
        first = [ids[row] for row in self._before(at)]
        return outranked(ahead + 1, ahead, first, _positive(self.left[:, at]), nearest)


def _positive(column: Ints) -> Resources:
    return Resources(*np.maximum(column, 0).tolist())


def outrankers(
    jobs: Jobs,
    ranked: Ints,
    selected: Flags,
    protected: Flags,
    capacity: Capacity,
    scores: Floats,
    *,
    strict: bool = False,
    passed: Ints | None = None,
) -> Outrankers:
    """Return the outrankers for one order; `ranked` holds all rows, `selected` marks the rows that should run.

    A `strict` order ends at the first row that should not run, except rows `passed` over because of their tenants'
    limits.
    """
    chosen, stays = selected[ranked], protected[ranked]
    needs = np.stack(jobs.needs)[:, ranked]
    have = np.array(capacity, dtype=np.int64)
    taken = needs * (chosen & ~stays)
    left = (have - (needs * stays).sum(axis=1))[:, None] - (np.cumsum(taken, axis=1) - taken)
    waits = ~jobs.running[ranked]
    places = np.flatnonzero(waits)
    waiting_milli = needs[0] * waits

    def of(marked: Flags) -> tuple[tuple[int, int], ...]:
        found = np.flatnonzero(marked)[:FIRST_NAMED]
        return tuple(zip(found.tolist(), ranked[found].tolist(), strict=True))

    head = None
    if strict:
        out = ~chosen if passed is None else ~chosen & ~np.isin(ranked, passed)
        if len(found := np.flatnonzero(out)):
            at = int(found[0])
            head = at, int(ranked[at]), _positive(needs[:, at]), _positive(left[:, at])
    return Outrankers(
        of(chosen & ~stays),
        of(stays),
        places,
        left,
        ranked.copy(),  # it may be the table's own, and reasons are given after the table has changed
        scores.copy(),
        np.cumsum(waiting_milli) - waiting_milli,
        head,
    )
