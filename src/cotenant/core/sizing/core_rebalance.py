"""Cores dealt to the running jobs of some nodes: what each has for good, and what is lent to whom.

The live mesh and the simulator ask their allocator for wishes, and both deal here. Up to its GPUs' share a job has for
good what it wishes for, as long as nobody else has it for good and its tenant may hold it. What is left then is lent,
to whoever gains most; that counts for no tenant, since it is taken back as soon as somebody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.core.model.tenancy import Headroom
from cotenant.core.sizing.core_search import expected
from cotenant.core.sizing.resize import Running
from cotenant.core.sizing.spare_cores import Borrower, lend

NO_LIMITS = Headroom(())


@dataclass(frozen=True, slots=True)
class Party:
    """A job at the table: as its allocator was shown it, and how many cores it could make use of.

    The wish is for each replica of its leading role; `replicas` counts these by node.
    """

    running: Running
    wish: int
    replicas: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Hand:
    """Cores for each replica of a job's leading role: those that are its own, and those lent to it beside them."""

    firm: int
    lent: int = 0

    @property
    def cores(self) -> int:
        """All of them."""
        return self.firm + self.lent


def room(free: Mapping[int, int], replicas: Mapping[int, int]) -> int:
    """Count the cores that each replica could get in lock-step; `replicas` by node.

    >>> room({0: 9, 1: 5}, {0: 2, 1: 1})
    4
    """
    return max(0, min((free[node] // count for node, count in replicas.items()), default=0))


def deal(
    parties: Sequence[Party],
    free: Mapping[int, int],
    weigh: Callable[[Running], float],
    headroom: Headroom = NO_LIMITS,
) -> list[Hand]:
    """Deal cores to jobs in their order.

    `free` counts by node what nobody has for good: what nobody holds, and what is lent to those at the table. `weigh`
    says how much a job's gain counts beside equal gains of others. `headroom` counts what tenants hold for good, at
    this table and elsewhere. What a job gives back makes others of its tenant room when they are dealt to next: until
    its nodes have done it, the job holds it still.

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import JobSpec, Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),))
    >>> slim, wide = (Running(name, spec, UNKNOWN, (3,), (0,), node_share=(3,)) for name in ("slim", "wide"))
    >>> deal([Party(slim, 1, {0: 1}), Party(wide, 9, {0: 1})], {0: 0}, weigh=lambda running: 1.0)
    [Hand(firm=1, lent=0), Hand(firm=3, lent=2)]
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
    return [Hand(each, lent.get(party.running.job_id, 0)) for party, each in zip(parties, firm, strict=True)]


def _with(running: Running, own: int) -> Running:
    """See a job with so many cores of its own, beside which it keeps what was lent to it."""
    lead, lent = running.lead, running.cores[running.lead] - running.own
    return replace(
        running,
        cores=(*running.cores[:lead], own + lent, *running.cores[lead + 1 :]),
        lent=tuple(lent if number == lead else 0 for number in range(len(running.cores))),
    )


def borrower(running: Running, wish: int, replicas: Mapping[int, int], weight: float = 1.0) -> Borrower:
    """Say what spare cores are worth to a job that wishes for so many for each replica of its leading role.

    A gain is relative to the rate on its GPUs' share and counts by the GPUs that it keeps busy; `replicas` are those
    of the leading role by node.
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
