"""Limits and usage of tenants, as input of the core."""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.codec.tenants import tenant_of
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy, Tenant
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, ResourceUsage, held_by
from cotenant.v1 import tenant_service_pb2 as tenant_pb2


def requested_by(record: Record) -> ResourceUsage:
    """Return what a job requests; `auto` cores count as one per replica."""
    spec = record.requested_spec
    return ResourceUsage(spec.gpu_milli, sum(role.replicas * (role.request.cores or 1) for role in spec.roles))


def tenancy_of(state: State) -> Tenancy:
    """Return all tenants; those with jobs come first, by their numbers."""
    if not state.tenants:
        return NO_TENANTS
    known = {tenant_id: tenant_of(tenant) for tenant_id, (tenant, _) in state.tenants.items()}
    busy = [known.pop(tenant_id, Tenant(tenant_id)) for tenant_id in state.tenant_ids]
    return Tenancy([*busy, *known.values()])  # tenants without jobs count as ancestors


def limited_tenants(state: State) -> list[tenant_pb2.Tenant]:
    """Return the tenants that are bound by a limit, their own or an ancestor's."""
    bound = Headroom(tenant_of(tenant) for tenant, _ in state.tenants.values()).bound
    return [state.tenants[tenant_id][0] for tenant_id in sorted(bound)]


def placement_limits(state: State, connection: int) -> tuple[int, list[bytes]]:
    """Return a value that changes whenever placement needs the limits again: after a change, or a new connection."""
    known = [tenant.SerializeToString(deterministic=True) for tenant in limited_tenants(state)]
    return connection if known else 0, known


class OwnVictims:
    """What the victims of each tenant hold: in their place, a tenant at its limit may start other jobs."""

    def __init__(self, victims: Iterable[Record]) -> None:
        self._held: dict[str, ResourceUsage] = {}
        for record in victims:
            self._held.setdefault(record.spec.tenant, ResourceUsage()).add(held_by(record))

    def make_room(self, headroom: Headroom, tenant: str, asked: ResourceUsage) -> bool:
        """Return whether a job would be within its tenant's limits if all victims of the tenant stopped."""
        held = self._held.get(tenant)
        return held is not None and headroom.allows(tenant, asked.gpu_milli - held.gpu_milli, asked.cores - held.cores)


def headroom_of(state: State) -> Headroom:
    """Return the headroom under tenants' limits: usage is derived, never stored. Stopping jobs still count."""
    headroom = Headroom(tenant_of(tenant) for tenant, _ in state.tenants.values())
    for record in state.held.values() if headroom else ():
        if record.spec.tenant in headroom.bound:
            use = held_by(record)
            headroom.take(record.spec.tenant, use.gpu_milli, use.cores)
    return headroom
