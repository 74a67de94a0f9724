"""Who borrows what is reserved for others, and who of them gives it back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import itemgetter

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.placement.gang_allocation import gpu_milli_of, hold_all, release_all, take
from cotenant.core.policy.cluster_view import Resident, Stay
from cotenant.policies.multi_array.split import Array, Held, array_of

GUISES = count(1)


class Residence:
    """Who is on the nodes of a ledger, summed up by node, and kept up to date by who came, went or changed.

    `firm` are the cores that CPU jobs hold and that nobody takes from them, `lent_cores` those that CPU jobs borrow;
    `borrowers` are all who borrow.
    """

    def __init__(self, ledger: Ledger, large_gpus: int) -> None:
        self._large_gpus = large_gpus
        self._gpu_types = [shape.gpu_type for shape in ledger.shapes]
        self._gpus = int(ledger.total_gpus.sum())
        self._stays: dict[str, Stay] = {}
        self._expected: list[tuple[int, int]] = []  # nodes, and firm cores that those hold who start in this cycle
        self.firm: Counts = np.zeros(len(ledger), dtype=np.int64)
        self.lent_cores: Counts = np.zeros(len(ledger), dtype=np.int64)
        self.borrowers = Borrowers(len(ledger))
        self._milli: dict[Array, int] = {}
        self._by_type: dict[str, tuple[int, int]] = {}  # cores, and thousandths of GPUs
        self._by_age: list[tuple[float, str]] = []  # those with GPUs: since when, and who
        self._young: tuple[float, Counts] | None = None

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._stays

    def follow(self, stays: Mapping[str, Stay]) -> None:
        """Count those who are there now, and nobody else."""
        for node, cores in self._expected:
            self.firm[node] -= cores
        self._expected.clear()
        self.borrowers.leave(())
        known = self._stays
        for job_id in [job_id for job_id, stay in known.items() if stays.get(job_id) is not stay]:
            self._count(job_id, known.pop(job_id), -1)
        for job_id, stay in stays.items():
            if job_id not in known:
                known[job_id] = stay
                self._count(job_id, stay, +1)

    def expect(self, node: int, cores: int) -> None:
        """Count firm cores of one who starts in this cycle, until it is seen who did."""
        self.firm[node] += cores
        self._expected.append((node, cores))

    @property
    def held(self) -> Held:
        """What jobs with GPUs hold."""
        gpus = {array: milli / WHOLE_GPU_MILLI for array, milli in self._milli.items()}
        by_type = {kind: (float(cores), milli / WHOLE_GPU_MILLI) for kind, (cores, milli) in self._by_type.items()}
        return Held(gpus, by_type, min(1.0, sum(gpus.values()) / max(1, self._gpus)))

    def _count(self, job_id: str, stay: Stay, sign: int) -> None:
        array = array_of(stay.gpu_milli, self._large_gpus)
        if stay.reclaimable and sign > 0:
            self.borrowers.add(job_id, stay)
        elif stay.reclaimable:
            self.borrowers.remove(job_id)
        if array is Array.CPU:
            cores = self.lent_cores if stay.reclaimable else self.firm
            for holding in stay.holdings:
                cores[holding.node] += sign * holding.cores
            return
        self._young = None
        age = stay.since_seconds, job_id
        if sign > 0:
            insort(self._by_age, age)
        else:
            del self._by_age[bisect_left(self._by_age, age)]
        for holding in stay.holdings:
            milli, kind = sign * gpu_milli_of((holding,)), self._gpu_types[holding.node]
            cores_before, milli_before = self._by_type.get(kind, (0, 0))
            self._by_type[kind] = cores_before + sign * holding.cores, milli_before + milli
            self._milli[array] = self._milli.get(array, 0) + milli

    def young_gpus(self, since: float) -> Counts:
        """Count on each node the GPUs of jobs that started after a time, rounded up."""
        if self._young is None or self._young[0] != since:
            milli = np.zeros(len(self._gpu_types), dtype=np.int64)
            for _, job_id in self._by_age[bisect_right(self._by_age, since, key=itemgetter(0)) :]:
                for holding in self._stays[job_id].holdings:
                    milli[holding.node] += gpu_milli_of((holding,))
            self._young = since, -(-milli // WHOLE_GPU_MILLI)
        return self._young[1]


class Borrowers:
    """Those who borrow, the newest first, and by node what their leaving would give back.

    Of those who are sent away it is told by `leave`: a cycle asks for one gang after the other, and sums over all who
    borrow, or walks over them, would cost it more than all else.
    """

    def __init__(self, nodes: int) -> None:
        self._there: dict[str, Stay] = {}
        self._gone: set[str] = set()
        self._on: dict[int, list[tuple[float, str]]] = {}  # by node: since when, less than 0, and who
        self._cores = _Lent(nodes)  # of jobs without GPUs
        self._gpus = _Lent(nodes)

    def _lent(self, one: Stay) -> _Lent:
        return self._gpus if one.gpu_milli else self._cores

    def add(self, job_id: str, one: Stay) -> None:
        """One borrows from now on."""
        self._there[job_id] = one
        self._lent(one).add(job_id, one, +1)
        for node in {holding.node for holding in one.holdings}:
            insort(self._on.setdefault(node, []), (-one.since_seconds, job_id))

    def remove(self, job_id: str) -> None:
        """One who is there does not borrow any more."""
        one = self._there.pop(job_id)
        self._lent(one).add(job_id, one, -1)
        for node in {holding.node for holding in one.holdings}:
            there = self._on[node]
            del there[bisect_left(there, (-one.since_seconds, job_id))]

    def leave(self, gone: Collection[str]) -> None:
        """Leave those out who are gone, and nobody else."""
        if len(gone) == len(self._gone) and self._gone.issuperset(gone):
            return
        now = set(gone)
        for sign, some in ((-1, now - self._gone), (+1, self._gone - now)):
            for job_id in some:
                if one := self._there.get(job_id):
                    self._lent(one).add(job_id, one, sign)
        self._gone = now

    def any(self, *, gpus: bool) -> bool:
        """Tell whether anybody borrows cores, or with `gpus` GPUs."""
        return self._cores.jobs > 0 or (gpus and self._gpus.jobs > 0)

    def on(self, node: int, *, gpus: bool) -> Iterator[str]:
        """Name those who borrow cores on a node, and with `gpus` those who borrow GPUs, the newest first."""
        for _, job_id in self._on.get(node, ()):
            if job_id not in self._gone and (gpus or not self._there[job_id].gpu_milli):
                yield job_id

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
        self.sharing: dict[str, Stay] = {}

    def add(self, job_id: str, one: Stay, sign: int) -> None:
        """Count one in, or out."""
        self.jobs += sign
        if any(holding.shares for holding in one.holdings):
            if sign > 0:
                self.sharing[job_id] = one
            else:
                del self.sharing[job_id]
            return
        gpus, cores, memory = self.sums
        for holding in one.holdings:
            gpus[holding.node] += sign * holding.gpus
            cores[holding.node] += sign * holding.cores
            memory[holding.node] += sign * holding.memory_bytes


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
