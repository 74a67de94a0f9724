"""Limits the number of unfinished jobs of each tenant."""

from __future__ import annotations

from collections import Counter

from cotenant.codec import errors
from cotenant.core.model.job import JobSpec


class TenantQuota:
    """Counts jobs by tenant: unfinished ones, and those that are being created.

    Without the latter, concurrent calls that each find room would all be admitted.

    >>> quota = TenantQuota()
    >>> quota.reserve(JobSpec(tenant="a"))
    >>> quota.check(JobSpec(tenant="a"), 1)
    Traceback (most recent call last):
    cotenant.codec.errors.Problem: tenant a has 1 unfinished jobs; the limit is 1
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()

    def check(self, spec: JobSpec, jobs_max: int) -> None:
        """Reject jobs beyond a tenant's limit; 0 means unlimited.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        has = self.live[spec.tenant] + self._reserved[spec.tenant]
        if jobs_max and has + _count(spec) > jobs_max:
            message = f"tenant {spec.tenant} has {has} unfinished jobs; the limit is {jobs_max}"
            raise errors.exhausted("TENANT_JOBS", message, limit=str(jobs_max))

    def reserve(self, spec: JobSpec) -> None:
        """Count a job or array that is being created."""
        self._reserved[spec.tenant] += _count(spec)

    def release(self, spec: JobSpec) -> None:
        """Undo `reserve`: it was created, or was not."""
        self._reserved[spec.tenant] -= _count(spec)
        if not self._reserved[spec.tenant]:
            del self._reserved[spec.tenant]


def _count(spec: JobSpec) -> int:
    return len(spec.array.indices) if spec.array else 1
