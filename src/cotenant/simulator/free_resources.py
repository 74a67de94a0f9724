"""Free resources, summed over all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.model.resources import Resources
from cotenant.simulator.job import JobClass

MANY = 1 << 31  # more gangs than any simulation has


@dataclass(slots=True)
class FreeResources:
    """Free resources, summed over all nodes."""

    now: Resources

    def lacks(self, job_class: JobClass) -> bool:
        """Return whether a gang needs more than is free."""
        return not job_class.needs.fits(self.now)

    def times(self, job_class: JobClass) -> int:
        """Return how many gangs fit, by counting; `MANY` of a class that needs nothing."""
        return max(
            0, min((have // need for need, have in zip(job_class.needs, self.now, strict=True) if need), default=MANY)
        )

    def lacking(self, job_class: JobClass) -> list[str]:
        """Return the resources of which a gang needs more than is free."""
        return job_class.needs.lacking(self.now)

    def take(self, job_class: JobClass, times: int = 1) -> None:
        """Take the resources of a gang; a negative number of times gives them back."""
        if times:
            self.now -= job_class.needs if times == 1 else job_class.needs * times
