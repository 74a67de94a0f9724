"""How many jobs each tenant has that have not ended, so that none has more than are allowed."""

from __future__ import annotations

from collections import Counter

from cotenant.codec import errors
from cotenant.core.model.job import JobSpec


class Room:
    """Counts jobs by tenant: those that live, and those that are being taken in.

    Without the latter, calls at once, each of which finds that there is room, would be let in together.

    >>> room = Room()
    >>> room.expect(JobSpec(tenant="a"))
    >>> room.check(JobSpec(tenant="a"), 1)
    Traceback (most recent call last):
    cotenant.codec.errors.Problem: tenant a has 1 jobs that have not ended; 1 are taken at most
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()

    def check(self, spec: JobSpec, jobs_max: int) -> None:
        """Refuse jobs beyond what a tenant may have; 0 means any number.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        has = self.live[spec.tenant] + self._coming[spec.tenant]
        if jobs_max and has + _count(spec) > jobs_max:
            told = f"tenant {spec.tenant} has {has} jobs that have not ended; {jobs_max} are taken at most"
            raise errors.exhausted("TENANT_JOBS", told, limit=str(jobs_max))

    def expect(self, spec: JobSpec) -> None:
        """Count a job, or an array of them, that is being taken in."""
        self._coming[spec.tenant] += _count(spec)

    def expect_no_more(self, spec: JobSpec) -> None:
        """It was taken in, or was not."""
        self._coming[spec.tenant] -= _count(spec)
        if not self._coming[spec.tenant]:
            del self._coming[spec.tenant]


def _count(spec: JobSpec) -> int:
    return len(spec.array.indices) if spec.array else 1
