"""Tenants: what each is guaranteed and may hold at most, and so which jobs are entitled and which borrow.

A guarantee (quota) is capacity that a tenant can always have; idle quota is lent to anyone, so a guarantee costs the
other tenants nothing while its owner does not use it (borrowing within a cohort, as in YARN's capacity scheduler and in
Kueue [R]). Walking a tenant's jobs in the order of the queue policy, a job is *entitled* if the tenant's sum with it
stays within the quota. A job that is too large does not use the quota up: later jobs may still fit. All other jobs
*borrow*.

Tenants may belong to other tenants, as a group belongs to a department. What a tenant holds counts for all its
ancestors. A department's quota holds for the sum of its groups: a job beyond its group's own quota is still entitled
while the department's quota has room, beside what the groups' own quotas hold. So idle quota is lent inside the
department first, and reclaimed there by its owner; a limit of the department applies to all of its groups together.

GPUs and cores are guaranteed separately. A job that asks for GPUs needs a quota of GPUs; its cores count only if cores
are guaranteed too, because they come with the GPUs. A job without GPUs needs a quota of cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs
from cotenant.core.model.refusal import Code, Refusal, gpus
from cotenant.core.model.validation import Violation
from cotenant.core.spelling import did_you_mean

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who jobs are charged to. None: no quota, no limit. `weight` is its weight in fair sharing.

    `parent` is the tenant that it belongs to; empty if there is none.
    """

    id: str
    quota_gpu_milli: int | None = None
    quota_cores: int | None = None
    limit_gpu_milli: int | None = None
    limit_cores: int | None = None
    weight: float = 1.0
    parent: str = ""

    @property
    def has_quota(self) -> bool:
        """Whether it has a quota."""
        return self.quota_gpu_milli is not None or self.quota_cores is not None

    @property
    def has_limit(self) -> bool:
        """Whether it has a limit."""
        return self.limit_gpu_milli is not None or self.limit_cores is not None


def check_tenant(tenant: Tenant) -> Iterator[Violation]:
    """Yield every invalid field, by its name here."""
    if not tenant.id:
        yield Violation("id", "must not be empty")
    for name in ("quota_gpu_milli", "quota_cores", "limit_gpu_milli", "limit_cores"):
        value = getattr(tenant, name)
        if value is not None and not 0 <= value < UNLIMITED:
            yield Violation(name, "must not be negative" if value < 0 else "is too large")
    if not 0 < tenant.weight < math.inf:
        yield Violation("weight", f"must be more than 0, not {tenant.weight:g}")
    for quota, limit in (("quota_gpu_milli", "limit_gpu_milli"), ("quota_cores", "limit_cores")):
        guaranteed, most = getattr(tenant, quota), getattr(tenant, limit)
        if guaranteed is not None and most is not None and guaranteed > most:
            yield Violation(quota, "is more than the limit")


def check_hierarchy(tenants: Iterable[Tenant]) -> Iterator[tuple[str, Violation]]:
    """Yield what is wrong with the hierarchy, with the tenant's id: unknown parents, cycles, overcommitted quotas."""
    known = {tenant.id: tenant for tenant in tenants}
    for tenant in known.values():
        if tenant.parent and tenant.parent not in known:
            yield tenant.id, Violation("parent", f"{tenant.parent} is not a tenant{did_you_mean(tenant.parent, known)}")
        elif tenant.id in (above := [one.id for one in ancestors(tenant, known)]):
            circle = " → ".join([tenant.id, *above[: above.index(tenant.id) + 1]])
            yield tenant.id, Violation("parent", f"a tenant cannot belong to itself: {circle}")
    for parent in known.values():
        children = [tenant for tenant in known.values() if tenant.parent == parent.id]
        for name in ("quota_gpu_milli", "quota_cores"):
            promised = sum(getattr(child, name) or 0 for child in children)
            own = getattr(parent, name)
            if own is not None and promised > own:
                problem = f"is {own}, less than the {promised} guaranteed to its child tenants"
                yield parent.id, Violation(name, problem)


def ancestors(tenant: Tenant, known: Mapping[str, Tenant]) -> Iterator[Tenant]:
    """Yield a tenant's ancestors, the nearest first; a cycle ends where it closes."""
    met: set[str] = set()
    while (above := known.get(tenant.parent)) and above.id not in met:
        met.add(above.id)
        yield above
        tenant = above


