"""`tenants=N`: the tenant of each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.simulator.overlays.port import Setting, picks, whole
from cotenant.simulator.traces import TraceJob

TENANTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Tenants:
    """Gives each job to one of N tenants; the k-th has 1/k of the first one's jobs (Zipf's law).

    Few tenants submit most of the jobs in published clusters; the exponent 1 is assumed, as is that a tenant's jobs are
    like any other's [R].
    """

    key: ClassVar[str] = "tenants"
    form: ClassVar[str] = "N"
    count: int

    @classmethod
    def parse(cls, value: str) -> Tenants:
        """Parse the number of tenants."""
        return cls(whole(value, 1, TENANTS_MAX))

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the tenants."""
        drawn = picks(rng, len(jobs), [1 / (k + 1) for k in range(self.count)])
        return [replace(job, tenant=f"tenant-{which + 1}") for job, which in zip(jobs, drawn, strict=True)]
