"""Tenants: what each is guaranteed, what it may hold at most, and so who is entitled and who only borrows.

A guarantee is room that is always the tenant's; idle room is lent to anybody, so a guarantee costs the others nothing
while its owner does not use it (capacity borrowed inside a cohort, as in YARN's capacity scheduler and in Kueue [R]).
Walking a tenant's jobs in the order of the queue policy, a job is *entitled* if the tenant's sum with it stays within
the guarantee. One that is too large does not use the guarantee up: later ones may still fit. All others *borrow*.

GPUs and cores are guaranteed apart. A job that asks for GPUs needs a guarantee of GPUs; its cores count only where
cores are guaranteed too, for they come with the GPUs. A job without GPUs needs a guarantee of cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.refusals import Code, Refusal, gpus
from cotenant.core.table import Flags, Ints, Jobs
from cotenant.core.validate import Violation

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays for jobs. None: no guarantee, no limit. `weight` is its share beside others, for policies that share."""

    id: str
    quota_gpu_milli: int | None = None
    quota_cores: int | None = None
    limit_gpu_milli: int | None = None
    limit_cores: int | None = None
    weight: float = 1.0

    @property
    def has_quota(self) -> bool:
        """Whether anything is guaranteed to it."""
        return self.quota_gpu_milli is not None or self.quota_cores is not None

    @property
    def has_limit(self) -> bool:
        """Whether there is something that it may not exceed."""
        return self.limit_gpu_milli is not None or self.limit_cores is not None


def check_tenant(tenant: Tenant) -> Iterator[Violation]:
    """Name every field that makes no sense, by its name here."""
    if not tenant.id:
        yield Violation("id", "must not be empty")
    for name in ("quota_gpu_milli", "quota_cores", "limit_gpu_milli", "limit_cores"):
        value = getattr(tenant, name)
        if value is not None and not 0 <= value < UNLIMITED:
            yield Violation(name, "must not be negative" if value < 0 else "is more than can be counted")
    if not 0 < tenant.weight < math.inf:
        yield Violation("weight", f"must be more than 0, not {tenant.weight:g}")
    for quota, limit in (("quota_gpu_milli", "limit_gpu_milli"), ("quota_cores", "limit_cores")):
        guaranteed, most = getattr(tenant, quota), getattr(tenant, limit)
        if guaranteed is not None and most is not None and guaranteed > most:
            yield Violation(quota, "is more than the limit")


class Tenancy:
    """Tenants, by the numbers that a table of jobs knows them by; a number beyond them has no guarantee and no limit.

    >>> from cotenant.core.table import JobRow, JobTable
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
        self._has_quota = np.array([tenant.has_quota for tenant in everyone])

    def weight(self, number: int) -> float:
        """Tell a tenant's share beside others."""
        return self.tenants[number].weight if number < len(self.tenants) else 1.0

    def _numbers(self, jobs: Jobs) -> Ints:
        return np.minimum(jobs.tenant, len(self.tenants))

    # Guarantees ----------------------------------------------------------------------------------------------

    def entitled(self, jobs: Jobs, ranked: Ints, first: Flags) -> Flags:
        """Walk the order, `first` those that nobody will stop, and mark the rows that their guarantee holds."""
        numbers = self._numbers(jobs)
        quota_cores = np.where(
            (jobs.gpu_milli == 0) & (self._quota_cores[numbers] == UNLIMITED), -1, self._quota_cores[numbers]
        )
        alone = (jobs.gpu_milli <= self._quota_gpus[numbers]) & (jobs.cores <= quota_cores)
        order = np.concatenate([ranked[first[ranked]], ranked[~first[ranked]]])
        rows = order[alone[order]]
        left_gpus, left_cores = self._quota_gpus.tolist(), self._quota_cores.tolist()
        within: list[int] = []
        columns = (rows, numbers[rows], jobs.gpu_milli[rows], jobs.cores[rows])
        for row, tenant, milli, cores in zip(*(column.tolist() for column in columns), strict=True):
            if milli <= left_gpus[tenant] and cores <= left_cores[tenant]:
                left_gpus[tenant] -= milli
                left_cores[tenant] -= cores
                within.append(row)
        marked = np.zeros(len(jobs), dtype=np.bool_)
        marked[within] = True
        return marked

    def over_quota(self, jobs: Jobs, entitled: Flags) -> Flags:
        """Mark jobs beyond the guarantee of tenants that have one: if they wait, that is for their fair share."""
        return self._has_quota[self._numbers(jobs)] & ~entitled

    # Limits --------------------------------------------------------------------------------------------------

    def over_limit(self, jobs: Jobs, holding: Flags) -> Flags:
        """Mark the others that would take their tenants over a limit, with what those `holding` hold."""
        numbers = self._numbers(jobs)
        over = np.zeros(len(jobs), dtype=np.bool_)
        for need, limit in ((jobs.gpu_milli, self._limit_gpus), (jobs.cores, self._limit_cores)):
            over |= (need > 0) & (need > (limit - self._sums(need, numbers, holding))[numbers])
        return over & ~holding

    def _sums(self, need: Ints, numbers: Ints, holding: Flags) -> Ints:
        weights = need[holding].astype(np.float64)  # whole numbers far below 2**53
        sums = np.bincount(numbers[holding], weights=weights, minlength=len(self.tenants) + 1)
        return sums.astype(np.int64)

    def walk(self, jobs: Jobs, holding: Flags) -> LimitWalk:
        """Begin to count tenants' use against their limits, with what those `holding` hold."""
        numbers = self._numbers(jobs)
        return LimitWalk(
            numbers,
            self._limit_gpus - self._sums(jobs.gpu_milli, numbers, holding),
            self._limit_cores - self._sums(jobs.cores, numbers, holding),
        )

    def headroom(self, jobs: Jobs, holding: Flags) -> Headroom:
        """Tell what tenants with limits may still hold, for `place`."""
        if not self.limits:
            return Headroom(())
        numbers = self._numbers(jobs)
        milli, cores = self._sums(jobs.gpu_milli, numbers, holding), self._sums(jobs.cores, numbers, holding)
        held = {tenant.id: (int(milli[number]), int(cores[number])) for number, tenant in enumerate(self.tenants)}
        return Headroom(self.tenants, held)


