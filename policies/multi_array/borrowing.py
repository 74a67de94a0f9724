"""Borrowed resources by node, and which borrowers give them back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import itemgetter

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.resources import KINDS, WHOLE_GPU_MILLI, counts_of
from cotenant.core.placement.gang_allocation import gpu_milli_of, hold_all, release_all, take
from cotenant.core.policy.cluster_view import Occupancy, RunningJob
from cotenant.policies.multi_array.split import Array, Held, array_of

OVERRIDES = count(1)


class NodeOccupancy:
    """The jobs on the nodes of a ledger, summed by node, and updated as they start, end or change.

    `firm` are the cores that CPU jobs hold permanently, `lent_cores` those that CPU jobs borrow; `borrowers` are all
    borrowing jobs.
    """

    def __init__(self, ledger: Ledger, large_gpus: int) -> None:
        self._large_gpus = large_gpus
        self._gpu_types = [shape.gpu_type for shape in ledger.shapes]
        self._gpus = int(ledger.total_gpus.sum())
        self._stays: dict[str, Occupancy] = {}
        self._expected: list[tuple[int, int]] = []  # nodes, and firm cores of jobs that start in this cycle
        self.firm: Counts = np.zeros(len(ledger), dtype=np.int64)
        self.lent_cores: Counts = np.zeros(len(ledger), dtype=np.int64)
        self.borrowers = Borrowers(len(ledger))
        self._milli: dict[Array, int] = {}
        self._by_type: dict[str, tuple[int, int]] = {}  # cores, and thousandths of GPUs
        self._by_age: list[tuple[float, str]] = []  # jobs with GPUs: start time, and id
        self._young: tuple[float, Counts] | None = None

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._stays

    def update(self, occupancies: Mapping[str, Occupancy]) -> None:
        """Count the jobs that are there now, and no others."""
        for node, cores in self._expected:
            self.firm[node] -= cores
        self._expected.clear()
        self.borrowers.exclude(())
        known = self._stays
        for job_id in [job_id for job_id, stay in known.items() if occupancies.get(job_id) is not stay]:
            self._count(job_id, known.pop(job_id), -1)
        for job_id, stay in occupancies.items():
            if job_id not in known:
                known[job_id] = stay
                self._count(job_id, stay, +1)

    def expect(self, node: int, cores: int) -> None:
        """Count firm cores of a job that starts in this cycle, until the next update."""
        self.firm[node] += cores
        self._expected.append((node, cores))

    @property
    def held(self) -> Held:
        """What jobs with GPUs hold."""
        gpus = {array: milli / WHOLE_GPU_MILLI for array, milli in self._milli.items()}
        by_type = {kind: (float(cores), milli / WHOLE_GPU_MILLI) for kind, (cores, milli) in self._by_type.items()}
        return Held(gpus, by_type, min(1.0, sum(gpus.values()) / max(1, self._gpus)))

    def _count(self, job_id: str, stay: Occupancy, sign: int) -> None:
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
        """Return for each node the GPUs of jobs that started after a time, rounded up."""
        if self._young is None or self._young[0] != since:
            milli = np.zeros(len(self._gpu_types), dtype=np.int64)
            for _, job_id in self._by_age[bisect_right(self._by_age, since, key=itemgetter(0)) :]:
                for holding in self._stays[job_id].holdings:
                    milli[holding.node] += gpu_milli_of((holding,))
            self._young = since, -(-milli // WHOLE_GPU_MILLI)
        return self._young[1]


class Borrowers:
    """The borrowing jobs, the newest first, and what stopping them would free on each node.

    Jobs that are being stopped are given by `exclude`: a cycle asks for one gang after another, and sums or loops over
    all borrowers would cost more than everything else.
    """

    def __init__(self, nodes: int) -> None:
        self._there: dict[str, Occupancy] = {}
        self._gone: set[str] = set()
        self._on: dict[int, list[tuple[float, str]]] = {}  # by node: negated start time, and id
        self._cores = _Lent(nodes)  # of jobs without GPUs
        self._gpus = _Lent(nodes)

    def _lent(self, one: Occupancy) -> _Lent:
        return self._gpus if one.gpu_milli else self._cores

    def add(self, job_id: str, one: Occupancy) -> None:
        """Add a borrowing job."""
        self._there[job_id] = one
        self._lent(one).add(job_id, one, +1)
        for node in {holding.node for holding in one.holdings}:
            insort(self._on.setdefault(node, []), (-one.since_seconds, job_id))

    def remove(self, job_id: str) -> None:
        """Remove a job that no longer borrows."""
        one = self._there.pop(job_id)
        self._lent(one).add(job_id, one, -1)
        for node in {holding.node for holding in one.holdings}:
            there = self._on[node]
            del there[bisect_left(there, (-one.since_seconds, job_id))]

    def exclude(self, gone: Collection[str]) -> None:
        """Exclude these jobs, and no others."""
        if len(gone) == len(self._gone) and self._gone.issuperset(gone):
            return
        now = set(gone)
        for sign, some in ((-1, now - self._gone), (+1, self._gone - now)):
            for job_id in some:
                if one := self._there.get(job_id):
                    self._lent(one).add(job_id, one, sign)
        self._gone = now

    def any(self, *, gpus: bool) -> bool:
        """Return whether any job borrows cores, or with `gpus` GPUs."""
        return self._cores.jobs > 0 or (gpus and self._gpus.jobs > 0)

    def on(self, node: int, *, gpus: bool) -> Iterator[str]:
        """Yield the jobs that borrow cores on a node, and with `gpus` GPUs, the newest first."""
        for _, job_id in self._on.get(node, ()):
            if job_id not in self._gone and (gpus or not self._there[job_id].gpu_milli):
                yield job_id

    @property
    def cores(self) -> Counts:
        """Cores on each node that jobs without GPUs borrow."""
        cores: Counts = self._cores.sums[1]
        return cores

    @property
    def amounts(self) -> Counts:
        """A row for each amount on each node that those jobs hold."""
        amounts: Counts = self._cores.sums[2:]
        return amounts

    @contextmanager
    def without_gpus(self, ledger: Ledger) -> Iterator[None]:
        """Count inside this context as if the jobs that borrow GPUs were gone."""
        lent = self._gpus
        if not lent.jobs:
            yield
            return
        gpus, cores, *_ = lent.sums
        with counting(ledger, cores, lent.sums[2:], gpus), ledger.rolled_back():
            release_all(ledger, (holding for one in lent.sharing.values() for holding in one.holdings))
            yield


class _Lent:
    """Held resources by node, as a ledger counts them. Jobs that share GPUs are kept by name: a count is no share."""

    def __init__(self, nodes: int) -> None:
        self.jobs = 0
        self.sums: Counts = np.zeros((len(KINDS), nodes), dtype=np.int64)
        self.sharing: dict[str, Occupancy] = {}

    def add(self, job_id: str, one: Occupancy, sign: int) -> None:
        """Add or subtract a job."""
        self.jobs += sign
        if any(holding.shares for holding in one.holdings):
            if sign > 0:
                self.sharing[job_id] = one
            else:
                del self.sharing[job_id]
            return
        for holding in one.holdings:
            for row, held in enumerate(counts_of(holding)):
                if held:
                    self.sums[row, holding.node] += sign * held


@contextmanager
def counting(ledger: Ledger, cores: Counts, amounts: Counts | int = 0, gpus: Counts | int = 0) -> Iterator[None]:
    """Count inside this context as if this much more were free on each node, or less if negative."""
    columns = ((ledger.free_cores, cores), (ledger.free[2:], amounts), (ledger.free_gpus, gpus))
    counted = [(free, more) for free, more in columns if not isinstance(more, int)]
    before, ledger.override_version = ledger.override_version, next(OVERRIDES)
    for free, more in counted:
        free += more
    try:
        yield
    finally:
        ledger.override_version = before
        for free, more in counted:
            free -= more


def make_room(
    gang: Gang, offer: Offer, able: Callable[[int], Iterable[RunningJob]], ledger: Ledger
) -> list[RunningJob] | None:
    """Take a gang's places, stopping as few as possible of the `able` jobs, by node, in their order.

    On each node jobs are stopped one by one until the gang fits; in the end jobs are spared whose room it does not
    need, the last first. What they held is released, what the gang will hold is taken. None if all of them are not
    enough.
    """
    gone: dict[str, RunningJob] = {}
    by_node: dict[int, list[Share]] = {}
    for share in offer:
        by_node.setdefault(share.node, []).append(share)
    for node, shares in by_node.items():
        others = (running_job for running_job in able(node) if running_job.gang.job_id not in gone)
        while not _fits(gang, shares, ledger):
            if (other := next(others, None)) is None:
                return None
            release_all(ledger, other.holdings)
            gone[other.gang.job_id] = other
    try:
        take(ledger, gang, offer)
    except Overcommitted:
        return None
    return [running_job for running_job in reversed(gone.values()) if not hold_all(ledger, running_job.holdings)]


def _fits(gang: Gang, shares: Sequence[Share], ledger: Ledger) -> bool:
    """Return whether a node has room for its part of a gang."""
    with ledger.transaction() as transaction:
        try:
            for share in shares:
                transaction.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        except Overcommitted:
            return False
    return True
