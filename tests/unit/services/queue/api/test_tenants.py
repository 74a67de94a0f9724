"""Tenants, their limits, and queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from tests.unit.services.mesh import BACKFILL, Mesh, again, eventually, reason, running, spec, until

from cotenant.codec.errors import from_error
from cotenant.services.placement.api.server import PlacementConfig
from cotenant.v1 import job_pb2, job_service_pb2
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import tenant_service_pb2 as pb


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def made(mesh: Mesh, tenant_id: str, **fields: int | str) -> pb.Tenant:
    request = pb.CreateTenantRequest(tenant=pb.Tenant(id=tenant_id, **fields))  # type: ignore[arg-type]  # numbers, and a parent
    response = await mesh.tenants.CreateTenant(request)
    tenant: pb.Tenant = response.tenant
    return tenant


async def test_a_tenant_survives_a_restart(mesh: Mesh) -> None:
    tenant = await made(mesh, "a", limit_gpu_milli=4000, quota_cores=2)
    await mesh.restart("queue")
    got = (await mesh.tenants.GetTenant(pb.GetTenantRequest(id="a"), wait_for_ready=True)).tenant
    assert got == tenant
    await mesh.tenants.DeleteTenant(pb.DeleteTenantRequest(id="a", etag=tenant.etag))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.tenants.GetTenant(pb.GetTenantRequest(id="a"))
    assert reason(refused.value) == "TENANT_NOT_FOUND"
    assert await mesh.records_left("queue/tenants/") == []


async def test_creating_a_tenant_is_idempotent_and_a_different_one_is_refused(mesh: Mesh) -> None:
    calls = (made(mesh, "a", limit_cores=4) for _ in range(5))
    assert len({tenant.etag for tenant in await asyncio.gather(*calls)}) == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await made(mesh, "a", limit_cores=5)
    assert reason(refused.value) == "TENANT_EXISTS"


async def test_every_invalid_field_of_a_tenant_is_named(mesh: Mesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await made(mesh, "A b", limit_cores=-1, weight=-2, quota_gpu_milli=2, limit_gpu_milli=1)
    assert {violation.field for violation in from_error(refused.value).violations} == {
        "tenant.id",
        "tenant.limit_cores",
        "tenant.weight",
        "tenant.quota_gpu_milli",
    }


async def test_an_update_changes_masked_fields_under_its_etag(mesh: Mesh) -> None:
    old = await made(mesh, "a", limit_cores=4, quota_cores=1)
    request = pb.UpdateTenantRequest(
        tenant=pb.Tenant(id="a", limit_cores=9, etag=old.etag), update_mask=FieldMask(paths=["limit_cores", "weight"])
    )
    new = (await mesh.tenants.UpdateTenant(request)).tenant
    assert (new.limit_cores, new.quota_cores, new.weight) == (9, 1, 0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.tenants.UpdateTenant(request)
    assert reason(refused.value) == "ETAG_MISMATCH"


async def test_a_repeat_after_a_lost_answer_is_recognized(mesh: Mesh) -> None:
    store = mesh.parts["queue"].store
    store.lose_answer = True
    await again(lambda: made(mesh, "a", limit_cores=4))
    store.lose_answer = True
    request = pb.UpdateTenantRequest(tenant=pb.Tenant(id="a", limit_cores=5))
    assert (await again(lambda: mesh.tenants.UpdateTenant(request))).tenant.limit_cores == 5
    store.lose_answer = True
    await again(lambda: mesh.tenants.DeleteTenant(pb.DeleteTenantRequest(id="a")))
    assert await mesh.records_left("queue/tenants/") == []


async def test_tenants_and_queues_are_paged_and_their_tokens_are_of_one_list_only(mesh: Mesh) -> None:
    await made(mesh, "a")
    await made(mesh, "b")
    page = await mesh.tenants.ListTenants(pb.ListTenantsRequest(page_size=2))
    token = page.next_page_token
    rest = await mesh.tenants.ListTenants(pb.ListTenantsRequest(page_size=2, page_token=token))
    assert [[one.id for one in those.tenants] for those in (page, rest)] == [["a", "b"], ["default"]]
    assert not rest.next_page_token
    queues = await mesh.tenants.ListQueues(pb.ListQueuesRequest(page_size=1))
    assert ([queue.id for queue in queues.queues], queues.next_page_token) == (["default"], "")
    calls = (
        mesh.tenants.ListQueues(pb.ListQueuesRequest(page_token=token)),
        mesh.tenants.ListQueues(pb.ListQueuesRequest(page_size=-1)),
        mesh.tenants.ListTenants(pb.ListTenantsRequest(page_size=-1)),
        mesh.nodes.ListNodes(node_pb2.ListNodesRequest(page_token=token)),
        mesh.jobs.ListJobs(job_service_pb2.ListJobsRequest(page_token=token)),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        (violation,) = from_error(refused.value).violations
        assert violation.field in ("page_size", "page_token")


async def test_a_limit_holds_until_it_is_raised(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    await made(mesh, "a", limit_gpu_milli=2000)
    ids = [await mesh.submit(tenant="a") for _ in range(4)]
    for job_id in ids[:2]:
        await mesh.reach(job_id, "RUNNING")
    refused = await mesh.refused(ids[2], "QUOTA")
    assert "tenant a would hold 3 GPUs of at most 2" in refused.refusal.detail
    other = await mesh.submit(tenant="b")
    await mesh.reach(other, "RUNNING")
    tenants = {tenant.id: tenant for tenant in (await mesh.tenants.ListTenants(pb.ListTenantsRequest())).tenants}
    assert sorted(tenants) == ["a", "b", "default"]
    assert (tenants["a"].used_gpu_milli, tenants["a"].used_cores) == (2000, 6)
    await mesh.tenants.UpdateTenant(pb.UpdateTenantRequest(tenant=pb.Tenant(id="a", limit_gpu_milli=3000)))
    await mesh.reach(ids[2], "RUNNING")
    await mesh.refused(ids[3], "QUOTA")
    agent.finish((ids[0], 1))
    await mesh.reach(ids[3], "RUNNING")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await mesh.tenants.DeleteTenant(pb.DeleteTenantRequest(id="a"))
    assert reason(error.value) == "TENANT_IN_USE"


async def test_a_limit_below_usage_stops_no_job_and_blocks_starts_until_usage_drops(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    await made(mesh, "a", limit_gpu_milli=3000)
    ids = [await mesh.submit(tenant="a") for _ in range(4)]
    for job_id in ids[:3]:
        await mesh.reach(job_id, "RUNNING")
    await mesh.tenants.UpdateTenant(pb.UpdateTenantRequest(tenant=pb.Tenant(id="a", limit_gpu_milli=1000)))

    async def told_to_hold(count: int) -> bool:
        job = await mesh.job(ids[3])
        return job.refusal.code == "QUOTA" and f"would hold {count} GPUs of at most 1" in job.refusal.detail

    await eventually(partial(told_to_hold, 4))
    assert [(await mesh.job(job_id)).phase for job_id in ids[:3]] == [(await mesh.job(ids[0])).phase] * 3
    for job_id, count in ((ids[0], 3), (ids[1], 2)):
        agent.finish((job_id, 1))
        await eventually(partial(told_to_hold, count))
    assert (await mesh.reach(ids[2], "RUNNING")).attempt.number == 1
    agent.finish((ids[2], 1))
    await mesh.reach(ids[3], "RUNNING")


async def test_an_unplaced_job_does_not_count_against_the_limit(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=2, cores=24)
    await made(mesh, "a", limit_gpu_milli=2000)
    blocker = await mesh.submit(gpus=1)
    await mesh.reach(blocker, "RUNNING")
    large, small = await mesh.submit(gpus=2, tenant="a"), await mesh.submit(gpus=1, tenant="a")
    await mesh.reach(small, "RUNNING")
    await mesh.refused(large, "QUOTA")


async def test_the_queue_reports_its_lengths(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    await mesh.reach(await mesh.submit(), "RUNNING")
    await mesh.submit()

    async def counted() -> bool:
        (queue,) = (await mesh.tenants.ListQueues(pb.ListQueuesRequest())).queues
        return (queue.id, queue.policy, queue.waiting, queue.running) == ("default", "fifo", 1, 1)

    await eventually(counted)


async def test_usage_of_child_tenants_counts_for_their_parents(mesh: Mesh) -> None:
    await made(mesh, "dept", limit_gpu_milli=1000, quota_gpu_milli=1000)
    child = await made(mesh, "asr", parent="dept", quota_gpu_milli=1000)
    for fields, told in (
        ({"parent": "dep"}, "did you mean dept?"),
        ({"parent": "dept", "quota_gpu_milli": 500}, "of dept is 1000, less than the 1500"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made(mesh, "nlp", **fields)
        assert told in str(from_error(refused.value).violations)
    circle = pb.UpdateTenantRequest(tenant=pb.Tenant(id="dept", parent="asr"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.tenants.UpdateTenant(circle)
    assert "dept → asr → dept" in str(from_error(refused.value).violations)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.tenants.DeleteTenant(pb.DeleteTenantRequest(id="dept"))
    assert reason(refused.value) == "TENANT_IN_USE"
    await made(mesh, "nlp", parent="dept")
    await mesh.agent("n1", gpus=8, cores=24)
    await mesh.reach(await mesh.submit(tenant="asr"), "RUNNING")
    refusal = (await mesh.refused(await mesh.submit(tenant="nlp"), "QUOTA")).refusal
    assert "tenant dept, to which nlp belongs, would hold 2 GPUs of at most 1" in refusal.detail
    used = (await mesh.tenants.GetTenant(pb.GetTenantRequest(id="dept"))).tenant
    assert used.used_gpu_milli == 1000
    assert child.parent == "dept"


async def test_allocator_chosen_cores_stay_within_the_limit() -> None:
    async with running(placement_config=PlacementConfig(allocator="proportional")) as mesh:
        await made(mesh, "dept", limit_cores=4)
        await made(mesh, "group", parent="dept")
        agent = await mesh.agent("n1", gpus=8, cores=24)
        first, second = await mesh.submit(tenant="group"), await mesh.submit(tenant="group")
        await mesh.reach(first, "RUNNING")
        told = (await mesh.refused(second, "QUOTA")).refusal.detail
        assert told == "tenant dept, to which group belongs, would hold 6 cores of at most 4"
        await mesh.reach(await mesh.submit(tenant="free"), "RUNNING")
        what_if = await mesh.jobs.SimulateJob(job_service_pb2.SimulateJobRequest(spec=spec(tenant="group")))
        assert (what_if.starts_now, what_if.refusal.code) == (False, "QUOTA")
        agent.finish((first, 1))
        await mesh.reach(second, "RUNNING")


async def test_concurrent_calls_do_not_exceed_a_tenants_job_limit() -> None:
    async with running(queue_config=replace(BACKFILL, tenant_jobs_max=5)) as mesh:
        store = mesh.parts["queue"].store
        store.held_back = asyncio.Event()
        three = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=1, last=3)])
        quota = mesh.parts["queue"].service.state.tenant_quota
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(mesh.submit_array(array=three))]
        await until(lambda: bool(quota._reserved))
        calls += [asyncio.ensure_future(mesh.submit()) for _ in range(7)]
        await until(lambda: sum(call.done() for call in calls) == 5)  # refused, while the others wait for the store
        store.held_back.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [reason(one) for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert refused == ["TENANT_JOBS"] * 5
        assert (await mesh.jobs.ListJobs(job_service_pb2.ListJobsRequest())).total_size == 5
        assert not quota._reserved


async def test_a_tenants_unfinished_jobs_are_limited() -> None:
    async with running(queue_config=replace(BACKFILL, tenant_jobs_max=3)) as mesh:
        first, _ = await mesh.submit(), await mesh.submit()
        two = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=1, last=2)])
        for array in (two, None, None):
            if array or len((await mesh.jobs.ListJobs(job_service_pb2.ListJobsRequest())).jobs) == 3:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await (mesh.submit_array(array=array) if array else mesh.submit())
                assert (refused.value.code(), reason(refused.value)) == (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "TENANT_JOBS",
                )
                assert "; the limit is 3" in (refused.value.details() or "")
            else:
                await mesh.submit()
        await mesh.submit(tenant="other")  # each tenant has its own limit
        await mesh.jobs.CancelJob(job_service_pb2.CancelJobRequest(id=first))
        await mesh.submit()
