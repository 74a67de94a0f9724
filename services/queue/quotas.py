"""What tenants may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cotenant.core.refusals import Code, Refusal, gpus
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.v1 import tenant_service_pb2


@dataclass(slots=True)
class Use:
    """GPUs in thousandths and cores."""

    gpu_milli: int = 0
    cores: int = 0

    def add(self, other: Use) -> None:
        """Count more."""
        self.gpu_milli += other.gpu_milli
        self.cores += other.cores


def held_by(record: Record) -> Use:
    """What a job's attempt holds."""
    tasks = [task for part in record.job.attempt.allocations for task in part.tasks]
    return Use(record.spec.gpu_milli, sum(len(task.core_ids) for task in tasks))


def asked_by(record: Record) -> Use:
    """What a job asks for; `auto` cores count as one per replica."""
    return Use(record.spec.gpu_milli, sum(role.replicas * (role.request.cores or 1) for role in record.spec.roles))


class Quotas:
    """What tenants with limits hold, counted anew in each cycle: usage is derived, never kept.

    Jobs that placement is being asked about count too, but only until it has answered: a job that would be over the
    limit only because of them is to be asked about later, for they may find no place.
    """

    def __init__(self, state: State) -> None:
        self._limits: Mapping[str, tenant_service_pb2.Tenant] = {
            tenant_id: tenant
            for tenant_id, (tenant, _) in state.tenants.items()
            if tenant.HasField("limit_gpu_milli") or tenant.HasField("limit_cores")
        }
        self._held = {tenant_id: Use() for tenant_id in self._limits}
        self._asked: dict[str, Use] = {}
        for record in state.held.values() if self._limits else ():
            self.started(record)

    def refuse(self, record: Record) -> Refusal | None:
        """Say whether a job would take its tenant over its limit."""
        tenant_id = record.spec.tenant
        if tenant_id not in self._limits:
            return None
        over = self._over(tenant_id, asked_by(record), self._held[tenant_id])
        if not over:
            return None
        return Refusal(
            Code.QUOTA,
            f"tenant {tenant_id} would hold {' and '.join(over)}",
            "jobs of the tenant finish, or its limit is raised",
        )

    def ask(self, record: Record) -> bool:
        """Count a job as asked about; False where it may only be asked about once the others were answered."""
        tenant_id = record.spec.tenant
        if tenant_id not in self._limits:
            return True
        asked = self._asked.setdefault(tenant_id, Use())
        together = Use(self._held[tenant_id].gpu_milli + asked.gpu_milli, self._held[tenant_id].cores + asked.cores)
        if self._over(tenant_id, asked_by(record), together):
            return False
        asked.add(asked_by(record))
        return True

    def answered(self) -> None:
        """Placement has answered: only what started counts."""
        self._asked.clear()

    def started(self, record: Record) -> None:
        """Count what a job holds."""
        if record.spec.tenant in self._limits:
            self._held[record.spec.tenant].add(held_by(record))

    def _over(self, tenant_id: str, more: Use, use: Use) -> list[str]:
        tenant = self._limits[tenant_id]
        milli, cores, over = use.gpu_milli + more.gpu_milli, use.cores + more.cores, []
        if tenant.HasField("limit_gpu_milli") and milli > tenant.limit_gpu_milli:
            over.append(f"{gpus(milli)} of at most {tenant.limit_gpu_milli / 1000:g}")
        if tenant.HasField("limit_cores") and cores > tenant.limit_cores:
            over.append(f"{cores} cores of at most {tenant.limit_cores}")
        return over
