"""Refuses new jobs while the store is nearly full, or a tenant has used up its budget of bytes in it.

Whatever frees space or keeps jobs going is never refused here: ends, cancels, forgetting. Before a job is refused,
ended jobs are forgotten (archived first, where there is an archive), the oldest first, but none that ended a moment
ago.

A tenant's own `limit_bytes` is its budget, and counts what all take that belong to it. A tenant without one has a
quarter of the store, so that none takes it all.
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
from cotenant.services.queue.jobs.retention import Forgetting
from cotenant.services.queue.jobs.store_footprint import KEYS_BYTES
from cotenant.services.queue.jobs.transitions import Record
from cotenant.store.capacity import MIB, QUOTA_BYTES_DEFAULT, Capacity, capacity_of
from cotenant.store.port import Store, StoreUnavailable
from cotenant.v1 import job_pb2

log = structlog.get_logger()

TENANT_SHARE = 0.25  # of the store: the budget of a tenant that has no other
MEASURED_SECONDS = 0.25  # for so long a look at the store is good
SHOWN_SECONDS = 0.5  # after which a job that was admitted is sure to be in what a store says of its size
LOOK_SECONDS = 5.0
FREED_SHARE = 0.05  # of the store: what is to be made room for at a time, where it is nearly full
MAKE_ROOM_SECONDS = 2.0  # between two tries for one tenant

KEPT = telemetry.gauge("cotenant.queue.kept", "By", "Bytes of the store that a tenant's jobs take.")
BUDGET = telemetry.gauge("cotenant.queue.budget", "By", "Bytes of the store that a tenant's jobs may take.")
SIZE = telemetry.gauge("cotenant.store.size", "By", "The store's size, and what of it is in use.")
LIMIT = telemetry.gauge("cotenant.store.limit", "By", "The store's limit, and where new jobs are refused.")
REFUSED = telemetry.counter("cotenant.queue.not_admitted", "{job}", "Submissions refused for want of space, by reason.")


def size_of(spec: job_pb2.JobSpec, tasks: int = 1) -> int:
    """Return what the store will keep of a new job, or of so many tasks of an array."""
    return tasks * (spec.ByteSize() + KEYS_BYTES)


class StoreAdmission:
    """Decides whether there is space for a job. Call `prepare`, then `check` with nothing awaited after it."""

    def __init__(
        self, store: Store, state: State, forgetting: Forgetting, tenant_jobs_max: int = 0, tenant_bytes_max: int = 0
    ) -> None:
        """Limits of 0: any number of jobs, a quarter of the store."""
        self._store, self._state, self._forgetting = store, state, forgetting
        self._tenant_jobs_max, self._tenant_bytes_max = tenant_jobs_max, tenant_bytes_max
        self._capacity: Capacity | None = None
        self._measured_at = float("-inf")
        self._measuring = asyncio.Lock()
        self._admitted: deque[tuple[float, int]] = deque()  # that the store may not show yet
        self._made_room_at: dict[str, float] = {}
        self._told: frozenset[str] = frozenset()

    async def prepare(self, tenant: str, size: int) -> None:
        """Look how full the store is, and make room where there is too little."""
        await self._measure()
        for _, family, limit in self._budgets(tenant):
            if (over := self._state.footprint.of(family) + size - limit) > 0:
                await self._make_room(tenant, family, over)

    def check(self, spec: JobSpec, size: int) -> None:
        """Refuse a job, or an array of them, that is one too many for its tenant, or that there is no space for.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        self._state.room.check(spec, self._tenant_jobs_max)
        self._check_space(spec.tenant, size)

    async def check_growth(self, record: Record, changed: JobSpec) -> None:
        """Refuse an update that makes a job larger than there is space for.

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
                    f"tenant {owner} has {used / MIB:.2f} of {limit / MIB:.2f} MiB in the store in use, and this takes "
                    f"{size / MIB:.2f} MiB; wait until jobs of it have ended, cancel some, submit smaller specs (put "
                    f"large files into shared storage), or ask an operator to raise it: "
                    f"`cotenant tenants update {owner} --limit-bytes SIZE`",
                    tenant=owner, used_bytes=str(used), limit_bytes=str(limit),
                )  # fmt: skip
        if self._capacity and (why := self._capacity.why_stopped(self._unshown() + size)):
            REFUSED.add(reason="STORE_NEARLY_FULL")
            raise errors.exhausted(
                "STORE_NEARLY_FULL",
                f"{why}; jobs that are there go on; try again later, or tell an operator: `cotenant status` names the "
                "way back",
                retry_after_seconds=LOOK_SECONDS,
            )

    @contextmanager
    def taking_in(self, spec: JobSpec, size: int) -> Iterator[None]:
        """Count a job, or an array of them, while it is being taken in."""
        self._state.room.expect(spec)
        self._state.footprint.expect(spec.tenant, size)
        self._admitted.append((time.monotonic(), size))
        try:
            yield
        finally:
            self._state.room.expect_no_more(spec)
            self._state.footprint.expect_no_more(spec.tenant, size)

    def limit_of(self, tenant: str) -> int:
        """Return the budget of one tenant, in bytes."""
        kept = self._state.tenants.get(tenant)
        if kept and kept[0].HasField("limit_bytes"):
            return kept[0].limit_bytes
        return self._tenant_bytes_max or int(TENANT_SHARE * self._store_bytes())

    def family(self, tenant: str) -> frozenset[str]:
        """Return a tenant and all that belong to it."""
        known = {one: tenant_of(kept) for one, (kept, _) in self._state.tenants.items()}
        below = (one.id for one in known.values() if any(above.id == tenant for above in ancestors(one, known)))
        return frozenset((tenant, *below))

    def _budgets(self, tenant: str) -> Iterator[tuple[str, frozenset[str], int]]:
        """Yield each budget that binds a tenant: whose it is, who shares it, and how much it is."""
        yield tenant, self.family(tenant), self.limit_of(tenant)
        kept = self._state.tenants.get(tenant)
        if kept is None or not kept[0].parent:
            return
        known = {one: tenant_of(message) for one, (message, _) in self._state.tenants.items()}
        for above in ancestors(known[tenant], known):
            if self._state.tenants[above.id][0].HasField("limit_bytes"):
                yield above.id, self.family(above.id), self.limit_of(above.id)

    def _store_bytes(self) -> int:
        """Return the size of the store of which a tenant has a share; a file's is taken as an etcd's."""
        capacity = self._capacity
        return QUOTA_BYTES_DEFAULT if capacity is None or capacity.path else capacity.limit_bytes

    # Looking ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at the store for ever, tell how full it is, and make room in time."""
        while True:
            await self._measure()
            self._tell()
            if self._capacity and self._capacity.why_stopped():
                log.warning("admission_stopped", why=self._capacity.why_stopped())
                await self._make_room("", None, int(FREED_SHARE * self._capacity.limit_bytes))
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

    def _unshown(self) -> int:
        """Return the bytes of jobs that were admitted so lately that the store's size may not show them."""
        old = self._measured_at - SHOWN_SECONDS
        while self._admitted and self._admitted[0][0] < old:
            self._admitted.popleft()
        return sum(size for _, size in self._admitted)

    async def _make_room(self, who: str, tenants: frozenset[str] | None, size: int) -> None:
        now = time.monotonic()
        if now - self._made_room_at.get(who, float("-inf")) < MAKE_ROOM_SECONDS:
            return
        self._made_room_at[who] = now
        try:
            await self._forgetting.make_room(tenants, size, time.time())
        except (StoreUnavailable, OSError) as error:
            log.warning("room_not_made", tenant=who, error=str(error))

    def _tell(self) -> None:
        kept = self._state.footprint.by_tenant()
        for tenant in self._told - kept.keys():
            KEPT.set(0, tenant=tenant)
        for tenant, size in kept.items():
            KEPT.set(size, tenant=tenant)
            BUDGET.set(self.limit_of(tenant), tenant=tenant)
        self._told = frozenset(kept)
        if capacity := self._capacity:
            SIZE.set(capacity.size_bytes, of="size")
            SIZE.set(capacity.in_use_bytes, of="in_use")
            LIMIT.set(capacity.limit_bytes, of="limit")
            LIMIT.set(capacity.admits_below_bytes, of="admission")
