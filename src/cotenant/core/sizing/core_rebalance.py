"""Distributes cores to running jobs on some nodes: what each owns, and what is lent to which job.

The live mesh and the simulator ask their allocator for claims, and both distribute cores here. Up to its GPUs' share, a
job owns what it claims, as long as no other job owns those cores and its tenant may hold them. The rest is lent to the
jobs that gain most; it counts for no tenant, because it is reclaimed as soon as another job needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.core.model.tenancy import Headroom
from cotenant.core.sizing.core_search import expected
from cotenant.core.sizing.resize import ResizableJob
from cotenant.core.sizing.spare_cores import Borrower, lend

NO_LIMITS = Headroom(())


@dataclass(frozen=True, slots=True)
class CoreClaim:
    """A job's claim: the job as its allocator saw it, and how many cores it could use.

    `wish` is for each replica of its leading role; `replicas` counts these by node.
    """

    running: ResizableJob
    wish: int
    replicas: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """Cores for each replica of a job's leading role: its own, and those lent to it in addition."""

    firm: int
    lent: int = 0

    @property
    def cores(self) -> int:
        """Its own and lent cores."""
        return self.firm + self.lent


def room(free: Mapping[int, int], replicas: Mapping[int, int]) -> int:
    """Return the cores that each replica could get in lock-step; `replicas` by node.

    >>> room({0: 9, 1: 5}, {0: 2, 1: 1})
    4
    """
    return max(0, min((free[node] // count for node, count in replicas.items()), default=0))


def rebalance_cores(
    parties: Sequence[CoreClaim],
    free: Mapping[int, int],
    weigh: Callable[[ResizableJob], float],
    headroom: Headroom = NO_LIMITS,
) -> list[CoreGrant]:
    """Return the cores granted to jobs, distributed in their order.

    `free` counts by node the cores that no job owns: idle ones, and those lent to these jobs. `weigh` returns how much
    a job's gain counts relative to equal gains of others. `headroom` counts what tenants own, among these jobs and
    elsewhere. What a job gives back becomes available to other jobs of its tenant the next time: until its nodes have
    released it, the job still holds it.

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import JobSpec, Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),))
    >>> slim, wide = (ResizableJob(name, spec, UNKNOWN, (3,), (0,), node_share=(3,)) for name in ("slim", "wide"))
    >>> rebalance_cores([CoreClaim(slim, 1, {0: 1}), CoreClaim(wide, 9, {0: 1})], {0: 0}, weigh=lambda running: 1.0)
    [CoreGrant(firm=1, lent=0), CoreGrant(firm=3, lent=2)]
    """
    left, within = dict(free), headroom.copy()
    firm: list[int] = []
    for party in parties:
        own, tenant, replicas = party.running.own, party.running.spec.tenant, sum(party.replicas.values())
        more = min(min(party.wish, party.running.share) - own, room(left, party.replicas))
        if more > 0:
            more = min(more, within.cores_left(tenant) // replicas)
            within.take(tenant, 0, more * replicas)
        for node, count in party.replicas.items():
            left[node] -= more * count
        firm.append(own + more)
    borrowers = [
        borrower(_with(party.running, each), party.wish, party.replicas, weigh(party.running))
        for party, each in zip(parties, firm, strict=True)
        if party.wish > each
    ]
    lent = lend(left, borrowers)
    return [CoreGrant(each, lent.get(party.running.job_id, 0)) for party, each in zip(parties, firm, strict=True)]


def _with(running: ResizableJob, own: int) -> ResizableJob:
    """Return a job as if it owned this many cores, keeping what is lent to it."""
    lead, lent = running.lead, running.cores[running.lead] - running.own
    return replace(
        running,
        cores=(*running.cores[:lead], own + lent, *running.cores[lead + 1 :]),
        lent=tuple(lent if number == lead else 0 for number in range(len(running.cores))),
    )


def borrower(running: ResizableJob, wish: int, replicas: Mapping[int, int], weight: float = 1.0) -> Borrower:
    """Return what spare cores are worth to a job that claims this many cores per replica of its leading role.

    A gain is relative to the rate on its GPUs' share and is weighted by the GPUs that it keeps busy; `replicas` are
    those of the leading role by node.
    """
    own = running.own
    points = running.measured
    whole = weight * running.gpus * sum(replicas.values()) / expected(points, running.share)
    worth = _rising(whole * expected(points, cores) for cores in range(own, max(own, wish) + 1))
    return Borrower(running.job_id, worth, replicas, running.cores[running.lead] - own)


def _rising(values: Iterable[float]) -> list[float]:
    best, rising = 0.0, []
    for value in values:
        best = max(best, value)
        rising.append(best)
    return rising
