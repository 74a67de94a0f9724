"""Past use in the live mesh: who used less goes first, and usage survives restarts of the queue."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, running, until

from cotenant.core.scheduling.admission import FairShare, Rules
from cotenant.services.queue.jobs import usage_store
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.usage_store import USAGE
from cotenant.services.queue.scheduling import usage_metrics
from cotenant.storage.v1 import records_pb2
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Delete, Put, StoreUnavailable
from cotenant.store.schema import BadRecord
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2 as tenant_pb2

HALF_LIFE = 50.0
COUNTED = replace(BACKFILL, rules=Rules(fair_share=FairShare.TENANTS, usage_half_life_seconds=HALF_LIFE))
Usages = dict[str, tenant_pb2.TenantUsage]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(queue_config=COUNTED) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        yield mesh


async def usages(mesh: Mesh, **asked: Any) -> Usages:
    page = await mesh.tenants.ListTenantUsage(tenant_pb2.ListTenantUsageRequest(**asked))
    return {one.tenant_id: one for one in page.usages}


async def run_for(mesh: Mesh, tenant: str, seconds: float = 0.3, **fields: Any) -> str:
    """Run a job until it has run for some time."""
    job_id = await mesh.submit(cores=2, tenant=tenant, **fields)
    started = await mesh.reach(job_id, "RUNNING")
    start = started.attempt.start_time.ToNanoseconds() / 1e9
    await until(lambda: time.time() >= start + seconds)
    mesh.agents["n1"].finish((job_id, 1))
    await mesh.reach(job_id, "SUCCEEDED")
    return job_id


def decayed(amount: float, seconds: float) -> float:
    return float(amount * 2 ** (-seconds / HALF_LIFE))


async def test_usage_is_what_a_job_held_while_it_ran(mesh: Mesh) -> None:
    job = await mesh.job(await run_for(mesh, "vision"))
    found = (await usages(mesh, users=True))["vision"]
    assert found.usage.gpu_seconds == pytest.approx(job.attained_gpu_seconds, rel=0.1)
    assert found.usage.core_seconds == pytest.approx(job.attained_core_seconds, rel=0.1)
    assert found.usage.gpu_seconds > 0
    (user,) = found.users
    assert user.user == job.submitter
    assert user.usage.gpu_seconds == pytest.approx(found.usage.gpu_seconds, rel=1e-6)
    assert found.usage_share == 1.0
    assert not (await usages(mesh))["vision"].users, "only on request"


async def test_the_tenant_that_used_less_goes_first_and_the_other_is_told_why(mesh: Mesh) -> None:
    await run_for(mesh, "old", seconds=0.5)
    full = [await mesh.submit(cores=2, tenant="other") for _ in range(4)]
    for job_id in full:
        await mesh.reach(job_id, "RUNNING")
    old = await mesh.submit(cores=2, tenant="old")
    new = await mesh.submit(cores=2, tenant="new")
    state = mesh.parts["queue"].service.state
    await until(lambda: list(state.ranked) == [new, old])

    told = pb.ExplainJobResponse()

    async def is_told() -> bool:  # reasons are set at the end of the cycle that orders the jobs
        told.CopyFrom(await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=old)))
        return "waits (number 2 of 2 waiting) for its fair share" in told.summary

    await eventually(is_told)
    assert "tenant old holds 0% of the GPUs, its fair share is 33%; it has" in told.summary
    assert "of the decayed usage, its fair share of that is 33%" in told.summary
    assert told.job.refusal.numbers["tenant_usage_share"] > told.job.refusal.numbers["tenant_fair_usage_share"]
    mesh.agents["n1"].finish((full[0], 1))
    await mesh.reach(new, "RUNNING")


async def test_without_a_half_life_past_use_changes_nothing() -> None:
    async with running() as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        await run_for(mesh, "old")
        found = await mesh.tenants.ListTenantUsage(tenant_pb2.ListTenantUsageRequest())
        assert not any(one.HasField("half_life") for one in found.usages)
        assert [one.usage.gpu_seconds for one in found.usages] == [0.0, 0.0]
        assert not await mesh.records_left(USAGE)


async def test_a_killed_queue_counts_nothing_twice_and_loses_nothing(mesh: Mesh) -> None:
    """Some of the usage is in a record, some only in kept jobs, and one job runs all the time."""
    long = await mesh.submit(cores=2, tenant="vision")
    await mesh.reach(long, "RUNNING")
    await run_for(mesh, "vision")
    queue = mesh.parts["queue"].service
    await usage_store.UsageStore(queue.store, queue.state).write()
    assert await mesh.records_left(USAGE) == [USAGE + "vision"]
    await run_for(mesh, "vision")
    await run_for(mesh, "speech")
    for _ in range(2):
        before, at = await usages(mesh, users=True), time.time()
        await mesh.restart("queue")
        await mesh.reach(long, "RUNNING")
        after, passed = await usages(mesh, users=True), time.time() - at
        assert after["speech"].usage.gpu_seconds == pytest.approx(
            decayed(before["speech"].usage.gpu_seconds, passed), rel=0.02
        )
        gone, grown = decayed(before["vision"].usage.gpu_seconds, passed), passed
        assert gone < after["vision"].usage.gpu_seconds < gone + grown + 0.02
        assert after["vision"].usage.gpu_seconds == pytest.approx(gone + grown, rel=0.05)
        assert [one.user for one in after["vision"].users] == [one.user for one in before["vision"].users]


async def test_usage_is_rebuilt_from_kept_jobs_if_its_record_is_missing_and_written_again(mesh: Mesh) -> None:
    await run_for(mesh, "vision")
    await until_stored(mesh, "vision", write=True)
    before, at = await usages(mesh), time.time()
    await mesh.kill("queue")
    await mesh.store.transact([], [Delete(USAGE + "vision")])
    await mesh.start("queue")
    after, passed = await usages(mesh), time.time() - at
    assert after["vision"].usage.gpu_seconds == pytest.approx(
        decayed(before["vision"].usage.gpu_seconds, passed), rel=0.01
    )
    await until_stored(mesh, "vision")


async def until_stored(mesh: Mesh, tenant: str, *, write: bool = False) -> records_pb2.StoredTenantUsage:
    """Wait for the record of a tenant; `write` it at once."""
    queue = mesh.parts["queue"].service
    if write:
        await usage_store.UsageStore(queue.store, queue.state).write()

    async def stored() -> bool:
        return await mesh.store.get(USAGE + tenant) is not None

    await eventually(stored)
    entry = await mesh.store.get(USAGE + tenant)
    assert entry is not None
    return records_pb2.StoredTenantUsage.FromString(entry.value)


async def test_usage_outlives_the_jobs_that_it_counts(mesh: Mesh) -> None:
    job_id = await run_for(mesh, "vision")
    stored = await until_stored(mesh, "vision", write=True)
    assert stored.ByteSize() < 200
    queue = mesh.parts["queue"].service
    await queue.job_store.purge([job_id])
    before, at = await usages(mesh), time.time()
    await mesh.restart("queue")
    after, passed = await usages(mesh), time.time() - at
    assert after["vision"].usage.gpu_seconds == pytest.approx(
        decayed(before["vision"].usage.gpu_seconds, passed), rel=0.01
    )


async def test_a_write_that_fails_is_repeated(mesh: Mesh) -> None:
    await run_for(mesh, "vision")
    part = mesh.parts["queue"]
    part.store.away = True
    store = usage_store.UsageStore(part.service.store, part.service.state)
    with pytest.raises(StoreUnavailable):
        await store.write()
    part.store.away = False
    await store.write()
    await until_stored(mesh, "vision")
    assert not part.service.state.usage.changed


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0])
async def test_a_damaged_record_is_named_and_nothing_starts(amount: float) -> None:
    store = MemoryStore()
    stored = records_pb2.StoredTenantUsage(schema_version=1, tenant_id="vision")
    stored.time.GetCurrentTime()
    stored.usage.gpu_seconds = amount
    await store.transact([], [Put(USAGE + "vision", stored.SerializeToString())])
    with pytest.raises(BadRecord, match=r"queue/usage/vision is damaged.*amounts\.gpu_milli must be finite"):
        await usage_store.load_usage(store, State(HALF_LIFE))


async def test_usage_from_the_future_is_ignored() -> None:
    store, state = MemoryStore(), State(HALF_LIFE)
    stored = records_pb2.StoredTenantUsage(schema_version=1, tenant_id="vision")
    stored.time.FromSeconds(int(time.time()) + 86_400)
    stored.usage.gpu_seconds = 5.0
    await store.transact([], [Put(USAGE + "vision", stored.SerializeToString())])
    await usage_store.load_usage(store, state)
    assert state.usage.ledger is not None
    assert state.usage.ledger.tenants == []


async def test_pages_of_usage_and_bad_pages(mesh: Mesh) -> None:
    for tenant in ("a", "b", "c"):
        await mesh.tenants.CreateTenant(tenant_pb2.CreateTenantRequest(tenant=tenant_pb2.Tenant(id=tenant)))
    found, token = list[str](), ""
    while True:
        request = tenant_pb2.ListTenantUsageRequest(page_size=1, page_token=token)
        page = await mesh.tenants.ListTenantUsage(request)
        found += [one.tenant_id for one in page.usages]
        if not (token := page.next_page_token):
            break
    assert found == ["a", "b", "c", "default"]
    with pytest.raises(grpc.aio.AioRpcError, match="page_size: must not be negative"):
        await mesh.tenants.ListTenantUsage(tenant_pb2.ListTenantUsageRequest(page_size=-1))


async def test_a_department_has_the_usage_of_its_groups(mesh: Mesh) -> None:
    for tenant in (tenant_pb2.Tenant(id="lab", weight=3), tenant_pb2.Tenant(id="asr", parent="lab")):
        await mesh.tenants.CreateTenant(tenant_pb2.CreateTenantRequest(tenant=tenant))
    await run_for(mesh, "asr")
    await run_for(mesh, "shop")
    found = await usages(mesh)
    assert found["lab"].usage.gpu_seconds == pytest.approx(found["asr"].usage.gpu_seconds, rel=1e-6)
    assert found["lab"].fair_share == pytest.approx(0.75)
    assert found["asr"].fair_share == pytest.approx(0.75)
    assert found["shop"].fair_share == pytest.approx(0.25)
    assert found["lab"].usage_share + found["shop"].usage_share == pytest.approx(1.0)
    assert found["asr"].usage_share == pytest.approx(found["lab"].usage_share)


async def test_the_metric_is_what_a_tenant_held_on_decayed_average(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await run_for(mesh, "vision")
    shown: dict[tuple[str, str], float] = {}

    def set_gauge(value: float, *, resource: str, tenant: str) -> None:
        shown[resource, tenant] = value

    monkeypatch.setattr(usage_metrics, "USED", SimpleNamespace(set=set_gauge))
    usage_metrics.UsageMetrics(mesh.parts["queue"].service.state).report(time.time())
    assert shown["gpu", "vision"] > 0
    assert shown["cores", "vision"] == pytest.approx(2 * shown["gpu", "vision"])