class Tenancy:
    """Tenants, numbered as in a job table; a number beyond them has no quota and no limit.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, milli in enumerate([8000, 3000, 2000, 1000]):
    ...     table.add(JobRow(f"job{number}", 0, sequence=number, gpu_milli=milli))
    >>> tenancy = Tenancy([Tenant("vision", quota_gpu_milli=4000)])
    >>> tenancy.entitled(table.jobs(now=0), np.arange(4), first=np.zeros(4, dtype=np.bool_)).tolist()
    [False, True, False, True]
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.tenants = tuple(tenants)
        nobody = Tenant("")
        everyone = (*self.tenants, nobody)
        self.guarantees = any(tenant.has_quota for tenant in self.tenants)
        self.limits = any(tenant.has_limit for tenant in self.tenants)
        self._quota_gpus = np.array([tenant.quota_gpu_milli or 0 for tenant in everyone], dtype=np.int64)
        self._quota_cores = _column([tenant.quota_cores for tenant in everyone])
        self._limit_gpus = _column([tenant.limit_gpu_milli for tenant in everyone])
        self._limit_cores = _column([tenant.limit_cores for tenant in everyone])
        known = {tenant.id: tenant for tenant in self.tenants}
        numbers = {tenant.id: number for number, tenant in enumerate(self.tenants)}
        self._chains: list[tuple[int, ...]] = [  # a tenant and its ancestors
            (number, *(numbers[above.id] for above in ancestors(tenant, known)))
            for number, tenant in enumerate(everyone)
        ]
        self._heights = [0] * len(
            everyone
        )  # 0 for tenants without children; others are higher than all their descendants
        for chain in self._chains:
            for steps, one in enumerate(chain):
                self._heights[one] = max(self._heights[one], steps)
        self._families = any(len(chain) > 1 for chain in self._chains)
        self._has_quota = np.array([any(everyone[one].has_quota for one in chain) for chain in self._chains])
        self._has_limit = np.array([any(everyone[one].has_limit for one in chain) for chain in self._chains])

    def weight(self, number: int) -> float:
        """Return a tenant's weight."""
        return self.tenants[number].weight if number < len(self.tenants) else 1.0

    def tree(self, count: int) -> tuple[list[Ints], Floats]:
        """Return the sharing tree: the node of each tenant at each level, from the top, and the weights.

        Tenants have the numbers from 0 to at least `count`; the node of a tenant has its number. The jobs that a tenant
        has itself are one more node of weight 1 beside its children.

        >>> levels, weights = Tenancy([Tenant("lab", weight=2.0), Tenant("asr", parent="lab")]).tree(3)
        >>> [level.tolist() for level in levels], weights.tolist()
        ([[0, 0, 2], [3, 1, 5]], [2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        """
        count = max(count, len(self.tenants))
        weights = np.ones(2 * count if self._families else count)
        weights[: len(self.tenants)] = [tenant.weight for tenant in self.tenants]
        if not self._families:
            return [np.arange(count)], weights
        depth = max(map(len, self._chains))
        levels = [np.arange(count) for _ in range(depth)]
        for number in range(count):
            path = self._chains[number][::-1] if number < len(self.tenants) else (number,)
            for level in range(depth):
                levels[level][number] = path[level] if level < len(path) else count + number
        return levels, weights

    def limited(self) -> frozenset[str]:
        """Return the tenants to which a limit applies, their own or an ancestor's."""
        return frozenset(tenant.id for tenant, bound in zip(self.tenants, self._has_limit, strict=False) if bound)

    def _numbers(self, jobs: Jobs) -> Ints:
        return np.minimum(jobs.tenant, len(self.tenants))

    # Guarantees ----------------------------------------------------------------------------------------------

    def entitled(self, jobs: Jobs, ranked: Ints, first: Flags) -> Flags:
        """Return which rows are within quota, in order; `first` marks jobs that will not be stopped, which count first.

        Quotas of tenants without children are used first, then those of their parents, and so on upwards, so that no
        job uses what is guaranteed to a tenant further down.
        """
        marked = np.zeros(len(jobs), dtype=np.bool_)
        left_gpus, left_cores = self._quota_gpus.tolist(), self._quota_cores.tolist()
        order = np.concatenate([ranked[first[ranked]], ranked[~first[ranked]]])
        for height in range(max(self._heights) + 1):
            self._mark(jobs, order[~marked[order]], height, (left_gpus, left_cores), marked)
        return marked

    def _mark(self, jobs: Jobs, order: Ints, height: int, left: tuple[list[int], list[int]], marked: Flags) -> None:
        """Mark the rows held by quotas at one height of the hierarchy, beside those marked already."""
        above = [
            next((at for at, one in enumerate(chain) if self._heights[one] == height), None) for chain in self._chains
        ]
        holders = np.array([-1 if at is None else chain[at] for at, chain in zip(above, self._chains, strict=True)])
        members = self._numbers(jobs)
        numbers = holders[members]
        quota_cores = np.where(
            (jobs.gpu_milli == 0) & (self._quota_cores[numbers] == UNLIMITED), -1, self._quota_cores[numbers]
        )
        alone = (jobs.gpu_milli <= self._quota_gpus[numbers]) & (jobs.cores <= quota_cores)
        rows = order[alone[order] & (numbers[order] >= 0)]
        left_gpus, left_cores = left
        columns = (rows, members[rows], numbers[rows], jobs.gpu_milli[rows], jobs.cores[rows])
        for row, member, holder, milli, cores in zip(*(column.tolist() for column in columns), strict=True):
            if milli <= left_gpus[holder] and cores <= left_cores[holder]:
                marked[row] = True
                for tenant in self._chains[member][above[member] :]:
                    left_gpus[tenant] -= milli
                    left_cores[tenant] -= cores

    def over_quota(self, jobs: Jobs, entitled: Flags) -> Flags:
        """Return which jobs exceed the quota of tenants that have one: if they wait, it is for their fair share."""
        return self._has_quota[self._numbers(jobs)] & ~entitled

    # Limits --------------------------------------------------------------------------------------------------

    def over_limit(self, jobs: Jobs, holding: Flags) -> Flags:
        """Return which other jobs would take their tenants over a limit, given what the rows `holding` hold."""
        numbers = self._numbers(jobs)
        over = np.zeros(len(jobs), dtype=np.bool_)
        for need, limit in ((jobs.gpu_milli, self._limit_gpus), (jobs.cores, self._limit_cores)):
            over |= (need > 0) & (need > self._least(self._left(limit, need, numbers, holding))[numbers])
        return over & ~holding

    def _least(self, left: Ints) -> Ints:
        """Return what each tenant may still take: no more than any of its ancestors may."""
        return np.array([left[list(chain)].min() for chain in self._chains]) if self._families else left

    def _sums(self, need: Ints, numbers: Ints, holding: Flags) -> Ints:
        weights = need[holding].astype(np.float64)  # whole numbers far below 2**53
        sums = np.bincount(numbers[holding], weights=weights, minlength=len(self.tenants) + 1)
        return sums.astype(np.int64)

    def _left(self, limit: Ints, need: Ints, numbers: Ints, holding: Flags) -> Ints:
        """Return by tenant what may still be taken, given what it and its descendants hold."""
        own = self._sums(need, numbers, holding)
        if not self._families:
            return limit - own
        whole = np.zeros_like(own)
        for number, chain in enumerate(self._chains):
            whole[list(chain)] += own[number]
        return limit - whole

    def walk(self, jobs: Jobs, holding: Flags) -> LimitWalk:
        """Return a counter of tenants' use against their limits, starting with what the rows `holding` hold."""
        numbers = self._numbers(jobs)
        return LimitWalk(
            [self._chains[number] for number in numbers.tolist()],
            self._left(self._limit_gpus, jobs.gpu_milli, numbers, holding),
            self._left(self._limit_cores, jobs.cores, numbers, holding),
        )

    def headroom(self, jobs: Jobs, holding: Flags) -> Headroom:
        """Return what limited tenants hold now, as a headroom for placement."""
        if not self.limits:
            return Headroom(())
        numbers = self._numbers(jobs)
        milli, cores = self._sums(jobs.gpu_milli, numbers, holding), self._sums(jobs.cores, numbers, holding)
        held = {tenant.id: (int(milli[number]), int(cores[number])) for number, tenant in enumerate(self.tenants)}
        return Headroom(self.tenants, held)


