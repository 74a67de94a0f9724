"""What tenants may hold and what they do hold, for the core to decide by."""

from __future__ import annotations

from cotenant.codec.tenants import tenant_of
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy, Tenant
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, Use, held_by
from cotenant.v1 import tenant_service_pb2 as tenant_pb2


def asked_by(record: Record) -> Use:
    """What a job asks for; `auto` cores count as one per replica."""
    spec = record.asks
    return Use(spec.gpu_milli, sum(role.replicas * (role.request.cores or 1) for role in spec.roles))


def tenancy_of(state: State) -> Tenancy:
    """Tell of all tenants, those that have jobs in the order of their numbers."""
    if not state.tenants:
        return NO_TENANTS
    known = {tenant_id: tenant_of(tenant) for tenant_id, (tenant, _) in state.tenants.items()}
    busy = [known.pop(tenant_id, Tenant(tenant_id)) for tenant_id in state.tenant_ids]
    return Tenancy([*busy, *known.values()])  # those without jobs count for those that belong to them


def limited(state: State) -> list[tenant_pb2.Tenant]:
    """Give the tenants that a limit binds, their own or that of one that they belong to."""
    bound = Headroom(tenant_of(tenant) for tenant, _ in state.tenants.values()).bound
    return [state.tenants[tenant_id][0] for tenant_id in sorted(bound)]


def to_tell(state: State, connection: int) -> tuple[int, list[bytes]]:
    """Make what differs once placement has to be told of limits: they have changed, or it is heard anew."""
    known = [tenant.SerializeToString(deterministic=True) for tenant in limited(state)]
    return connection if known else 0, known


def headroom_of(state: State) -> Headroom:
    """Count what tenants with limits hold: usage is derived, never kept. What is stopping is still held."""
    room = Headroom(tenant_of(tenant) for tenant, _ in state.tenants.values())
    for record in state.held.values() if room else ():
        if record.spec.tenant in room.bound:
            use = held_by(record)
            room.take(record.spec.tenant, use.gpu_milli, use.cores)
    return room
