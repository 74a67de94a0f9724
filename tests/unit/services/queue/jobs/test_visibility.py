"""Callers restricted to some tenants see and change their tenants' jobs, and learn nothing about others'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, reason, running, spec

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.core.scheduling.admission import RULES
from cotenant.rpc.channel import connect
from cotenant.security import identity
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.services.queue.jobs.notification_records import NOTIFICATIONS, load_notifications
from cotenant.services.queue.notifications.rules import NotificationRules
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import (
    array_service_pb2_grpc,
    job_pb2,
    job_service_pb2_grpc,
    node_service_pb2_grpc,
    tenant_service_pb2_grpc,
)
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import tenant_service_pb2 as tenant_pb

SECRET = "unreleased-model"
CALLERS = {
    "ann": Identity("ann", frozenset({Role.USER}), frozenset({"a"})),
    "abe": Identity("abe", frozenset({Role.USER}), frozenset({"a"})),
    "head": Identity("head", frozenset({Role.TENANT_ADMIN}), frozenset({"a"})),
    "eye": Identity("eye", frozenset({Role.VIEWER}), frozenset({"a"})),
    "bob": Identity("bob", frozenset({Role.USER}), frozenset({"b"})),
    "dean": Identity("dean", frozenset({Role.TENANT_ADMIN}), frozenset({"faculty"})),
    "n1": Identity("n1", frozenset({Role.AGENT}), frozenset(), "n1"),
}


class ByName:
    def authenticate(self, method: str, metadata: identity.Metadata, peer: identity.Peer) -> Identity:
        name = identity.bearer_token(metadata)
        return CALLERS[name] if name else identity.ANYONE


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    alone = replace(BACKFILL, rules=RULES)  # without fair shares, jobs of other tenants may be ahead
    async with running(authenticator=ByName(), queue_config=alone) as mesh:
        for name in CALLERS:
            mesh.channels[name] = connect(f"127.0.0.1:{mesh.ports['queue']}", name)
        yield mesh


def as_(mesh: Mesh, name: str) -> Any:
    return job_service_pb2_grpc.JobServiceStub(mesh.channels[name])


def arrays_as(mesh: Mesh, name: str) -> Any:
    return array_service_pb2_grpc.ArrayServiceStub(mesh.channels[name])


async def submitted(mesh: Mesh, by: str, tenant: str = "", **fields: Any) -> str:
    made = await as_(mesh, by).CreateJob(pb.CreateJobRequest(spec=spec(tenant=tenant, **fields)))
    job_id: str = made.job.id
    return job_id


async def considered(mesh: Mesh, job_id: str) -> bool:
    explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return explained.position == 2 and bool(explained.ahead)


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call if not hasattr(call, "__aiter__") or hasattr(call, "__await__") else _drained(call))
    return reason(refused.value)


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_jobs_are_created_only_in_the_callers_tenants_under_its_name(mesh: Mesh) -> None:
    await mesh.agent("n1")
    mine = await mesh.job(await submitted(mesh, "ann", "a"))
    assert (mine.submitter, mine.spec.tenant) == ("ann", "a")
    assert (await mesh.job(await submitted(mesh, "ann"))).spec.tenant == "a"  # her only tenant
    for tenant in ("b", "default"):
        assert await refusal(submitted(mesh, "ann", tenant)) == "NOT_YOUR_TENANT"
    request = pb.SimulateJobRequest(spec=spec(tenant="b"))
    assert await refusal(as_(mesh, "ann").SimulateJob(request)) == "NOT_YOUR_TENANT"
    assert await refusal(submitted(mesh, "eye", "a")) == "ROLE_MAY_NOT"


async def test_jobs_of_other_tenants_are_not_found(mesh: Mesh) -> None:
    await mesh.agent("n1")
    hers, his = await submitted(mesh, "ann", "a"), await submitted(mesh, "bob", "b", name=SECRET)
    stub = as_(mesh, "ann")
    listed = await stub.ListJobs(pb.ListJobsRequest())
    assert [job.id for job in listed.jobs] == [hers]
    assert listed.total_size == 1
    for tenant_filter in (pb.JobFilter(tenant="b"), pb.JobFilter(ids=[his]), pb.JobFilter(name=SECRET)):
        assert not (await stub.ListJobs(pb.ListJobsRequest(filter=tenant_filter))).jobs
    by_id = pb.GetJobRequest(id=his), pb.ExplainJobRequest(id=his), pb.ReadLogsRequest(id=his)
    for method, request in zip((stub.GetJob, stub.ExplainJob, stub.ReadLogs), by_id, strict=True):
        assert await refusal(method(request)) == "JOB_NOT_FOUND"
    changes = (
        stub.CancelJob(pb.CancelJobRequest(id=his)),
        stub.SuspendJob(pb.SuspendJobRequest(id=his)),
        stub.ResumeJob(pb.ResumeJobRequest(id=his)),
        stub.MoveJob(pb.MoveJobRequest(id=his, number=1)),
        stub.UpdateJob(pb.UpdateJobRequest(job=job_pb2.Job(id=his))),
    )
    for call in changes:
        assert await refusal(call) == "JOB_NOT_FOUND"
    assert await refusal(submitted(mesh, "ann", dependencies=[job_pb2.Dependency(id=his)])) == "INVALID_ARGUMENT"
    near = his[:-1] + ("0" if his[-1] != "0" else "1")  # similar-id suggestions never reveal other tenants' jobs
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetJob(pb.GetJobRequest(id=near))
    assert his not in str(refused.value.details())
    assert (await mesh.job(his)).phase not in (job_pb2.JOB_PHASE_CANCELLED, job_pb2.JOB_PHASE_SUSPENDED)


async def test_a_caller_may_list_only_what_it_has_submitted_itself(mesh: Mesh) -> None:
    hers, his = await submitted(mesh, "ann", "a", name="same"), await submitted(mesh, "abe", "a", name="same")
    array = await arrays_as(mesh, "abe").CreateArray(
        array_pb.CreateArrayRequest(
            spec=spec(tenant="a", name="same", array=job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=1)]))
        )
    )
    own = pb.JobFilter(own_only=True, name="same")
    assert [job.id for job in (await as_(mesh, "ann").ListJobs(pb.ListJobsRequest(filter=own))).jobs] == [hers]
    of_abe = [job.id async for job in _listed(mesh, "abe", own)]
    assert set(of_abe) == {his, f"{array.array.id}_0", f"{array.array.id}_1"}
    assert not (await as_(mesh, "head").ListJobs(pb.ListJobsRequest(filter=own))).jobs
    for name, arrays in (("ann", []), ("abe", [array.array.id])):
        listed = await arrays_as(mesh, name).ListArrays(array_pb.ListArraysRequest(filter=own))
        assert [one.id for one in listed.arrays] == arrays
    page = await as_(mesh, "abe").ListJobs(pb.ListJobsRequest(filter=own, page_size=1))
    other = pb.ListJobsRequest(filter=own, page_size=1, page_token=page.next_page_token)
    assert await refusal(as_(mesh, "ann").ListJobs(other)) == "INVALID_ARGUMENT"


async def _listed(mesh: Mesh, name: str, wanted: pb.JobFilter) -> AsyncIterator[job_pb2.Job]:
    """Yield all jobs that a caller lists, on pages of one job."""
    request = pb.ListJobsRequest(filter=wanted, page_size=1)
    while True:
        page = await as_(mesh, name).ListJobs(request)
        for job in page.jobs:
            yield job
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return


async def test_removals_are_told_only_of_the_callers_tenants(mesh: Mesh) -> None:
    """While a watch lasts, after it was resumed, and with a filter that jobs may cease to match."""
    queue = mesh.parts["queue"].service
    queued = pb.JobFilter(phases=[job_pb2.JOB_PHASE_QUEUED])
    stub, ended, told = as_(mesh, "ann"), list[str](), list[list[str]]()
    for by, tenant in (("ann", "a"), ("bob", "b")) * 2:
        ended.append(await submitted(mesh, by, tenant))
    live = stub.WatchJobs(pb.WatchJobsRequest())
    revision = await _synced(live)
    for job_id in ended:
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    await queue.job_store.purge(ended)
    for wanted in (None, queued):
        resumed = stub.WatchJobs(pb.WatchJobsRequest(after_revision=revision, filter=wanted))
        told.append([job_id async for one in _until_synced(resumed) for job_id in one.removed_job_ids])
    last = await submitted(mesh, "ann", "a")
    told.append([])
    async for response in live:
        told[-1] += response.removed_job_ids
        if last in (job.id for job in response.jobs):
            break
    live.cancel()
    assert told == [ended[::2]] * 3


@pytest.mark.parametrize(
    ("revision", "code", "name"),
    [
        ("x", grpc.StatusCode.INVALID_ARGUMENT, "REVISION_UNKNOWN"),
        (".999999", grpc.StatusCode.FAILED_PRECONDITION, "REVISION_UNKNOWN"),
        ("other.1", grpc.StatusCode.FAILED_PRECONDITION, "REVISION_UNKNOWN"),
        (".0", grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED"),
    ],
)
async def test_revisions_that_cannot_be_resumed_are_refused(
    mesh: Mesh, revision: str, code: grpc.StatusCode, name: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _synced(as_(mesh, "ann").WatchJobs(pb.WatchJobsRequest(after_revision=revision)))
    assert (refused.value.code(), reason(refused.value)) == (code, name)


async def _until_synced(watch: Any) -> AsyncIterator[pb.WatchJobsResponse]:
    async for response in watch:
        yield response
        if response.synced:
            break
    watch.cancel()


async def _synced(watch: Any) -> str:
    """Read the initial state; return its revision."""
    async for response in watch:
        if response.synced:
            return str(response.revision)
    raise AssertionError("the watch has ended")


async def test_a_watch_is_restricted_to_the_callers_tenants(mesh: Mesh) -> None:
    await mesh.agent("n1")
    watch = as_(mesh, "ann").WatchJobs(pb.WatchJobsRequest())
    seen: list[str] = []
    async for response in watch:
        if response.synced:
            await submitted(mesh, "bob", "b")
            last = await submitted(mesh, "ann", "a")
        else:
            seen += [job.spec.tenant for job in response.jobs]
            if last in (job.id for job in response.jobs):
                break
    watch.cancel()
    assert set(seen) == {"a"}


async def test_a_user_changes_its_own_jobs_and_a_tenant_admin_its_tenants(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await submitted(mesh, "ann", "a")
    for name, told in (("abe", "NOT_YOUR_JOB"), ("eye", "ROLE_MAY_NOT"), ("bob", "JOB_NOT_FOUND")):
        assert await refusal(as_(mesh, name).CancelJob(pb.CancelJobRequest(id=job_id))) == told
        if name != "bob":
            assert (await as_(mesh, name).GetJob(pb.GetJobRequest(id=job_id))).job.id == job_id
    await as_(mesh, "head").SuspendJob(pb.SuspendJobRequest(id=job_id))
    await as_(mesh, "ann").CancelJob(pb.CancelJobRequest(id=job_id))
    array = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=2, step=1)])
    request = array_pb.CreateArrayRequest(spec=spec(tenant="a", array=array))
    array_id = (await arrays_as(mesh, "ann").CreateArray(request)).array.id
    cancel = array_pb.CancelArrayRequest(id=array_id)
    assert await refusal(arrays_as(mesh, "abe").CancelArray(cancel)) == "NOT_YOUR_JOB"
    assert await refusal(arrays_as(mesh, "bob").CancelArray(cancel)) == "ARRAY_NOT_FOUND"
    assert await refusal(as_(mesh, "bob").CancelJob(pb.CancelJobRequest(id=array_id))) == "JOB_NOT_FOUND"
    assert await refusal(arrays_as(mesh, "eye").CancelArray(cancel)) == "ROLE_MAY_NOT"
    assert (await arrays_as(mesh, "abe").GetArray(array_pb.GetArrayRequest(id=array_id))).array.submitter == "ann"
    await arrays_as(mesh, "head").CancelArray(cancel)


async def test_no_explanation_names_another_tenants_job(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    his = await submitted(mesh, "bob", "b", name=SECRET)
    await mesh.reach(his, "RUNNING")
    waiting = await submitted(mesh, "bob", "b", name=SECRET)
    hers = await submitted(mesh, "ann", "a")
    await eventually(lambda: considered(mesh, hers))
    stub = as_(mesh, "ann")
    told = [
        await stub.ExplainJob(pb.ExplainJobRequest(id=hers)),
        await stub.GetJob(pb.GetJobRequest(id=hers)),
        await stub.SimulateJob(pb.SimulateJobRequest(spec=spec(tenant="a"))),
    ]
    text = " ".join(map(str, told))
    assert not {his, waiting, SECRET} & {word for word in (his, waiting, SECRET) if word in text}
    assert told[0].ahead_count == 1
    assert not told[0].ahead[0].job_id
    whole = str(await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=hers)))
    assert SECRET in whole  # its own tenant sees it


async def test_failure_summaries_and_nodes_hide_other_tenants_jobs(mesh: Mesh) -> None:
    await mesh.agent("n1")
    his = await submitted(mesh, "bob", "b")
    await mesh.reach(his, "RUNNING")
    assert list((await mesh.node("n1")).attempts) == [f"{his}/1"]
    channel = connect(f"127.0.0.1:{mesh.ports['placement']}", "ann")
    async with channel:
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        node = (await stub.GetNode(node_pb2.GetNodeRequest(id="n1"))).node
        assert not node.attempts
        assert node.used_gpu_milli == 1000
    by = pb.SummarizeFailuresRequest(by=pb.FAILURE_GROUP_TENANT)
    assert (await as_(mesh, "ann").SummarizeFailures(by)).attempts == 0


async def test_callers_see_their_tenants_and_descendants_only(mesh: Mesh) -> None:
    for tenant in (
        tenant_pb.Tenant(id="faculty"),
        tenant_pb.Tenant(id="b", parent="faculty"),
        tenant_pb.Tenant(id="a"),
    ):
        await mesh.tenants.CreateTenant(tenant_pb.CreateTenantRequest(tenant=tenant))
    stub: Any = tenant_service_pb2_grpc.TenantServiceStub(mesh.channels["dean"])
    listed = await stub.ListTenants(tenant_pb.ListTenantsRequest())
    assert [tenant.id for tenant in listed.tenants] == ["b", "faculty"]
    assert await refusal(stub.GetTenant(tenant_pb.GetTenantRequest(id="a"))) == "TENANT_NOT_FOUND"
    await mesh.agent("n1")
    his, hers = await submitted(mesh, "bob", "b"), await submitted(mesh, "ann", "a")
    assert [job.id for job in (await as_(mesh, "dean").ListJobs(pb.ListJobsRequest())).jobs] == [his]
    await as_(mesh, "dean").CancelJob(pb.CancelJobRequest(id=his))
    assert await refusal(as_(mesh, "dean").CancelJob(pb.CancelJobRequest(id=hers))) == "JOB_NOT_FOUND"


async def test_a_watch_follows_changes_of_tenant_parents(mesh: Mesh) -> None:
    await mesh.agent("n1")
    for tenant in (tenant_pb.Tenant(id="faculty"), tenant_pb.Tenant(id="b", parent="faculty")):
        await mesh.tenants.CreateTenant(tenant_pb.CreateTenantRequest(tenant=tenant))
    watch = as_(mesh, "dean").WatchJobs(pb.WatchJobsRequest())
    assert (await watch.read()).synced
    seen = await submitted(mesh, "bob", "b")
    assert [job.id for job in (await watch.read()).jobs] == [seen]
    alone = tenant_pb.UpdateTenantRequest(tenant=tenant_pb.Tenant(id="b"), update_mask=FieldMask(paths=["parent"]))
    await mesh.tenants.UpdateTenant(alone)
    unseen = await submitted(mesh, "bob", "b")
    last = await mesh.submit(tenant="faculty")
    told: list[str] = []
    while last not in told:
        told += [job.id for job in (await watch.read()).jobs]
    assert unseen not in told


async def test_an_agent_may_act_for_its_own_node_only(mesh: Mesh) -> None:
    channel = connect(f"127.0.0.1:{mesh.ports['placement']}", "n1")
    async with channel:
        stub = agent_service_pb2_grpc.AgentServiceStub(channel)
        hello = agent_pb2.ConnectRequest(hello=agent_pb2.Hello(node_id="n2", incarnation="x"))
        call: Any = stub.Connect(iter([hello]))
        assert await refusal(_drained(call)) == "NOT_YOUR_NODE"
    assert "n2" not in mesh.parts["placement"].service.cluster.nodes


async def targets(mesh: Mesh, thing_id: str) -> list[str]:
    entry = await mesh.store.get(NOTIFICATIONS + thing_id)
    assert entry
    return list(load_notifications(entry).targets)


async def test_a_repeated_job_keeps_the_secrets_of_notifications_for_its_submitter_only() -> None:
    notifying = replace(BACKFILL, notifications=NotificationRules(b"a key of the mesh's own"))
    async with running(authenticator=ByName(), queue_config=notifying) as mesh:
        for name in CALLERS:
            mesh.channels[name] = connect(f"127.0.0.1:{mesh.ports['queue']}", name)
        await mesh.agent("n1")
        target = "https://hooks.example.org/s3cret"
        hers, his = await submitted(mesh, "ann", notify=[target]), await submitted(mesh, "bob")
        shown = (await as_(mesh, "ann").GetJob(pb.GetJobRequest(id=hers))).job.spec
        assert list(shown.notify) == ["https://hooks.example.org/…"]
        again = (await as_(mesh, "ann").CreateJob(pb.CreateJobRequest(spec=shown, like=hers))).job
        assert list(again.spec.notify) == list(shown.notify)
        assert await targets(mesh, again.id) == [target]
        assert (
            await refusal(as_(mesh, "abe").CreateJob(pb.CreateJobRequest(spec=shown, like=hers))) == "INVALID_ARGUMENT"
        )
        assert await refusal(as_(mesh, "ann").CreateJob(pb.CreateJobRequest(spec=shown, like=his))) == "JOB_NOT_FOUND"
        array = job_pb2.JobSpec()
        array.CopyFrom(shown)
        array.array.ranges.add(last=1)
        first = (await arrays_as(mesh, "ann").CreateArray(array_pb.CreateArrayRequest(spec=array, like=hers))).array
        later = array_pb.CreateArrayRequest(spec=array, like=first.id)
        second = (await arrays_as(mesh, "ann").CreateArray(later)).array
        assert await targets(mesh, second.id) == [target]