def _column(values: Sequence[int | None]) -> Ints:
    return np.array([UNLIMITED if value is None else value for value in values], dtype=np.int64)


class LimitWalk:
    """Counts what rows take of their tenants' limits."""

    def __init__(self, tenants: Sequence[tuple[int, ...]], gpus_left: Ints, cores_left: Ints) -> None:
        self._tenants = tenants
        self._gpus_left, self._cores_left = gpus_left.tolist(), cores_left.tolist()

    def allows(self, row: int, gpu_milli: int, cores: int) -> bool:
        """Return whether a row stays within its tenant's limits."""
        return all(
            (not gpu_milli or gpu_milli <= self._gpus_left[tenant]) and (not cores or cores <= self._cores_left[tenant])
            for tenant in self._tenants[row]
        )

    def take(self, row: int, gpu_milli: int, cores: int) -> None:
        """Count a row."""
        for tenant in self._tenants[row]:
            self._gpus_left[tenant] -= gpu_milli
            self._cores_left[tenant] -= cores


class Headroom:
    """What limited tenants hold while gangs are placed; true if any tenant has a limit.

    >>> room = Headroom([Tenant("vision", limit_gpu_milli=8000)], {"vision": (6000, 0)})
    >>> room.refuse("vision", 2000, 4), room.refuse("other", 64000, 0)
    (None, None)
    >>> room.refuse("vision", 4000, 0).detail
    'tenant vision would hold 10 GPUs of at most 8'
    """

    def __init__(self, tenants: Iterable[Tenant], held: Mapping[str, tuple[int, int]] | None = None) -> None:
        known = {tenant.id: tenant for tenant in tenants}
        self.bound: dict[str, tuple[Tenant, ...]] = {}  # by tenant: those with limits among it and its ancestors
        for tenant in known.values():
            if binding := tuple(one for one in (tenant, *ancestors(tenant, known)) if one.has_limit):
                self.bound[tenant.id] = binding
        self._held = dict.fromkeys((tenant.id for binding in self.bound.values() for tenant in binding), (0, 0))
        for tenant_id, (milli, cores) in (held or {}).items():
            self.take(tenant_id, milli, cores)

    def __bool__(self) -> bool:
        return bool(self.bound)

    def copy(self) -> Headroom:
        """Return a copy that is counted separately."""
        other = Headroom(())
        other.bound, other._held = self.bound, dict(self._held)
        return other

    def held(self, tenant_id: str) -> tuple[int, int]:
        """Return the GPUs, in thousandths, and cores that a limited tenant and its descendants hold."""
        return self._held[tenant_id]

    def take(self, tenant_id: str, gpu_milli: int, cores: int) -> None:
        """Add to what a tenant and its ancestors hold; negative amounts subtract."""
        for tenant in self.bound.get(tenant_id, ()):
            held = self._held[tenant.id]
            self._held[tenant.id] = held[0] + gpu_milli, held[1] + cores

    def allows(self, tenant_id: str, gpu_milli: int, cores: int) -> bool:
        """Return whether a tenant may hold this much more."""
        return not any(self._over(tenant, gpu_milli, cores) for tenant in self.bound.get(tenant_id, ()))

    def cores_left(self, tenant_id: str) -> int:
        """Return the cores that a tenant may still take; `UNLIMITED` if it has no limit."""
        binding = self.bound.get(tenant_id, ())
        left = (limit - self._held[one.id][1] for one in binding if (limit := one.limit_cores) is not None)
        return max(0, min(left, default=UNLIMITED))

    def refuse(self, tenant_id: str, gpu_milli: int, cores: int) -> Refusal | None:
        """Return why a tenant may not hold this much more; None if it may."""
        for tenant in self.bound.get(tenant_id, ()):
            if over := self._over(tenant, gpu_milli, cores):
                return _beyond(tenant_id, tenant.id, over)
        return None

    def _over(self, tenant: Tenant, gpu_milli: int, cores: int) -> Over:
        """Return by how much a limited tenant would exceed its limits."""
        held_milli, held_cores = self._held[tenant.id]
        counts = {
            "gpu_milli": (held_milli, gpu_milli, tenant.limit_gpu_milli),
            "cores": (held_cores, cores, tenant.limit_cores),
        }
        return {
            name: (held, asked, most)
            for name, (held, asked, most) in counts.items()
            if most is not None and asked > 0 and held + asked > most
        }


Over = dict[str, tuple[int, int, int]]  # by resource: held, asked for, and the limit


def _beyond(tenant_id: str, limited_id: str, over: Over) -> Refusal:
    """Return the refusal of a job that would take its tenant, or an ancestor, over a limit."""
    words = {
        "gpu_milli": lambda held, asked, most: f"{gpus(held + asked)} of at most {most / 1000:g}",
        "cores": lambda held, asked, most: f"{held + asked} cores of at most {most}",
    }
    problem = " and ".join(words[name](*counts) for name, counts in over.items())
    numbers = {
        f"{kind}_{name}": float(count)
        for name, counts in over.items()
        for kind, count in zip(("held", "wanted", "limit"), counts, strict=True)
    }
    whose = f"tenant {limited_id}" + ("" if limited_id == tenant_id else f", to which {tenant_id} belongs,")
    remedy = "jobs of the tenant finish, or its limit is raised"
    return Refusal(Code.QUOTA, f"{whose} would hold {problem}", remedy, numbers)


NO_TENANTS = Tenancy()
