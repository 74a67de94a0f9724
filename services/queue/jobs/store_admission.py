"""Refuses new jobs while the store is nearly full, or when a tenant has used up its byte budget.

Operations that free space or keep jobs running are never refused here: ends, cancels, deletes. Before a job is
refused, ended jobs are deleted (archived first, if there is an archive), the oldest first, but none that ended
recently.

A tenant's own `limit_bytes` is its budget, and covers all its descendants. A tenant without one has a quarter of the
store, so that no tenant takes it all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from cotenant import telemetry
from cotenant.codec import errors, specs
from cotenant.codec.tenants import tenant_of
from cotenant.core.model.job import JobSpec
from cotenant.core.model.tenancy import ancestors
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retention import Retention
from cotenant.services.queue.jobs.store_footprint import KEYS_BYTES
from cotenant.services.queue.jobs.transitions import Record
from cotenant.store.capacity import MIB, QUOTA_BYTES_DEFAULT, Capacity, capacity_of
from cotenant.store.port import Store, StoreUnavailable
from cotenant.v1 import job_pb2

log = structlog.get_logger()

TENANT_SHARE = 0.25  # of the store: the default budget of a tenant
MEASURED_SECONDS = 0.25  # how long a measurement of the store is valid
SHOWN_SECONDS = 1.0  # after its commit; then an admitted job is surely part of the store's reported size
LOOK_SECONDS = 5.0
FREED_SHARE = 0.05  # of the store: how much to free at a time when it is nearly full
FREE_SPACE_SECONDS = 2.0  # between two attempts for one tenant

KEPT = telemetry.gauge("cotenant.queue.kept", "By", "Bytes of the store that a tenant's jobs take.")
BUDGET = telemetry.gauge("cotenant.queue.budget", "By", "Bytes of the store that a tenant's jobs may take.")
SIZE = telemetry.gauge("cotenant.store.size", "By", "The store's size, and how much of it is in use.")
LIMIT = telemetry.gauge("cotenant.store.limit", "By", "The store's limit, and the size at which new jobs are refused.")
REFUSED = telemetry.counter("cotenant.queue.not_admitted", "{job}", "Submissions refused for lack of space, by reason.")


def size_of(spec: job_pb2.JobSpec, tasks: int = 1) -> int:
    """Return how many bytes the store keeps for a new job, or for some tasks of an array."""
    return tasks * (spec.ByteSize() + KEYS_BYTES)


class StoreAdmission:
    """Decides whether there is space for a job. Call `prepare`, then `check` without an await after it."""

    def __init__(
        self, store: Store, state: State, retention: Retention, tenant_jobs_max: int = 0, tenant_bytes_max: int = 0
    ) -> None:
        """Limits of 0: unlimited jobs, a quarter of the store."""
        self._store, self._state, self._retention = store, state, retention
        self._tenant_jobs_max, self._tenant_bytes_max = tenant_jobs_max, tenant_bytes_max
        self._capacity: Capacity | None = None
        self._measured_at = float("-inf")
        self._measuring = asyncio.Lock()
        self._creating_bytes = 0  # of admitted jobs whose commit has not ended: a slow store may take seconds
        self._created: deque[tuple[float, int]] = deque()  # that the store's size may not include yet
        self._freed_at: dict[str, float] = {}
        self._reported: frozenset[str] = frozenset()

    async def prepare(self, tenant: str, size: int) -> None:
        """Measure the store, and free space if there is too little."""
        await self._measure()
        for _, family, limit in self._budgets(tenant):
            if (over := self._state.footprint.of(family) + size - limit) > 0:
                await self._free_space(tenant, family, over)

    def check(self, spec: JobSpec, size: int) -> None:
        """Reject a job or array that exceeds its tenant's job limit or the available space.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        self._state.tenant_quota.check(spec, self._tenant_jobs_max)
        self._check_space(spec.tenant, size)

    async def check_growth(self, record: Record, changed: JobSpec) -> None:
        """Reject an update that makes a job too large for the available space.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        growth = specs.spec_to_wire(changed).ByteSize() - record.job.spec.ByteSize()
        if growth > 0:
            await self.prepare(changed.tenant, growth)
            self._check_space(changed.tenant, growth)

    def _check_space(self, tenant: str, size: int) -> None:
        for owner, family, limit in self._budgets(tenant):
            used = self._state.footprint.of(family)
            if used + size > limit:
                REFUSED.add(reason="TENANT_BYTES")
                raise errors.exhausted(
                    "TENANT_BYTES",
                    f"tenant {owner} uses {used / MIB:.2f} of its {limit / MIB:.2f} MiB in the store, and this needs "
                    f"{size / MIB:.2f} MiB; wait until its jobs end, cancel some, submit smaller specs (put "
                    f"large files into shared storage), or ask an operator to raise the limit: "
                    f"`cotenant tenants update {owner} --limit-bytes SIZE`",
                    tenant=owner, used_bytes=str(used), limit_bytes=str(limit),
                )  # fmt: skip
        if self._capacity and (why := self._capacity.why_stopped(self._unmeasured_bytes() + size)):
            REFUSED.add(reason="STORE_NEARLY_FULL")
            raise errors.exhausted(
                "STORE_NEARLY_FULL",
                f"{why}; existing jobs keep running; retry later, or ask an operator: `cotenant status` shows the "
                "remedy",
                retry_after_seconds=LOOK_SECONDS,
            )

    @contextmanager
    def reserve(self, spec: JobSpec, size: int) -> Iterator[None]:
        """Count a job or array while it is created."""
        self._state.tenant_quota.reserve(spec)
        self._state.footprint.reserve(spec.tenant, size)
        self._creating_bytes += size
        try:
            yield
        finally:
            self._creating_bytes -= size
            self._created.append((time.monotonic(), size))
            self._state.tenant_quota.release(spec)
            self._state.footprint.release(spec.tenant, size)

    def limit_of(self, tenant: str) -> int:
        """Return a tenant's budget in bytes."""
        kept = self._state.tenants.get(tenant)
        if kept and kept[0].HasField("limit_bytes"):
            return kept[0].limit_bytes
        return self._tenant_bytes_max or int(TENANT_SHARE * self._store_bytes())

    def family(self, tenant: str) -> frozenset[str]:
        """Return a tenant and all its descendants."""
        known = {one: tenant_of(kept) for one, (kept, _) in self._state.tenants.items()}
        below = (one.id for one in known.values() if any(above.id == tenant for above in ancestors(one, known)))
        return frozenset((tenant, *below))

    def _budgets(self, tenant: str) -> Iterator[tuple[str, frozenset[str], int]]:
        """Yield each budget that binds a tenant: its owner, the tenants that share it, and its size."""
        yield tenant, self.family(tenant), self.limit_of(tenant)
        kept = self._state.tenants.get(tenant)
        if kept is None or not kept[0].parent:
            return
        known = {one: tenant_of(message) for one, (message, _) in self._state.tenants.items()}
        for above in ancestors(known[tenant], known):
            if self._state.tenants[above.id][0].HasField("limit_bytes"):
                yield above.id, self.family(above.id), self.limit_of(above.id)

    def _store_bytes(self) -> int:
        """Return the store size of which tenants have a share; a file counts as an etcd of the default size."""
        capacity = self._capacity
        return QUOTA_BYTES_DEFAULT if capacity is None or capacity.path else capacity.limit_bytes

    # Measuring ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure the store forever, report its size, and free space in time."""
        while True:
            await self._measure()
            self._report()
            if self._capacity and self._capacity.why_stopped():
                log.warning("admission_stopped", why=self._capacity.why_stopped())
                await self._free_space("", None, int(FREED_SHARE * self._capacity.limit_bytes))
            await asyncio.sleep(LOOK_SECONDS)

    async def _measure(self) -> None:
        async with self._measuring:
            if time.monotonic() - self._measured_at < MEASURED_SECONDS:
                return
            try:
                self._capacity = await capacity_of(self._store)
            except StoreUnavailable as error:
                log.info("store_not_measured", error=str(error))
            self._measured_at = time.monotonic()

    def _unmeasured_bytes(self) -> int:
        """Return the bytes of admitted jobs that the store's size may not include yet."""
        old = self._measured_at - SHOWN_SECONDS
        while self._created and self._created[0][0] < old:
            self._created.popleft()
        return self._creating_bytes + sum(size for _, size in self._created)

    async def _free_space(self, tenant: str, tenants: frozenset[str] | None, size: int) -> None:
        now = time.monotonic()
        if now - self._freed_at.get(tenant, float("-inf")) < FREE_SPACE_SECONDS:
            return
        self._freed_at[tenant] = now
        try:
            await self._retention.free_space(tenants, size, time.time())
        except (StoreUnavailable, OSError) as error:
            log.warning("space_not_freed", tenant=tenant, error=str(error))

    def _report(self) -> None:
        kept = self._state.footprint.by_tenant()
        for tenant in self._reported - kept.keys():
            KEPT.set(0, tenant=tenant)
        for tenant, size in kept.items():
            KEPT.set(size, tenant=tenant)
            BUDGET.set(self.limit_of(tenant), tenant=tenant)
        self._reported = frozenset(kept)
        if capacity := self._capacity:
            SIZE.set(capacity.size_bytes, of="size")
            SIZE.set(capacity.in_use_bytes, of="in_use")
            LIMIT.set(capacity.limit_bytes, of="limit")
            LIMIT.set(capacity.admits_below_bytes, of="admission")
