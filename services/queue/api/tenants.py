"""The servicer of the tenant API: tenants and queues."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cotenant import fail_points
from cotenant.codec import errors
from cotenant.codec.specs import duration
from cotenant.codec.tenants import tenant_of
from cotenant.core.model.job import QUEUE_DEFAULT, TENANT_DEFAULT
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.tenancy import check_hierarchy
from cotenant.core.model.validation import Violation, shown
from cotenant.core.policy.options import written
from cotenant.core.scheduling.admission import Rules
from cotenant.rpc.paging import PageRequest, page_of, page_of_messages
from cotenant.services.queue.jobs.job_store import TENANTS, JobStore
from cotenant.services.queue.jobs.store_admission import StoreAdmission
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, ResourceUsage, held_by
from cotenant.services.queue.jobs.visibility import View
from cotenant.services.queue.scheduling.tenant_usage import usages_of
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Compare, Conflict, Delete, Put
from cotenant.v1 import tenant_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2_grpc

_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
AMOUNTS = ("quota_gpu_milli", "quota_cores", "limit_gpu_milli", "limit_cores", "weight", "limit_bytes")
CHANGEABLE = (*AMOUNTS, "parent")
USAGES_MAX = 100  # on a page


class TenantServicer(tenant_service_pb2_grpc.TenantServiceServicer):
    """Creates, reads and changes tenants. A tenant that was never created has no quota and no limit."""

    def __init__(
        self, job_store: JobStore, admission: StoreAdmission, policy: str, options: Mapping[str, str], rules: Rules
    ) -> None:
        self._job_store, self._admission = job_store, admission
        self._policy, self._options, self._rules = policy, options, rules

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Any) -> pb.CreateTenantResponse:
        """Create a tenant; a repeat with the same settings returns the tenant as it is."""
        _check(request.tenant)
        known = self._job_store.state.tenants.get(request.tenant.id)
        if known:
            if _settings(known[0]) == _settings(request.tenant):
                return pb.CreateTenantResponse(tenant=self._message(request.tenant.id))
            raise errors.already_exists("tenant", request.tenant.id)
        self._check_family(request.tenant)
        if request.validate_only:
            return pb.CreateTenantResponse(tenant=request.tenant)
        await self._put(request.tenant, 0)
        return pb.CreateTenantResponse(tenant=self._message(request.tenant.id))

    async def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.GetTenantResponse:
        """Return one tenant."""
        view, tenants = View(self._job_store.state), self._job_store.state.tenants
        if not view.sees_tenant(request.id):
            raise errors.not_found("tenant", request.id, near=[one for one in tenants if view.sees_tenant(one)])
        self._revision(request.id)
        return pb.GetTenantResponse(tenant=self._message(request.id))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        """Return tenants: those that were created, and those that have stored jobs."""
        state, view = self._job_store.state, View(self._job_store.state)
        all_of_them = {TENANT_DEFAULT, *state.tenants, *state.footprint.by_tenant()}
        known = sorted(one for one in all_of_them if view.sees_tenant(one))
        ids, token = page_of(known, request.page_size, request.page_token, scope="tenants")
        return pb.ListTenantsResponse(tenants=[self._message(tenant_id) for tenant_id in ids], next_page_token=token)

    async def ListTenantUsage(self, request: pb.ListTenantUsageRequest, context: Any) -> pb.ListTenantUsageResponse:
        """Return the shares and the usage of tenants: those that were created, have had jobs, or have usage."""
        state, view = self._job_store.state, View(self._job_store.state)
        asked = PageRequest.read(request.page_size, request.page_token, "tenant-usage", USAGES_MAX)
        usages = usages_of(state, time.time(), users=request.users)
        if half_life_seconds := self._rules.usage_half_life_seconds:
            for usage in usages.values():
                usage.half_life.CopyFrom(duration(half_life_seconds))
        known = sorted(one for one in usages if view.sees_tenant(one))
        page = await page_of_messages(known, usages.get, asked)
        return pb.ListTenantUsageResponse(usages=page.items, next_page_token=page.next_token)

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Any) -> pb.UpdateTenantResponse:
        """Change a tenant."""
        revision = self._revision(request.tenant.id)
        self._check_etag(request.tenant.id, request.tenant.etag, revision)
        paths = request.update_mask.paths or [name for name in CHANGEABLE if _is_set(request.tenant, name)]
        if wrong := [path for path in paths if path not in CHANGEABLE]:
            raise errors.invalid(
                [Violation("update_mask", f"{path!r} cannot be changed; {', '.join(CHANGEABLE)} can") for path in wrong]
            )
        tenant = pb.Tenant()
        tenant.CopyFrom(self._job_store.state.tenants[request.tenant.id][0])
        for path in paths:
            tenant.ClearField(path)
            if _is_set(request.tenant, path):
                setattr(tenant, path, getattr(request.tenant, path))
        _check(tenant)
        self._check_family(tenant)
        if not request.validate_only:
            await self._put(tenant, revision)
        return pb.UpdateTenantResponse(tenant=tenant if request.validate_only else self._message(tenant.id))

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Any) -> pb.DeleteTenantResponse:
        """Delete a tenant that has no unfinished jobs."""
        revision = self._revision(request.id)
        self._check_etag(request.id, request.etag, revision)
        state = self._job_store.state
        if live := state.tenant_quota.live[request.id]:
            raise errors.failed_precondition("TENANT_IN_USE", f"tenant {request.id} has {live} unfinished jobs")
        if children := sorted(one for one, (tenant, _) in state.tenants.items() if tenant.parent == request.id):
            raise errors.failed_precondition(
                "TENANT_IN_USE", f"tenant {request.id} is the parent of {', '.join(children[:3])}; move them first"
            )
        if secrets := state.secrets.names_of(request.id):
            raise errors.failed_precondition(
                "TENANT_IN_USE", f"tenant {request.id} has {len(secrets)} secrets; delete them first: {secrets[0]}, …"
            )
        if any(one.spec.tenant == request.id for one in state.schedules.records.values()):
            raise errors.failed_precondition(
                "TENANT_IN_USE", f"tenant {request.id} has schedules; delete them first, with `cotenant schedules`"
            )
        key = TENANTS + request.id
        if isinstance(await self._job_store.store.transact([Compare(key, revision)], [Delete(key)]), Conflict):
            await self._reread(request.id)
            if request.id in state.tenants:
                raise errors.conflict("tenant", request.id)
        state.tenants.pop(request.id, None)
        state.update_tenant(request.id)
        return pb.DeleteTenantResponse()

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesResponse:
        """Return a page of the queues; there is one so far."""
        ids, token = page_of([QUEUE_DEFAULT], request.page_size, request.page_token, scope="queues")
        job_index = self._job_store.state.job_index
        holding = [phase for phase in Phase if phase.holds_resources]
        return pb.ListQueuesResponse(
            queues=[
                pb.Queue(
                    id=queue_id,
                    policy=self._policy,
                    options=self._options,
                    rules={name: written(value) for name, value in asdict(self._rules).items()},
                    waiting=sum(map(len, job_index.of_phases([Phase.QUEUED]))),
                    running=sum(map(len, job_index.of_phases(holding))),
                )
                for queue_id in ids
            ],
            next_page_token=token,
        )

    async def _put(self, tenant: pb.Tenant, revision: int) -> None:
        key = TENANTS + tenant.id
        stored = records_pb2.StoredTenant(schema_version=SCHEMA_VERSION, tenant=tenant)
        for derived in ("etag", "used_gpu_milli", "used_cores", "used_bytes", "allowed_bytes"):
            stored.tenant.ClearField(derived)
        result = await self._job_store.store.transact([Compare(key, revision)], [Put(key, stored.SerializeToString())])
        if isinstance(result, Conflict):
            await self._reread(tenant.id)
            known = self._job_store.state.tenants.get(tenant.id)
            if known is None or _settings(known[0]) != _settings(tenant):
                raise errors.conflict("tenant", tenant.id)
        else:
            await fail_points.reach("tenant.kept")
            self._job_store.state.tenants[tenant.id] = (stored.tenant, result.revision)
        self._job_store.state.update_tenant(tenant.id)
        self._job_store.state.events.changed()

    async def _reread(self, tenant_id: str) -> None:
        """Read a tenant from the store again: a commit with an unknown outcome may have changed it."""
        entry = await self._job_store.store.get(TENANTS + tenant_id)
        if entry is None:
            self._job_store.state.tenants.pop(tenant_id, None)
        else:
            stored = schema.read(records_pb2.StoredTenant, entry)
            self._job_store.state.tenants[tenant_id] = (stored.tenant, entry.mod_revision)

    def _revision(self, tenant_id: str) -> int:
        tenants = self._job_store.state.tenants
        if tenant_id not in tenants:
            raise errors.not_found("tenant", tenant_id, near=tenants)
        return tenants[tenant_id][1]

    def _family(self, tenant_id: str) -> frozenset[str]:
        """Return a tenant and all its descendants."""
        return self._admission.family(tenant_id)

    def _check_family(self, changed: pb.Tenant) -> None:
        """Reject a change that makes the tenant invalid, by itself or together with its ancestors and descendants."""
        tenants = {one: tenant for one, (tenant, _) in self._job_store.state.tenants.items()} | {changed.id: changed}
        before = list(check_hierarchy(tenant_of(tenant) for tenant, _ in self._job_store.state.tenants.values()))
        found = [
            Violation(f"tenant.{bad.field}", bad.description if of == changed.id else f"of {of} {bad.description}")
            for of, bad in check_hierarchy(tenant_of(tenant) for tenant in tenants.values())
            if (of, bad) not in before
        ]
        if found:
            raise errors.invalid(found)

    @staticmethod
    def _check_etag(tenant_id: str, etag: str, revision: int) -> None:
        if etag and etag != str(revision):
            raise errors.conflict("tenant", tenant_id)

    def _message(self, tenant_id: str) -> pb.Tenant:
        state = self._job_store.state
        kept, revision = state.tenants.get(tenant_id, (pb.Tenant(id=tenant_id), 0))
        tenant = pb.Tenant()
        tenant.CopyFrom(kept)
        tenant.etag = str(revision) if revision else ""
        use = ResourceUsage()
        family = self._family(tenant_id)
        for record in state.held.values():
            if record.spec.tenant in family:
                use.add(held_by(record))
        tenant.used_gpu_milli, tenant.used_cores = use.gpu_milli, use.cores
        tenant.used_bytes, tenant.allowed_bytes = state.footprint.of(family), self._admission.limit_of(tenant_id)
        return tenant


def _check(tenant: pb.Tenant) -> None:
    found = []
    if not _ID.fullmatch(tenant.id):
        found.append(
            Violation("tenant.id", f"must be at most 63 lower-case letters, digits and dashes, not {shown(tenant.id)}")
        )
    found += [
        Violation(f"tenant.{name}", f"must not be negative, not {getattr(tenant, name):g}")
        for name in AMOUNTS
        if getattr(tenant, name) < 0
    ]
    for unit in ("gpu_milli", "cores"):
        quota, limit = f"quota_{unit}", f"limit_{unit}"
        if tenant.HasField(quota) and tenant.HasField(limit) and getattr(tenant, quota) > getattr(tenant, limit):  # type: ignore[arg-type]  # fields of the message
            found.append(Violation(f"tenant.{quota}", "exceeds the limit"))
    if found:
        raise errors.invalid(found)


def _is_set(tenant: pb.Tenant, name: str) -> bool:
    return bool(getattr(tenant, name)) if name in ("weight", "parent") else tenant.HasField(name)  # type: ignore[arg-type]  # a field


def _settings(tenant: pb.Tenant) -> list[float | str | None]:
    return [getattr(tenant, name) if _is_set(tenant, name) else None for name in CHANGEABLE]
