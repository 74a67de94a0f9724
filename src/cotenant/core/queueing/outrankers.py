"""Who comes before a job that the order leaves out, and what they leave of the cluster.

Two go before it where the order is enforced: those that nobody may stop, wherever they stand, and those that stand
before it and fit. Who stands behind it may run as well, for it needs less; that is not what the job waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cotenant.core.refusals import Refusal, outranked
from cotenant.core.table import Capacity, Flags, Ints, Jobs

FIRST_NAMED = 2


@dataclass(frozen=True, slots=True)
class Outrankers:
    """Those who should run, for jobs that wait by their place among them, from 0.

    `first` are rows of the first of those that may be stopped, `staying` of those that may not, each with its place in
    the whole order; `places` are the places there of those that wait. `left` holds what those before each of these
    leave, by resource: GPUs in thousandths, cores, memory in bytes.
    """

    first: tuple[tuple[int, int], ...]
    staying: tuple[tuple[int, int], ...]
    places: Ints
    left: Ints

    def before(self, place: int) -> list[int]:
        """Name rows of the first that go before a job."""
        mine = int(self.places[place])
        going = [*self.staying, *(one for one in self.first if one[0] < mine)]
        return [row for _, row in sorted(going)[:FIRST_NAMED]]

    def refusal(self, place: int, ids: list[str]) -> Refusal:
        """Say why a job waits; `ids` by row."""
        milli, cores, memory_bytes = self.left[:, place].tolist()
        first = [ids[row] for row in self.before(place)]
        return outranked(place + 1, place, first, (milli, cores, memory_bytes))


def outrankers(jobs: Jobs, ranked: Ints, selected: Flags, protected: Flags, capacity: Capacity) -> Outrankers:
    """Walk the order once; `ranked` holds all rows, `selected` marks those that should run."""
    chosen, stays = selected[ranked], protected[ranked]
    needs = np.stack([jobs.gpu_milli, jobs.cores, jobs.memory_bytes])[:, ranked]
    have = np.array([capacity.gpu_milli, capacity.cores, capacity.memory_bytes], dtype=np.int64)
    taken = needs * (chosen & ~stays)
    left = (have - (needs * stays).sum(axis=1))[:, None] - (np.cumsum(taken, axis=1) - taken)
    places = np.flatnonzero(~jobs.running[ranked])

    def of(marked: Flags) -> tuple[tuple[int, int], ...]:
        found = np.flatnonzero(marked)[:FIRST_NAMED]
        return tuple(zip(found.tolist(), ranked[found].tolist(), strict=True))

    return Outrankers(of(chosen & ~stays), of(stays), places, np.maximum(left, 0)[:, places])
