"""Which jobs can ever run: asked once for each shape of gang, of the empty cluster.

A job that cannot run is set aside with the reason; it is neither lost nor in anybody's way.
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
from cotenant.core.sizing.replica_sizing import too_few
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import Shape, shape_of
from cotenant.simulator.policy_set import AskedPlacement, Policies, PolicyFailed
from cotenant.simulator.traces import TraceJob


class Admission:
    """Sizes jobs at their submission and tells those that can never run."""

    def __init__(self, cluster: Cluster, policies: Policies, seed: int, tenancy: Tenancy = NO_TENANTS) -> None:
        self._policies = policies
        self._limited, self._tenants = tenancy.limited(), tenancy.tenants
        self._empty = cluster.ledger()
        self._node_shapes = shapes_of(self._empty)
        self._rng = np.random.default_rng(seed)  # its own, so that asking here changes nothing elsewhere
        self._placement = AskedPlacement(policies.placement)
        self._shapes: dict[tuple[Hashable, str], Shape] = {}
        self._too_large: dict[SpecShape, Refusal | None] = {}
        self._undrawn = self._rng.bit_generator.state

    @property
    def drew(self) -> bool:
        """Whether anything was drawn at random."""
        return self._rng.bit_generator.state != self._undrawn

    def shape(self, job: TraceJob, estimate: Estimate) -> Shape | Refusal:
        """Decide a job's cores, or say why it can never run.

        Raises:
            PolicyFailed: the allocator or the placement policy raised an error.
        """
        spec = job.spec()
        if refusal := self._never_fits(spec):
            return refusal
        if refusal := too_few(spec, estimate):
            return refusal
        try:
            gang = gang_of(job.id, spec, estimate, self._policies.allocator, self._node_shapes)
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed(
                "allocation", self._policies.allocator, job.id, f"{type(error).__name__}: {error}"
            ) from error
        tenant = job.tenant if job.tenant in self._limited else ""
        key = self._placement.alike(gang), tenant
        if key not in self._shapes:
            shape = shape_of(gang, tenant)
            shape.until_seconds = self._placement.alike_seconds(gang)
            shape.impossible = self._beyond(tenant, gang) or self._impossible(gang)
            self._shapes[key] = shape
        shape = self._shapes[key]
        return shape.impossible or shape

    def _never_fits(self, spec: JobSpec) -> Refusal | None:
        if spec.shape not in self._too_large:
            self._too_large[spec.shape] = never_fits(spec, self._node_shapes, elastic=False)
        return self._too_large[spec.shape]

    def _beyond(self, tenant: str, gang: Gang) -> Refusal | None:
        """Say whether a gang alone is more than its tenant may ever hold."""
        if not tenant or not (over := Headroom(self._tenants).refuse(tenant, gang.gpu_milli, gang.cores)):
            return None
        return replace(over, remedy="its tenant's limit is raised, or the job asks for less")

    def _impossible(self, gang: Gang) -> Refusal | None:
        """Ask the placement policy itself, for it may want more than counts tell."""
        answer = self._placement.place(gang, self._empty, self._rng)
        if not isinstance(answer, Refusal):
            return None
        detail = f"refused even on the empty cluster: {answer.detail}"
        return Refusal(Code.NEVER_FITS, detail, answer.remedy, answer.numbers)
