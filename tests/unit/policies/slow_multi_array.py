"""`multi-array` in a slow, direct form: an oracle for its incremental state.

Borrowers and lent resources are computed for each query, on a copy of the ledger without the borrowers; waits are kept
one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted
from cotenant.core.model.gang import Gang
from cotenant.core.placement.gang_allocation import hold_all, release_all, take
from cotenant.core.policy.cluster_view import ClusterView, Reclaim, RunningJob
from cotenant.policies.multi_array.borrowing import NodeOccupancy
from cotenant.policies.multi_array.policy import MultiArray
from cotenant.policies.multi_array.split import Array, array_of


class SlowWaits:
    """Return the mean wait, by a loop over all waits."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._started: list[tuple[str, float, float]] = []  # who, when, and after which wait
        self._refused: dict[str, tuple[float, float]] = {}  # when last, and after which wait

    def started(self, job_id: str, now: float, waited_seconds: float) -> None:
        self._forget(job_id, now - waited_seconds)
        self._started.append((job_id, now, waited_seconds))

    def refused(self, job_id: str, now: float, waited_seconds: float) -> None:
        self._forget(job_id, now - waited_seconds)
        self._refused[job_id] = now, waited_seconds

    def _forget(self, job_id: str, since: float) -> None:
        self._refused.pop(job_id, None)
        self._started = [one for one in self._started if (one[0], round(one[1] - one[2])) != (job_id, round(since))]

    def mean(self, now: float) -> float:
        begin = now - self._window_seconds
        waits = [wait for _, when, wait in self._started if when >= begin]
        waits += [now - when + wait for when, wait in self._refused.values() if when >= begin]
        return sum(waits) / len(waits) if waits else 0.0


class SlowMultiArray(MultiArray):
    """Reclaims what was lent by direct computation."""

    def __init__(self, options: MultiArray.Options | None = None) -> None:
        super().__init__(options)
        self._waits = SlowWaits(self.options.guard_seconds)  # type: ignore[assignment]  # answers the same
        self._at_first: tuple[RunningJob, ...] = ()

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        super().begin_cycle(cluster_view)
        self._at_first = tuple(cluster_view.running_jobs().values())

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        there = self._refresh(ledger)
        large = array_of(gang.gpu_milli, self.options.large_gpus) is Array.LARGE
        borrowers = sorted(self._at_first, key=lambda one: (-one.since_seconds, one.gang.job_id))
        able = [one for one in borrowers if one.reclaimable and one.gang.job_id not in fixed]
        able = [one for one in able if large or not one.gang.gpu_milli] if gang.gpu_milli else []
        if not able:
            return None
        trial = ledger.copy()
        for one in able:
            if one.gang.gpu_milli:
                release_all(trial, one.holdings)
        lent = self._cores(one for one in able if not one.gang.gpu_milli)
        kept = self._kept(trial, there, lent)
        for one in able:
            if not one.gang.gpu_milli:
                release_all(trial, one.holdings)
        trial.free_cores -= 0 if kept is None else kept
        offer = self._for_gpus(gang, trial)
        return None if offer is None else self._room(gang, offer, able, ledger.copy(), there)

    def _cores(self, some: Iterable[RunningJob]) -> Counts:
        cores = np.zeros(len(self._split.reserved), dtype=np.int64)
        for one in some:
            for holding in one.holdings:
                cores[holding.node] += holding.cores
        return cores

    def _room(
        self, gang: Gang, offer: Offer, able: list[RunningJob], ledger: Ledger, there: NodeOccupancy
    ) -> Reclaim | None:
        gone: list[RunningJob] = []
        for node in dict.fromkeys(share.node for share in offer):
            on_node = [one for one in able if any(holding.node == node for holding in one.holdings)]
            while not self._fits(gang, tuple(share for share in offer if share.node == node), ledger):
                left = [one for one in on_node if one not in gone]
                if not left:
                    return None
                release_all(ledger, left[0].holdings)
                gone.append(left[0])
        try:
            take(ledger, gang, offer)
        except Overcommitted:
            return None
        gone = [one for one in reversed(gone) if not hold_all(ledger, one.holdings)]
        moves: list[tuple[RunningJob, Offer]] = []
        for one in gone:
            if one.gang.gpu_milli:
                place = self._for_gpus(one.gang, ledger, ~self._split.large)
            else:
                place = self._for_cpus(one.gang, ledger, there)
            if place is not None:
                take(ledger, one.gang, place)
                moves.append((one, place))
        moved = [one for one, _ in moves]
        return Reclaim(offer, tuple(one for one in gone if one not in moved), tuple(moves))

    def _fits(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        trial = ledger.copy()
        try:
            for share in offer:
                trial.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        except Overcommitted:
            return False
        return True
