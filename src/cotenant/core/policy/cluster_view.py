"""The cluster view: what a placement policy may know besides the gang and the ledger.

That is the time, and which jobs hold what. Most policies do not need it: they place by what is free. Policies that
consider neighbors, move jobs together or lend cores for a while implement `UsesClusterView` and are given a view before
each cycle. The driver of the cycle maintains the view, in the simulator as in the live mesh; a policy only reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that holds resources now.

    `since_seconds` is when its run began, on the view's clock. `stop_cost_seconds` is what a stop would cost: the run
    time since its last checkpoint, plus its restart. `reclaimable`: what it holds was lent to it, and may be reclaimed
    for a job that it is reserved for. In its estimate, `remaining_seconds` is as of now; the figures for candidate
    allocations are as of before its start.
    """

    gang: Gang
    holdings: tuple[Holding, ...]
    since_seconds: float
    preemptible: bool = True
    stop_cost_seconds: float = 0.0
    reclaimable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """What a run holds, its gang's GPUs, and since when: the same object for as long as none of this changes.

    Sums over all running jobs are updated from the objects that appeared, disappeared or were replaced. Values that
    change with time alone, such as estimates, belong to `RunningJob`.
    """

    gpu_milli: int
    holdings: tuple[Holding, ...]
    since_seconds: float
    reclaimable: bool = False

    @classmethod
    def of(cls, running_job: RunningJob) -> Occupancy:
        """Return the occupancy of a running job."""
        return cls(running_job.gang.gpu_milli, running_job.holdings, running_job.since_seconds, running_job.reclaimable)


class ClusterView(Protocol):
    """Which jobs hold what at one moment. Valid only within the cycle that it was given for."""

    now: float

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return all jobs that hold resources, by id."""

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return the jobs that hold resources on a node, by its number in the ledger."""

    def running_job(self, job_id: str) -> RunningJob:
        """Return one job that holds resources."""
        return self.running_jobs()[job_id]

    def occupancies(self) -> Mapping[str, Occupancy]:
        """Return the occupancy of each running job; a view kept from cycle to cycle returns the same objects again."""
        return {job_id: Occupancy.of(one) for job_id, one in self.running_jobs().items()}


@runtime_checkable
class UsesClusterView(Protocol):
    """A placement policy that needs more than what is free."""

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        """Receive the view for a cycle; called before each cycle, which updates the view with its decisions."""


@runtime_checkable
class ChecksNeighbors(Protocol):
    """A placement policy with constraints between jobs on the same node."""

    def can_coexist(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Return whether all jobs on some nodes can run beside each other, given the view and the ledger.

        Called for victims that might stay after all, because there is room for them too.
        """


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Places for a gang after some running jobs have moved, and the new places of those jobs."""

    offer: Offer
    moves: tuple[tuple[RunningJob, Offer], ...]


@runtime_checkable
class Rearranges(Protocol):
    """A placement policy that moves cheap jobs if that lets a gang start (Philly, section 5 [P])."""

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Return places for a gang that `place` refused; None if no moves would help, or none are worth it.

        The jobs in `fixed` must stop, or were moved already: the view no longer shows where they are. Leaves the ledger
        unchanged.
        """


class CycleView(ClusterView):
    """A view updated during a cycle: without the jobs removed since it began, with the jobs placed."""

    def __init__(self, cluster_view: ClusterView) -> None:
        self.now = cluster_view.now
        self._cluster_view = cluster_view
        self._removed: set[str] = set()
        self._hidden: frozenset[str] = frozenset()
        self._added: dict[str, RunningJob] = {}
        self._by_node: dict[int, dict[str, RunningJob]] = {}

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return the jobs that hold resources as of now in the cycle."""
        stay = {job_id: one for job_id, one in self._cluster_view.running_jobs().items() if job_id not in self._removed}
        return {job_id: one for job_id, one in (stay | self._added).items() if job_id not in self._hidden}

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return those on a node."""
        stay = [one for one in self._cluster_view.jobs_on(node) if one.gang.job_id not in self._removed]
        some = [*stay, *self._by_node.get(node, {}).values()]
        return [one for one in some if one.gang.job_id not in self._hidden] if self._hidden else some

    def running_job(self, job_id: str) -> RunningJob:
        """Return one of them."""
        return self._added.get(job_id) or self._cluster_view.running_job(job_id)

    def occupancies(self) -> Mapping[str, Occupancy]:
        """Return what they hold."""
        occupancies = self._cluster_view.occupancies()
        if not (self._removed or self._added or self._hidden):
            return occupancies
        stay = {job_id: one for job_id, one in occupancies.items() if job_id not in self._removed}
        came = {job_id: Occupancy.of(one) for job_id, one in self._added.items()}
        return {job_id: one for job_id, one in (stay | came).items() if job_id not in self._hidden}

    @contextmanager
    def without(self, job_ids: Collection[str]) -> Iterator[None]:
        """Hide some jobs for a while."""
        before, self._hidden = self._hidden, self._hidden.union(job_ids)
        try:
            yield
        finally:
            self._hidden = before

    def add_job(self, gang: Gang, holdings: tuple[Holding, ...]) -> None:
        """Add a gang that was placed."""
        running_job = RunningJob(gang, holdings, self.now)
        self._added[gang.job_id] = running_job
        for holding in holdings:
            self._by_node.setdefault(holding.node, {})[gang.job_id] = running_job

    def remove_job(self, job_id: str) -> None:
        """Remove a job that ran when the cycle began."""
        self._removed.add(job_id)

    def restore_job(self, job_id: str) -> None:
        """Restore a removed job."""
        self._removed.discard(job_id)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Places for a gang after borrowers made room: those in `moves` go elsewhere, those in `stops` stop and wait."""

    offer: Offer
    stops: tuple[RunningJob, ...]
    moves: tuple[tuple[RunningJob, Offer], ...] = ()


@runtime_checkable
class Reclaims(Protocol):
    """A placement policy that lends reserved resources and reclaims them for the jobs they are reserved for (CODA [P]).

    Lent resources are reclaimed regardless of the queue's order; until then the borrower runs. A policy lends to jobs
    with fewer GPUs than those that it reserves for: so admission counts them as free for the latter.
    """

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Return whether a gang that starts there borrows; called once, before the ledger has it.

        The policy may remember it until the next cycle begins. A gang that would borrow the room of jobs with more GPUs
        does not stop them for that, and keeps waiting.
        """

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Return places for a gang that `place` refused, at the expense of borrowers; None if that is not enough.

        The view no longer shows where the jobs in `fixed` are. Leaves the ledger unchanged.
        """


class EmptyClusterView(ClusterView):
    """A view without running jobs, at time 0: for tests and for policies called outside a cycle."""

    now = 0.0

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return no jobs."""
        return MappingProxyType({})

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return no jobs."""
        return ()


EMPTY_CLUSTER = EmptyClusterView()
