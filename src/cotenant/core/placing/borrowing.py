"""Who borrows what is reserved for others, and who of them gives it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from cotenant.core.gangs import Gang
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.ledger import Counts, Holding, Ledger, Offer, Overcommitted, Share
from cotenant.core.placing.splitting import Array, Held, array_of
from cotenant.core.placing.taking import hold_all, release_all, take
from cotenant.core.scenes import Resident


class Residence:
    """Who is on the nodes of a ledger, summed up by node.

    `firm` are the cores that CPU jobs hold and that nobody takes from them, `lent_cores` those that CPU jobs borrow;
    `held` is what jobs with GPUs hold, `ids` are those of all.
    """

    def __init__(self, residents: Iterable[Resident], ledger: Ledger, large_gpus: int) -> None:
        self._ledger = ledger
        firm: list[Holding] = []
        lent: list[Holding] = []
        busy: list[tuple[int, float, float]] = []  # node, GPUs, since when
        self._borrowers: list[Resident] = []
        gpus: dict[Array, float] = {}
        by_type: dict[str, tuple[float, float]] = {}
        self.ids: set[str] = set()
        for resident in residents:
            self.ids.add(resident.gang.job_id)
            array = array_of(resident.gang, large_gpus)
            if resident.reclaimable:
                self._borrowers.append(resident)
            if array is Array.CPU:
                (lent if resident.reclaimable else firm).extend(resident.holdings)
                continue
            for holding in resident.holdings:
                here = gpus_of(holding)
                kind = ledger.shapes[holding.node].gpu_type
                cores, wide = by_type.get(kind, (0.0, 0.0))
                by_type[kind] = cores + holding.cores, wide + here
                gpus[array] = gpus.get(array, 0.0) + here
                busy.append((holding.node, here, resident.since_seconds))
        self._borrowers.sort(key=lambda one: (-one.since_seconds, one.gang.job_id))
        self.firm = self._sum(firm, "cores")
        self.lent_cores = self._sum(lent, "cores")
        self._lent_memory = self._sum(lent, "memory_bytes")
        self.held = Held(gpus, by_type, min(1.0, sum(gpus.values()) / max(1, int(ledger.total_gpus.sum()))))
        self._busy = np.array(busy, dtype=np.float64).reshape(-1, 3)

    def _sum(self, holdings: Sequence[Holding], what: str) -> Counts:
        sums = np.zeros(len(self._ledger), dtype=np.int64)
        np.add.at(sums, [one.node for one in holdings], [getattr(one, what) for one in holdings])
        return sums

    def young_gpus(self, since: float) -> Counts:
        """Count on each node the GPUs of jobs that started after a time, rounded up."""
        young = self._busy[self._busy[:, 2] > since]
        return np.ceil(np.bincount(young[:, 0].astype(np.int64), young[:, 1], len(self._ledger))).astype(np.int64)

    def borrowers(self, *, gpus: bool, but: Collection[str]) -> list[Resident]:
        """Name those who borrow cores, and with `gpus` GPUs too, the newest first, without some."""
        return [one for one in self._borrowers if (gpus or not one.gang.gpu_milli) and one.gang.job_id not in but]

    def lent(self, but: Collection[str]) -> tuple[Counts, Counts]:
        """Count the cores and the memory on each node that CPU jobs borrow, without some of them."""
        gone = [one for one in self._borrowers if one.gang.job_id in but and not one.gang.gpu_milli] if but else []
        back = [holding for one in gone for holding in one.holdings]
        return self.lent_cores - self._sum(back, "cores"), self._lent_memory - self._sum(back, "memory_bytes")


@contextmanager
def counting(ledger: Ledger, cores: Counts, memory_bytes: Counts | int = 0) -> Iterator[None]:
    """Count inside as if so much more were free on each node of a ledger, or less where that is negative."""
    ledger.free_cores += cores
    ledger.free_memory += memory_bytes
    try:
        yield
    finally:
        ledger.free_cores -= cores
        ledger.free_memory -= memory_bytes


def gpus_of(holding: Holding) -> float:
    """Sum up the GPUs of a holding."""
    return sum(milli for _, milli in holding.shares) / WHOLE_GPU_MILLI if holding.shares else holding.gpus


def room_by(gang: Gang, offer: Offer, able: Sequence[Resident], ledger: Ledger) -> list[Resident] | None:
    """Take a gang's places, at the cost of as few of those who are `able` to go as come first and suffice.

    On each node they go one by one until the gang fits; in the end those stay whose room it does not need, the last
    first. What they held is released, what the gang will hold is taken. None where all of them are too few.
    """
    gone: list[Resident] = []
    by_node: dict[int, list[Share]] = {}
    for share in offer:
        by_node.setdefault(share.node, []).append(share)
    on: dict[int, list[Resident]] = {node: [] for node in by_node}
    for resident in able:
        for node in {holding.node for holding in resident.holdings} & by_node.keys():
            on[node].append(resident)
    for node, shares in by_node.items():
        others = (resident for resident in on[node] if resident not in gone)
        while not _fits(gang, shares, ledger):
            if (other := next(others, None)) is None:
                return None
            release_all(ledger, other.holdings)
            gone.append(other)
    try:
        take(ledger, gang, offer)
    except Overcommitted:
        return None
    return [resident for resident in reversed(gone) if not hold_all(ledger, resident.holdings)]


def _fits(gang: Gang, shares: Sequence[Share], ledger: Ledger) -> bool:
    """Tell whether a node has room for its part of a gang."""
    with ledger.attempt() as attempt:
        try:
            for share in shares:
                attempt.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        except Overcommitted:
            return False
    return True
