"""Who borrows what is reserved for others, and who of them gives it back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count

import numpy as np

from cotenant.core.gangs import Gang
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.ledger import Counts, Holding, Ledger, Offer, Overcommitted, Share
from cotenant.core.placing.splitting import Array, Held, array_of
from cotenant.core.placing.taking import hold_all, release_all, take
from cotenant.core.scenes import Resident

GUISES = count(1)


class Residence:
    """Who is on the nodes of a ledger, summed up by node.

    `firm` are the cores that CPU jobs hold and that nobody takes from them, `lent_cores` those that CPU jobs borrow;
    `held` is what jobs with GPUs hold, `ids` are those of all.
    """

    def __init__(self, residents: Iterable[Resident], ledger: Ledger, large_gpus: int) -> None:
        self._count = len(ledger)
        firm: list[Holding] = []
        lent: list[Holding] = []
        busy: list[tuple[int, float, float]] = []  # node, GPUs, since when
        self._borrowing: list[Resident] = []
        gpus: dict[Array, float] = {}
        by_type: dict[str, tuple[float, float]] = {}
        self.ids: set[str] = set()
        for resident in residents:
            self.ids.add(resident.gang.job_id)
            array = array_of(resident.gang, large_gpus)
            if resident.reclaimable:
                self._borrowing.append(resident)
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
        self.firm = _sum(firm, self._count)[1]
        self.lent_cores = _sum(lent, self._count)[1]
        self.held = Held(gpus, by_type, min(1.0, sum(gpus.values()) / max(1, int(ledger.total_gpus.sum()))))
        self._busy = np.array(busy, dtype=np.float64).reshape(-1, 3)
        self._young: tuple[float, Counts] | None = None

    def young_gpus(self, since: float) -> Counts:
        """Count on each node the GPUs of jobs that started after a time, rounded up."""
        if self._young is None or self._young[0] != since:
            young = self._busy[self._busy[:, 2] > since]
            sums = np.bincount(young[:, 0].astype(np.int64), young[:, 1], self._count)
            self._young = since, np.ceil(sums).astype(np.int64)
        return self._young[1]

    @cached_property
    def borrowers(self) -> Borrowers:
        """Those who borrow, in the order in which they give back."""
        return Borrowers(self._borrowing, self._count)


class Borrowers:
    """Those who borrow, the newest first, and by node what their leaving would give back.

    Of those who are sent away it is told by `leave`: a cycle asks for one gang after the other, and sums over all who
    borrow, or walks over them, would cost it more than all else.
    """

    def __init__(self, residents: Iterable[Resident], nodes: int) -> None:
        order = sorted(residents, key=lambda one: (-one.since_seconds, one.gang.job_id))
        self._there = {one.gang.job_id: one for one in order}
        self._gone: set[str] = set()
        self._on: dict[int, list[Resident]] = {}
        self._cores = _Lent(nodes)  # of jobs without GPUs
        self._gpus = _Lent(nodes)
        for one in order:
            self._lent(one).add(one, +1)
            for node in {holding.node for holding in one.holdings}:
                self._on.setdefault(node, []).append(one)

    def _lent(self, one: Resident) -> _Lent:
        return self._gpus if one.gang.gpu_milli else self._cores

    def leave(self, gone: Collection[str]) -> None:
        """Leave those out who are gone, and nobody else."""
        if len(gone) == len(self._gone) and self._gone.issuperset(gone):
            return
        now = set(gone)
        for sign, some in ((-1, now - self._gone), (+1, self._gone - now)):
            for job_id in some:
                if one := self._there.get(job_id):
                    self._lent(one).add(one, sign)
        self._gone = now

    def any(self, *, gpus: bool) -> bool:
        """Tell whether anybody borrows cores, or with `gpus` GPUs."""
        return self._cores.jobs > 0 or (gpus and self._gpus.jobs > 0)

    def on(self, node: int, *, gpus: bool) -> Iterator[Resident]:
        """Name those who borrow cores on a node, and with `gpus` those who borrow GPUs, the newest first."""
        for one in self._on.get(node, ()):
            if one.gang.job_id not in self._gone and (gpus or not one.gang.gpu_milli):
                yield one

    @property
    def cores(self) -> Counts:
        """Cores on each node that jobs without GPUs borrow."""
        cores: Counts = self._cores.sums[1]
        return cores

    @property
    def memory(self) -> Counts:
        """Memory on each node that they hold."""
        memory: Counts = self._cores.sums[2]
        return memory

    @contextmanager
    def without_gpus(self, ledger: Ledger) -> Iterator[None]:
        """Count inside as if those were gone who borrow GPUs."""
        lent = self._gpus
        if not lent.jobs:
            yield
            return
        gpus, cores, memory = lent.sums
        with counting(ledger, cores, memory, gpus), ledger.undone():
            release_all(ledger, (holding for one in lent.sharing.values() for holding in one.holdings))
            yield


class _Lent:
    """What some hold, by node: GPUs, cores and memory. Those who share GPUs are kept by name: a count is no share."""

    def __init__(self, nodes: int) -> None:
        self.jobs = 0
        self.sums: Counts = np.zeros((3, nodes), dtype=np.int64)
        self.sharing: dict[str, Resident] = {}

    def add(self, one: Resident, sign: int) -> None:
        """Count one in, or out."""
        self.jobs += sign
        if any(holding.shares for holding in one.holdings):
            if sign > 0:
                self.sharing[one.gang.job_id] = one
            else:
                del self.sharing[one.gang.job_id]
            return
        for holding in one.holdings:
            self.sums[:, holding.node] += sign * np.array((holding.gpus, holding.cores, holding.memory_bytes))


def _sum(holdings: Sequence[Holding], nodes: int) -> Counts:
    """Sum up GPUs, cores and memory by node."""
    sums = np.zeros((3, nodes), dtype=np.int64)
    what = np.array([(one.gpus, one.cores, one.memory_bytes) for one in holdings], dtype=np.int64).reshape(-1, 3)
    np.add.at(sums.T, np.array([one.node for one in holdings], dtype=np.int64), what)
    return sums


@contextmanager
def counting(ledger: Ledger, cores: Counts, memory_bytes: Counts | int = 0, gpus: Counts | int = 0) -> Iterator[None]:
    """Count inside as if so much more were free on each node of a ledger, or less where that is negative."""
    columns = ((ledger.free_cores, cores), (ledger.free_memory, memory_bytes), (ledger.free_gpus, gpus))
    counted = [(free, more) for free, more in columns if not isinstance(more, int)]
    before, ledger.guise = ledger.guise, next(GUISES)
    for free, more in counted:
        free += more
    try:
        yield
    finally:
        ledger.guise = before
        for free, more in counted:
            free -= more


def gpus_of(holding: Holding) -> float:
    """Sum up the GPUs of a holding."""
    return sum(milli for _, milli in holding.shares) / WHOLE_GPU_MILLI if holding.shares else holding.gpus


def room_by(
    gang: Gang, offer: Offer, able: Callable[[int], Iterable[Resident]], ledger: Ledger
) -> list[Resident] | None:
    """Take a gang's places, at the cost of as few of those who are `able` to go, by node, as come first and suffice.

    On each node they go one by one until the gang fits; in the end those stay whose room it does not need, the last
    first. What they held is released, what the gang will hold is taken. None where all of them are too few.
    """
    gone: dict[str, Resident] = {}
    by_node: dict[int, list[Share]] = {}
    for share in offer:
        by_node.setdefault(share.node, []).append(share)
    for node, shares in by_node.items():
        others = (resident for resident in able(node) if resident.gang.job_id not in gone)
        while not _fits(gang, shares, ledger):
            if (other := next(others, None)) is None:
                return None
            release_all(ledger, other.holdings)
            gone[other.gang.job_id] = other
    try:
        take(ledger, gang, offer)
    except Overcommitted:
        return None
    return [resident for resident in reversed(gone.values()) if not hold_all(ledger, resident.holdings)]


def _fits(gang: Gang, shares: Sequence[Share], ledger: Ledger) -> bool:
    """Tell whether a node has room for its part of a gang."""
    with ledger.attempt() as attempt:
        try:
            for share in shares:
                attempt.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        except Overcommitted:
            return False
    return True
