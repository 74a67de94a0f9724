"""`multi-array` as it would be written if time were no object: an oracle for what it keeps up to date by steps.

Who borrows and what is lent is gathered anew for each question, on a copy of the ledger that those have really left;
waits are kept one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted
from cotenant.core.model.gang import Gang
from cotenant.core.placement.gang_allocation import hold_all, release_all, take
from cotenant.core.policy.cluster_view import Reclaim, Resident, Scene
from cotenant.policies.multi_array.borrowing import Residence
from cotenant.policies.multi_array.policy import MultiArray
from cotenant.policies.multi_array.split import Array, array_of


class SlowWaits:
    """The mean wait, by walking over all waits."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._started: list[tuple[float, float]] = []  # when, and after which wait
        self._refused: dict[str, tuple[float, float]] = {}  # when last, and after which wait

    def started(self, job_id: str, now: float, waited_seconds: float) -> None:
        self._refused.pop(job_id, None)
        self._started.append((now, waited_seconds))

    def refused(self, job_id: str, now: float, waited_seconds: float) -> None:
        self._refused[job_id] = now, waited_seconds

    def mean(self, now: float) -> float:
        begin = now - self._window_seconds
        waits = [wait for when, wait in self._started if when >= begin]
        waits += [now - when + wait for when, wait in self._refused.values() if when >= begin]
        return sum(waits) / len(waits) if waits else 0.0


class SlowMultiArray(MultiArray):
    """Takes back what was lent by doing it."""

    def __init__(self, options: MultiArray.Options | None = None) -> None:
        super().__init__(options)
        self._waits = SlowWaits(self.options.guard_seconds)  # type: ignore[assignment]  # answers the same
        self._at_first: tuple[Resident, ...] = ()

    def see(self, scene: Scene) -> None:
        super().see(scene)
        self._at_first = tuple(scene.residents().values())

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        there = self._look(ledger)
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

    def _cores(self, some: Iterable[Resident]) -> Counts:
        cores = np.zeros(len(self._split.reserved), dtype=np.int64)
        for one in some:
            for holding in one.holdings:
                cores[holding.node] += holding.cores
        return cores

    def _room(self, gang: Gang, offer: Offer, able: list[Resident], ledger: Ledger, there: Residence) -> Reclaim | None:
        gone: list[Resident] = []
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
        moves: list[tuple[Resident, Offer]] = []
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