def _column(values: Sequence[int | None]) -> Ints:
    return np.array([UNLIMITED if value is None else value for value in values], dtype=np.int64)


class LimitWalk:
    """Counts what rows would take from what their tenants may still hold."""

    def __init__(self, tenants: Ints, gpus_left: Ints, cores_left: Ints) -> None:
        self._tenants = tenants
        self._gpus_left, self._cores_left = gpus_left.tolist(), cores_left.tolist()

    def allows(self, row: int, gpu_milli: int, cores: int) -> bool:
        """Tell whether a row stays within its tenant's limits."""
        tenant = self._tenants[row]
        return (not gpu_milli or gpu_milli <= self._gpus_left[tenant]) and (
            not cores or cores <= self._cores_left[tenant]
        )

    def take(self, row: int, gpu_milli: int, cores: int) -> None:
        """Count a row."""
        tenant = self._tenants[row]
        self._gpus_left[tenant] -= gpu_milli
        self._cores_left[tenant] -= cores


class Headroom:
    """What tenants with limits hold while gangs are given places; true where any tenant has a limit.

    >>> room = Headroom([Tenant("vision", limit_gpu_milli=8000)], {"vision": (6000, 0)})
    >>> room.refuse("vision", 2000, 4), room.refuse("other", 64000, 0)
    (None, None)
    >>> room.refuse("vision", 4000, 0).detail
    'tenant vision would hold 10 GPUs of at most 8'
    """

    def __init__(self, tenants: Iterable[Tenant], held: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.limited = {tenant.id: tenant for tenant in tenants if tenant.has_limit}
        known = held or {}
        self._held = {tenant_id: known.get(tenant_id, (0, 0)) for tenant_id in self.limited}

    def __bool__(self) -> bool:
        return bool(self.limited)

    def copy(self) -> Headroom:
        """Make one that is counted apart."""
        return Headroom(self.limited.values(), self._held)

    def held(self, tenant_id: str) -> tuple[int, int]:
        """Tell the GPUs, in thousandths, and cores that a limited tenant holds."""
        return self._held[tenant_id]

    def take(self, tenant_id: str, gpu_milli: int, cores: int) -> None:
        """Count more; negative amounts give back."""
        if tenant_id in self._held:
            held = self._held[tenant_id]
            self._held[tenant_id] = held[0] + gpu_milli, held[1] + cores

    def allows(self, tenant_id: str, gpu_milli: int, cores: int) -> bool:
        """Tell whether a tenant may hold so much more."""
        return tenant_id not in self.limited or not self._over(tenant_id, gpu_milli, cores)

    def refuse(self, tenant_id: str, gpu_milli: int, cores: int) -> Refusal | None:
        """Say why a tenant may not hold so much more, if it may not."""
        if tenant_id not in self.limited or not (over := self._over(tenant_id, gpu_milli, cores)):
            return None
        words = {
            "gpu_milli": lambda held, asked, most: f"{gpus(held + asked)} of at most {most / 1000:g}",
            "cores": lambda held, asked, most: f"{held + asked} cores of at most {most}",
        }
        told = " and ".join(words[name](*counts) for name, counts in over.items())
        numbers = {
            f"{kind}_{name}": float(count)
            for name, counts in over.items()
            for kind, count in zip(("held", "wanted", "limit"), counts, strict=True)
        }
        remedy = "jobs of the tenant finish, or its limit is raised"
        return Refusal(Code.QUOTA, f"tenant {tenant_id} would hold {told}", remedy, numbers)

    def _over(self, tenant_id: str, gpu_milli: int, cores: int) -> dict[str, tuple[int, int, int]]:
        """What would be too much: held, asked for, and the limit, by resource."""
        tenant, (held_milli, held_cores) = self.limited[tenant_id], self._held[tenant_id]
        counts = {
            "gpu_milli": (held_milli, gpu_milli, tenant.limit_gpu_milli),
            "cores": (held_cores, cores, tenant.limit_cores),
        }
        return {
            name: (held, asked, most)
            for name, (held, asked, most) in counts.items()
            if most is not None and asked > 0 and held + asked > most
        }


NO_TENANTS = Tenancy()
