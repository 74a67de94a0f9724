"""New jobs are refused before the store is full, and tenants stay within their byte budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.mesh import BACKFILL, Mesh, reason, running, spec

from cotenant.codec.errors import Problem
from cotenant.core.model.job import JobSpec
from cotenant.services.queue.jobs import retention
from cotenant.services.queue.jobs.store_footprint import StoreFootprint, kept_bytes
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.store.capacity import MIB, Capacity, etcd_capacity
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2, job_service_pb2
from cotenant.v1.tenant_service_pb2 import CreateTenantRequest, GetTenantRequest, Tenant, UpdateTenantRequest

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LARGE = {"PAYLOAD": "x" * 20_000}


class Filling(MemoryStore):
    """A store with a settable fill level."""

    told = etcd_capacity(0, 0, 1000 * MIB)

    async def capacity(self) -> Capacity:
        return self.told


async def refused(mesh: Mesh, **fields: object) -> str:
    """Submit a job that must be refused for lack of space, and return the message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (mesh.submit_array(**fields) if "array" in fields else mesh.submit(**fields))
    assert error.value.code() is EXHAUSTED
    return f"{reason(error.value)}: {error.value.details()}"


async def test_a_tenant_over_budget_gets_its_usage_and_a_hint() -> None:
    async with running(queue_config=replace(BACKFILL, tenant_bytes_max=50_000)) as mesh:
        for _ in range(2):
            await mesh.submit(tenant="a", environment=LARGE)
        told = await refused(mesh, tenant="a", environment=LARGE)
        assert told.startswith("TENANT_BYTES: tenant a uses 0.04 of its 0.05 MiB in the store, and this needs 0.02")
        assert "cotenant tenants update a --limit-bytes SIZE" in told
        await mesh.submit(tenant="b", environment=LARGE)  # each tenant has its own budget
        await mesh.submit(tenant="a")  # a small job still fits


