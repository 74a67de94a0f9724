"""Which jobs can ever run: checked once for each class of gangs, on the empty cluster.

A job that cannot run is set aside with the reason; it is not lost and delays no other job.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job import Shape as SpecShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy
from cotenant.core.placement.unschedulable import never_fits, shapes_of
from cotenant.core.scheduling.cycle import gang_of
from cotenant.core.sizing.replica_sizing import unreachable_target
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import JobClass, job_class_of
from cotenant.simulator.policy_set import CheckedPlacement, Policies, PolicyFailed
from cotenant.simulator.traces import TraceJob


class Eligibility:
    """Sizes jobs at their submission and rejects those that can never run."""

    def __init__(self, cluster: Cluster, policies: Policies, seed: int, tenancy: Tenancy = NO_TENANTS) -> None:
        self._policies = policies
        self._limited, self._tenants = tenancy.limited(), tenancy.tenants
        self._empty = cluster.ledger()
        self._node_shapes = shapes_of(self._empty)
        self._rng = np.random.default_rng(seed)  # its own generator, so that checks here change nothing elsewhere
        self._placement = CheckedPlacement(policies.placement)
        self._job_classes: dict[tuple[Hashable, str], JobClass] = {}
        self._too_large: dict[SpecShape, Refusal | None] = {}
        self._initial_rng_state = self._rng.bit_generator.state

    @property
    def used_randomness(self) -> bool:
        """Whether anything was drawn at random."""
        return self._rng.bit_generator.state != self._initial_rng_state

    def job_class(self, job: TraceJob, estimate: Estimate) -> JobClass | Refusal:
        """Decide a job's cores and return its class, or the reason why it can never run.

        Raises:
            PolicyFailed: the allocator or the placement policy raised an error.
        """
        spec = job.spec()
        if refusal := self._never_fits(spec):
            return refusal
        if refusal := unreachable_target(spec, estimate):
            return refusal
        try:
            gang = gang_of(job.id, spec, estimate, self._policies.allocator, self._node_shapes)
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed(
                "allocation", self._policies.allocator, job.id, f"{type(error).__name__}: {error}"
            ) from error
        tenant = job.tenant if job.tenant in self._limited else ""
        key = self._placement.equivalence_key(gang), tenant
        if key not in self._job_classes:
            job_class = job_class_of(gang, tenant)
            job_class.until_seconds = self._placement.equivalence_seconds(gang)
            job_class.impossible = self._over_limit(tenant, gang) or self._refused_when_empty(gang)
            self._job_classes[key] = job_class
        job_class = self._job_classes[key]
        return job_class.impossible or job_class

    def _never_fits(self, spec: JobSpec) -> Refusal | None:
        if spec.shape not in self._too_large:
            self._too_large[spec.shape] = never_fits(spec, self._node_shapes, elastic=False)
        return self._too_large[spec.shape]

    def _over_limit(self, tenant: str, gang: Gang) -> Refusal | None:
        """Return a refusal if a gang alone exceeds its tenant's limit."""
        if not tenant or not (over := Headroom(self._tenants).refuse(tenant, gang.gpu_milli, gang.cores)):
            return None
        return replace(over, remedy="its tenant's limit is raised, or the job requests less")

    def _refused_when_empty(self, gang: Gang) -> Refusal | None:
        """Return the placement policy's refusal on the empty cluster; it may require more than enough resources."""
        answer = self._placement.place(gang, self._empty, self._rng)
        if not isinstance(answer, Refusal):
            return None
        detail = f"refused even on the empty cluster: {answer.detail}"
        return Refusal(Code.NEVER_FITS, detail, answer.remedy, answer.numbers)
