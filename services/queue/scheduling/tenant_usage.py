"""Limits and usage of tenants, as input of the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from cotenant.codec.tenants import tenant_of
from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.core.model.job_table import Flags, Floats
from cotenant.core.model.resources import WHOLE_GPU_MILLI, Resources
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy, Tenant, ancestors
from cotenant.core.scheduling.decayed_usage import DecayedUsage
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.usage_ledger import TenantUsage
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, ResourceUsage, held_by
from cotenant.v1 import tenant_service_pb2 as tenant_pb2

USAGE_SHARE_MIN = 0.001  # of the decayed usage of all tenants; a tenant without jobs and with less has no fair share


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


def count_past_use(state: State, tenancy: Tenancy, now: float) -> None:
    """Set in the table what tenants held on decayed average."""
    if ledger := state.usage.ledger:
        ids = [tenant.id for tenant in tenancy.tenants] or state.tenant_ids
        state.table.past_use = ledger.averages(ids, now)


def usages_of(state: State, now: float, *, users: bool) -> dict[str, tenant_pb2.TenantUsage]:
    """Return the shares and the usage of all tenants, by id; a tenant's include those of its descendants."""
    ledger = state.usage.ledger
    past = ledger.tenants if ledger else []
    known = {one: tenant_of(tenant) for one, (tenant, _) in state.tenants.items()}
    ids = list(dict.fromkeys([*state.tenant_ids, *known, TENANT_DEFAULT, *past]))
    tenancy = Tenancy([known.get(one, Tenant(one)) for one in ids])
    averages = ledger.averages(ids, now) if ledger else None
    jobs = replace(state.table.jobs(now), past_use=averages)
    has_jobs = np.isin(np.arange(len(ids)), jobs.tenant)
    present = has_jobs if averages is None else has_jobs | _uses(averages, state.capacity)
    sharing = Sharing(jobs, state.capacity, tenancy, np.flatnonzero(present))
    shares = sharing.shares(jobs.running)
    found = {
        one: tenant_pb2.TenantUsage(tenant_id=one, weight=tenancy.tenants[number].weight)
        for number, one in enumerate(ids)
    }
    for number, share in shares.items():
        own = found[ids[number]]
        own.share, own.fair_share, own.usage_share = share
    for tenant_id in past:
        assert ledger
        _add_usage(found, ledger.usage(tenant_id, now), tenant_id, known, users=users)
    return found


def _uses(averages: Floats, capacity: Resources) -> Flags:
    """Return by tenant whether its usage counts: it is at least a thousandth of that of all."""
    totals = np.array(capacity, dtype=np.float64)[:, None]
    shares = np.divide(averages, totals, out=np.zeros_like(averages), where=totals > 0).max(axis=0)
    counts: Flags = (shares > 0) & (shares >= USAGE_SHARE_MIN * shares.sum())
    return counts


def _add_usage(
    found: dict[str, tenant_pb2.TenantUsage],
    usage: TenantUsage,
    tenant_id: str,
    known: Mapping[str, Tenant],
    *,
    users: bool,
) -> None:
    """Add the usage of a tenant to it and its ancestors, and its users to it."""
    above = ancestors(known[tenant_id], known) if tenant_id in known else ()
    for one in (tenant_id, *(tenant.id for tenant in above)):
        _add(found[one].usage, usage.own)
    if users:
        for user, own in sorted(usage.users.items(), key=lambda one: [*(-amount for amount in one[1].amounts), one[0]]):
            _add(found[tenant_id].users.add(user=user).usage, own)


def _add(message: tenant_pb2.DecayedUsage, usage: DecayedUsage) -> None:
    milli, cores, *_ = usage.amounts
    message.gpu_seconds += milli / WHOLE_GPU_MILLI
    message.core_seconds += cores


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