async def test_dry_runs_arrays_and_updates_are_refused_over_budget() -> None:
    async with running(queue_config=replace(BACKFILL, tenant_bytes_max=50_000)) as mesh:
        request = job_service_pb2.CreateJobRequest(spec=spec(environment={"PAYLOAD": "x" * 60_000}), validate_only=True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await mesh.jobs.CreateJob(request)
        assert reason(error.value) == "TENANT_BYTES"
        three = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=1, last=3)])
        assert (await refused(mesh, array=three, environment=LARGE)).startswith("TENANT_BYTES")
        job_id = await mesh.submit(environment=LARGE)
        await mesh.submit(environment=LARGE)
        update = job_service_pb2.UpdateJobRequest(
            job=job_pb2.Job(id=job_id, spec=spec(labels={f"k{number}": "x" * 60 for number in range(150)})),
            update_mask=FieldMask(paths=["labels"]),
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await mesh.jobs.UpdateJob(update)
        assert error.value.code() in (EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_tenants_limit_covers_its_descendants() -> None:
    async with running() as mesh:
        await mesh.tenants.CreateTenant(CreateTenantRequest(tenant=Tenant(id="dept", limit_bytes=50_000)))
        for name in ("one", "two"):
            await mesh.tenants.CreateTenant(CreateTenantRequest(tenant=Tenant(id=name, parent="dept")))
            await mesh.submit(tenant=name, environment=LARGE)
        assert "tenant dept uses 0.04 of its 0.05 MiB" in await refused(mesh, tenant="one", environment=LARGE)
        shown = (await mesh.tenants.GetTenant(GetTenantRequest(id="dept"))).tenant
        assert 40_000 < shown.used_bytes < 43_000
        assert (shown.limit_bytes, shown.allowed_bytes) == (50_000, 50_000)
        changed = Tenant(id="dept", limit_bytes=100_000)
        await mesh.tenants.UpdateTenant(UpdateTenantRequest(tenant=changed))
        await mesh.submit(tenant="one", environment=LARGE)


async def test_ended_jobs_are_deleted_for_space_except_recent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(queue_config=replace(BACKFILL, tenant_bytes_max=50_000)) as mesh:
        first = await mesh.submit(environment=LARGE)
        await mesh.submit(environment=LARGE)
        await mesh.jobs.CancelJob(job_service_pb2.CancelJobRequest(id=first))
        await refused(mesh, environment=LARGE)
        monkeypatch.setattr(retention, "RECENT_SECONDS", 0.0)
        mesh.parts["queue"].service.admission._freed_at.clear()
        await mesh.submit(environment=LARGE)
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.jobs.GetJob(job_service_pb2.GetJobRequest(id=first))


async def test_a_nearly_full_store_refuses_jobs_but_not_cancels() -> None:
    store = Filling()
    async with running(store) as mesh:
        job_id = await mesh.submit()
        store.told = etcd_capacity(850 * MIB, 500 * MIB, 1000 * MIB)
        mesh.parts["queue"].service.admission._measured_at = float("-inf")
        told = await refused(mesh)
        assert told.startswith("STORE_NEARLY_FULL: the store has 850.0 of 1000.0 MiB of etcd's quota in use, 350.0 ")
        cancelled = await mesh.jobs.CancelJob(job_service_pb2.CancelJobRequest(id=job_id))
        assert cancelled.job.phase == job_pb2.JOB_PHASE_CANCELLED
        store.told = etcd_capacity(500 * MIB, 500 * MIB, 1000 * MIB)
        mesh.parts["queue"].service.admission._measured_at = float("-inf")
        await mesh.submit()


async def test_concurrent_calls_do_not_exceed_the_budget() -> None:
    async with running(queue_config=replace(BACKFILL, tenant_bytes_max=50_000)) as mesh:
        answers = await asyncio.gather(*(mesh.submit(environment=LARGE) for _ in range(8)), return_exceptions=True)
        assert sum(isinstance(one, str) for one in answers) == 2
        footprint = mesh.parts["queue"].service.state.footprint
        assert not footprint._reserved
        assert footprint.of(["default"]) <= 50_000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 400)), max_size=40))
def test_the_footprint_matches_the_stored_jobs(steps: Sequence[tuple[int, int, int]]) -> None:
    footprint, there = StoreFootprint(), dict[int, Record]()
    for revision, (which, what, size) in enumerate(steps, 1):
        record = there.get(which)
        if what == 0 and record is not None:
            footprint.forget(there.pop(which))
            continue
        if record is None:
            record = there[which] = new_record(f"{which}", JobSpec(tenant=f"t{which % 2}"), "me", "")
        record.stored.job.phase_reason = "x" * size
        record.revision = revision
        footprint.count(record)
        footprint.count(record)
    for tenant in ("t0", "t1"):
        own = [record for record in there.values() if record.spec.tenant == tenant]
        assert footprint.of([tenant]) == sum(map(kept_bytes, own))
    assert set(footprint.by_tenant()) == {record.spec.tenant for record in there.values()}


async def test_jobs_count_until_their_commit_is_part_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store takes seconds for a commit, and jobs that are admitted meanwhile need their own space."""
    now = [1000.0]
    monkeypatch.setattr("cotenant.services.queue.jobs.store_admission.time.monotonic", lambda: now[0])
    store = Filling()
    store.told = etcd_capacity(790 * MIB, 790 * MIB, 1000 * MIB)
    async with running(store=store) as mesh:
        admission, small = mesh.parts["queue"].service.admission, JobSpec()

        async def admits() -> bool:
            await admission.prepare("default", 6 * MIB)
            try:
                admission.check(small, 6 * MIB)
            except Problem:
                return False
            return True

        assert await admits()
        with admission.reserve(small, 6 * MIB):
            now[0] += 5.0
            assert not await admits()
        now[0] += 0.5
        assert not await admits()
        now[0] += 1.0
        assert await admits()
