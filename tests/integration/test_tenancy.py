"""Tenant isolation, for every method that a user of one tenant may call: no answer reveals anything of another tenant.

A call about the other tenant's job is answered as if there were no such job: word for word like a call about an id
that never existed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, running, spec

from cotenant.codec import errors
from cotenant.codec.method_table import METHOD_RULES
from cotenant.codec.specs import duration
from cotenant.core.scheduling.admission import RULES
from cotenant.internal.v1 import observation_service_pb2 as observation_pb
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.rpc.channel import connect
from cotenant.security import identity
from cotenant.security.identity import Identity
from cotenant.security.permissions import ROLES, Role
from cotenant.security.secret_keys import KEYS_FILE
from cotenant.services.predictor.api import server as predictor
from cotenant.store.port import Committed, Delete, Operation, Put
from cotenant.v1 import advice_service_pb2 as advice_pb
from cotenant.v1 import (
    advice_service_pb2_grpc,
    array_service_pb2_grpc,
    folder_service_pb2_grpc,
    job_pb2,
    job_service_pb2_grpc,
    node_service_pb2_grpc,
    policy_service_pb2_grpc,
    predictor_service_pb2_grpc,
    resources_pb2,
    schedule_service_pb2_grpc,
    secret_service_pb2_grpc,
    tenant_service_pb2_grpc,
)
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import folder_service_pb2 as folder_pb
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb
from cotenant.v1 import policy_service_pb2 as policy_pb
from cotenant.v1 import predictor_service_pb2 as predictor_pb
from cotenant.v1 import schedule_service_pb2 as schedule_pb
from cotenant.v1 import secret_service_pb2 as secret_pb
from cotenant.v1 import tenant_service_pb2 as tenant_pb
from cotenant.v1.session_pb2 import ExecSession, SessionStart

ASKED_MAX = 3
SECRET, UNKNOWN_ID = "unreleased-model", "0zzzzzzzzzzz"
HIS_TOKEN, UNKNOWN_TOKEN = "HIS_TOKEN", "NOT_TOKEN"
CALLERS = {
    "ann": Identity("ann", frozenset({Role.USER}), frozenset({"a"})),
    "head": Identity("head", frozenset({Role.TENANT_ADMIN}), frozenset({"a"})),
    "eye": Identity("eye", frozenset({Role.VIEWER}), frozenset({"a"})),
    "bob": Identity("bob", frozenset({Role.USER}), frozenset({"blue-team"})),
}
PEOPLE = ("ann", "head", "eye")
CHAIN = predictor.Config(predictors=("loss-curve", "history"))
GOAL = job_pb2.LossGoal(target=1.0)


class ByName:
    def authenticate(self, method: str, metadata: identity.Metadata, peer: identity.Peer) -> Identity:
        name = identity.bearer_token(metadata)
        return CALLERS[name] if name else identity.ANYONE


@dataclass
class World:
    """A job of ann's that waits for one of bob's, on a node where one of his processes was found."""

    mesh: Mesh
    hers: str
    his: str
    waits: str
    array: str
    schedule: str

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.his, self.waits, self.array, self.schedule, SECRET, HIS_TOKEN, "bob", "blue-team"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    # Without fair shares, jobs of other tenants may be ahead.
    alone = replace(BACKFILL, rules=RULES, secret_keys=tmp_path / KEYS_FILE)
    async with running(authenticator=ByName(), predictor_config=CHAIN, queue_config=alone) as mesh:
        for name in CALLERS:
            for service in ("queue", "placement", "predictor"):
                mesh.channels[f"{name}/{service}"] = connect(f"127.0.0.1:{mesh.ports[service]}", name)
        agent = await mesh.agent("n1", gpus=1)
        his = await made(mesh, "bob", "blue-team", request_id="nightly")
        await mesh.reach(his, "RUNNING")
        ranges = [job_pb2.IndexRange(first=0, last=1, step=1)]
        array = await made(mesh, "bob", "blue-team", array=job_pb2.ArraySpec(ranges=ranges))
        waits = await made(mesh, "bob", "blue-team")
        hers = await made(mesh, "ann", "a", name="hers")
        schedule = await with_secret_and_schedule(mesh)
        problem = resources_pb2.HealthProblem(
            check="stray", action=resources_pb2.HEALTH_ACTION_IGNORE, reason=f"pid 7 (python in {his}/1, not given it)"
        )
        agent.inventory.problems.append(problem)
        agent.change_inventory()
        await eventually(lambda: names_his_jobs(mesh, hers))
        yield World(mesh, hers, his, waits, array, schedule)


async def with_secret_and_schedule(mesh: Mesh) -> str:
    """Set a secret of his, and create a schedule; return its id."""
    channel = mesh.channels["bob/queue"]
    secrets: Any = secret_service_pb2_grpc.SecretServiceStub(channel)
    await secrets.SetSecret(secret_pb.SetSecretRequest(tenant="blue-team", name=HIS_TOKEN, value=b"x"))
    schedules: Any = schedule_service_pb2_grpc.ScheduleServiceStub(channel)
    schedule = schedule_pb.Schedule(spec=spec(name=SECRET, tenant="blue-team"), every="366d")
    answer = await schedules.CreateSchedule(schedule_pb.CreateScheduleRequest(schedule=schedule))
    return str(answer.schedule.id)


async def created(mesh: Mesh, by: str, tenant: str, request_id: str = "", **fields: Any) -> job_pb2.Job:
    stub: Any = job_service_pb2_grpc.JobServiceStub(mesh.channels[f"{by}/queue"])
    asked = spec(**{"name": SECRET, "tenant": tenant} | fields)
    answer: pb.CreateJobResponse = await stub.CreateJob(pb.CreateJobRequest(spec=asked, request_id=request_id))
    return answer.job


async def made(mesh: Mesh, by: str, tenant: str, **fields: Any) -> str:
    """Create a job, or an array if there are indices; return its id."""
    if not fields.get("array"):
        return (await created(mesh, by, tenant, **fields)).id
    stub: Any = array_service_pb2_grpc.ArrayServiceStub(mesh.channels[f"{by}/queue"])
    request_id = fields.pop("request_id", "")
    asked = spec(**{"name": SECRET, "tenant": tenant} | fields)
    request = array_pb.CreateArrayRequest(spec=asked, request_id=request_id)
    answer: array_pb.CreateArrayResponse = await stub.CreateArray(request)
    return answer.array.id


async def names_his_jobs(mesh: Mesh, job_id: str) -> bool:
    """Return whether unredacted answers name his jobs, so that there is something to hide."""
    explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    node = (await mesh.nodes.GetNode(node_pb.GetNodeRequest(id="n1"))).node
    return bool(explained.ahead) and "pid 7" in str(node)


# Probes about a job (his, or an unknown one), about all jobs, or about none ------------------------------------------

Probe = Callable[[World, str], Iterator[Message]]


def once(make: Callable[[str], Message]) -> Probe:
    """Return a probe with one request about a job."""
    return lambda world, job_id: iter([make(job_id)])


def _creating(world: World, job_id: str) -> Iterator[Message]:
    yield pb.CreateJobRequest(spec=spec(tenant="a", dependencies=[job_pb2.Dependency(id=job_id)]))
    yield pb.CreateJobRequest(spec=spec(tenant="blue-team" if job_id == world.his else "no-tenant"))
    uses = [job_pb2.SecretUse(name=_token(world, job_id), variable="TOKEN")]
    yield pb.CreateJobRequest(spec=spec(tenant="a", secrets=uses))


def _estimating(world: World, job_id: str) -> Iterator[Message]:
    for tenant in ("a", "blue-team" if job_id == world.his else "no-tenant"):
        query = predictor_pb.EstimateQuery(job_id=job_id, spec=spec(tenant=tenant, model="bert", loss_goal=GOAL))
        yield predictor_pb.EstimateRequest(queries=[query])


def _listing(world: World, job_id: str) -> Iterator[Message]:
    yield pb.ListJobsRequest()
    for chosen in _filters(world, job_id):
        yield pb.ListJobsRequest(filter=chosen)


def _listing_arrays(world: World, job_id: str) -> Iterator[Message]:
    yield array_pb.ListArraysRequest()
    for chosen in _filters(world, job_id):
        yield array_pb.ListArraysRequest(filter=chosen)


def _creating_arrays(world: World, job_id: str) -> Iterator[Message]:
    for request in _creating(world, job_id):
        assert isinstance(request, pb.CreateJobRequest)
        request.spec.array.ranges.add(first=0, last=1)
        yield array_pb.CreateArrayRequest(spec=request.spec)


def of_arrays(make: Callable[..., Message]) -> Probe:
    """Return a probe about an array, a job, and a job of an array."""

    def probe(world: World, job_id: str) -> Iterator[Message]:
        array = world.array if job_id == world.his else UNKNOWN_ID
        return (make(id=one) for one in (array, job_id, f"{array}_0"))

    return probe


def _watching(world: World, job_id: str) -> Iterator[Message]:
    yield pb.WatchJobsRequest()
    for chosen in _filters(world, job_id):
        yield pb.WatchJobsRequest(filter=chosen, until_ended=True)


def _filters(world: World, job_id: str) -> Iterator[pb.JobFilter]:
    is_his = job_id == world.his
    yield pb.JobFilter(ids=[job_id, world.hers])
    yield pb.JobFilter(tenant="blue-team" if is_his else "no-tenant")
    yield pb.JobFilter(name=SECRET if is_his else "no-tenant")
    yield pb.JobFilter(array_id=world.array if is_his else UNKNOWN_ID)


def _updating(world: World, job_id: str) -> Iterator[Message]:
    mask = FieldMask(paths=["spec.priority"])
    for validate_only in (True, False):
        yield pb.UpdateJobRequest(job=job_pb2.Job(id=job_id), update_mask=mask, validate_only=validate_only)


def _simulating(world: World, job_id: str) -> Iterator[Message]:
    yield pb.SimulateJobRequest(spec=spec(tenant="a"), more=[spec(tenant="a")])
    yield pb.SimulateJobRequest(spec=spec(tenant="a", dependencies=[job_pb2.Dependency(id=job_id)]))
    tenant = "blue-team" if job_id == world.his else "no-tenant"
    yield pb.SimulateJobRequest(spec=spec(tenant="a"), more=[spec(tenant=tenant)])


def _tenant(world: World, job_id: str) -> str:
    return "blue-team" if job_id == world.his else "no-tenant"


def _token(world: World, job_id: str) -> str:
    return HIS_TOKEN if job_id == world.his else UNKNOWN_TOKEN


def of_schedules(make: Callable[..., Message]) -> Probe:
    """Return a probe about a schedule, and a job."""

    def probe(world: World, job_id: str) -> Iterator[Message]:
        return (make(id=one) for one in (world.schedule if job_id == world.his else UNKNOWN_ID, job_id))

    return probe


def _scheduling(world: World, job_id: str) -> Iterator[Message]:
    uses = [job_pb2.SecretUse(name=_token(world, job_id), variable="TOKEN")]
    for wanted in (spec(tenant=_tenant(world, job_id)), spec(tenant="a", secrets=uses)):
        schedule = schedule_pb.Schedule(spec=wanted, every="1h")
        yield schedule_pb.CreateScheduleRequest(schedule=schedule, validate_only=True)


def _setting_secrets(world: World, job_id: str) -> Iterator[Message]:
    yield secret_pb.SetSecretRequest(tenant=_tenant(world, job_id), name=_token(world, job_id), value=b"y")


def _listing_secrets(world: World, job_id: str) -> Iterator[Message]:
    yield secret_pb.ListSecretsRequest()
    yield secret_pb.ListSecretsRequest(tenant=_tenant(world, job_id))


def _deleting_secrets(world: World, job_id: str) -> Iterator[Message]:
    for tenant in ("", "a", _tenant(world, job_id)):
        yield secret_pb.DeleteSecretRequest(tenant=tenant, name=_token(world, job_id))


PROBES: dict[str, Probe] = {
    "JobService/CreateJob": _creating,
    "JobService/GetJob": of_arrays(pb.GetJobRequest),
    "JobService/ListJobs": _listing,
    "JobService/WatchJobs": _watching,
    "JobService/ReadLogs": once(lambda job_id: pb.ReadLogsRequest(id=job_id)),
    "JobService/OpenSession": once(
        lambda job_id: pb.OpenSessionRequest(start=SessionStart(id=job_id, exec=ExecSession(command=["true"])))
    ),
    "JobService/ReadFiles": once(lambda job_id: pb.ReadFilesRequest(id=job_id)),
    "FolderService/FindMissingChunks": lambda world, job_id: iter(
        [folder_pb.FindMissingChunksRequest(tenant=_tenant(world, job_id), digests=[bytes(32)])]
    ),
    "FolderService/WriteChunks": lambda world, job_id: iter(
        [folder_pb.WriteChunksRequest(tenant=_tenant(world, job_id), chunks=[b"x"])]
    ),
    "FolderService/CommitFolder": lambda world, job_id: iter(
        [folder_pb.CommitFolderRequest(tenant=_tenant(world, job_id), pages=[bytes(32)])]
    ),
    "JobService/ExplainJob": once(lambda job_id: pb.ExplainJobRequest(id=job_id)),
    "JobService/SummarizeFailures": lambda world, job_id: iter(
        [
            *(pb.SummarizeFailuresRequest(by=by) for by in pb.FailureGroup.values()),
            pb.SummarizeFailuresRequest(tenant=_tenant(world, job_id)),
        ]
    ),
    "JobService/SummarizeUsage": lambda world, job_id: iter(
        [
            *(pb.SummarizeUsageRequest(by=by) for by in pb.UsageGroup.values()),
            pb.SummarizeUsageRequest(tenant=_tenant(world, job_id)),
        ]
    ),
    "JobService/SimulateJob": _simulating,
    "JobService/CancelJob": of_arrays(pb.CancelJobRequest),
    "JobService/SuspendJob": of_arrays(pb.SuspendJobRequest),
    "JobService/ResumeJob": of_arrays(pb.ResumeJobRequest),
    "JobService/UpdateJob": _updating,
    "JobService/MoveJob": once(lambda job_id: pb.MoveJobRequest(id=job_id, number=1)),
    "ArrayService/CreateArray": _creating_arrays,
    "ArrayService/GetArray": of_arrays(array_pb.GetArrayRequest),
    "ArrayService/ListArrays": _listing_arrays,
    "ArrayService/CancelArray": of_arrays(array_pb.CancelArrayRequest),
    "ArrayService/SuspendArray": of_arrays(array_pb.SuspendArrayRequest),
    "ArrayService/ResumeArray": of_arrays(array_pb.ResumeArrayRequest),
    "ScheduleService/CreateSchedule": _scheduling,
    "ScheduleService/GetSchedule": of_schedules(schedule_pb.GetScheduleRequest),
    "ScheduleService/ListSchedules": lambda world, job_id: iter([schedule_pb.ListSchedulesRequest()]),
    "ScheduleService/PauseSchedule": of_schedules(schedule_pb.PauseScheduleRequest),
    "ScheduleService/ResumeSchedule": of_schedules(schedule_pb.ResumeScheduleRequest),
    "ScheduleService/RunSchedule": of_schedules(schedule_pb.RunScheduleRequest),
    "ScheduleService/DeleteSchedule": of_schedules(schedule_pb.DeleteScheduleRequest),
    "SecretService/SetSecret": _setting_secrets,
    "SecretService/ListSecrets": _listing_secrets,
    "SecretService/DeleteSecret": _deleting_secrets,
    "TenantService/GetTenant": lambda world, job_id: iter([tenant_pb.GetTenantRequest(id=_tenant(world, job_id))]),
    "TenantService/ListTenants": lambda world, job_id: iter([tenant_pb.ListTenantsRequest()]),
    "TenantService/ListTenantUsage": lambda world, job_id: iter([tenant_pb.ListTenantUsageRequest(users=True)]),
    "TenantService/ListQueues": lambda world, job_id: iter([tenant_pb.ListQueuesRequest()]),
    "NodeService/GetNode": lambda world, job_id: iter([node_pb.GetNodeRequest(id="n1")]),
    "NodeService/ListNodes": lambda world, job_id: iter([node_pb.ListNodesRequest()]),
    "PredictorService/Estimate": _estimating,
    "AdviceService/PlanJobs": lambda world, job_id: iter([advice_pb.PlanJobsRequest(snapshot=job_id.encode())]),
    "PolicyService/ListPolicies": lambda world, job_id: iter([policy_pb.ListPoliciesRequest()]),
}
ABOUT_PROCESSES = {"ProcessService/GetProcess", "ProcessService/GetCaller"}  # of a process or the caller itself
STUBS: dict[str, tuple[str, Any]] = {
    "JobService": ("queue", job_service_pb2_grpc.JobServiceStub),
    "ScheduleService": ("queue", schedule_service_pb2_grpc.ScheduleServiceStub),
    "SecretService": ("queue", secret_service_pb2_grpc.SecretServiceStub),
    "ArrayService": ("queue", array_service_pb2_grpc.ArrayServiceStub),
    "FolderService": ("queue", folder_service_pb2_grpc.FolderServiceStub),
    "TenantService": ("queue", tenant_service_pb2_grpc.TenantServiceStub),
    "NodeService": ("placement", node_service_pb2_grpc.NodeServiceStub),
    "PredictorService": ("predictor", predictor_service_pb2_grpc.PredictorServiceStub),
    "AdviceService": ("predictor", advice_service_pb2_grpc.AdviceServiceStub),
    "PolicyService": ("queue", policy_service_pb2_grpc.PolicyServiceStub),
}


async def asked(world: World, caller: str, method: str, request: Message) -> str:
    """Return the whole answer to a request, as text."""
    service, name = method.split("/")
    process, stub = STUBS[service]
    call = getattr(stub(world.mesh.channels[f"{caller}/{process}"]), name)
    made_by = call(iter([request]) if isinstance(request, pb.OpenSessionRequest) else request, timeout=10)
    answer: list[str] = []
    try:
        if not hasattr(made_by, "__aiter__") or hasattr(made_by, "__await__"):
            answer.append(str(await made_by))
        else:
            async for response in made_by:
                answer.append(str(response))
                if getattr(response, "synced", False):
                    break
    except grpc.aio.AioRpcError as error:
        problem = errors.from_error(error)
        answer.append(f"{problem!r} {problem.metadata} {problem.violations}")
    finally:
        made_by.cancel()
    return "\n".join(answer)


def test_every_method_that_tenant_users_may_call_has_a_probe() -> None:
    """A new method needs a probe here, too."""
    may = {
        path.removeprefix("/cotenant.v1.") for caller in PEOPLE for path in ROLES if CALLERS[caller].scope(ROLES[path])
    }
    assert set(PROBES) | ABOUT_PROCESSES == may
    assert {path.removeprefix("/cotenant.v1.") for path in METHOD_RULES} >= may


async def test_no_method_reveals_another_tenant(world: World) -> None:
    await observe_losses(world)
    before = (await world.mesh.job(world.his)).etag
    for caller in PEOPLE:
        for method, probe in PROBES.items():
            pairs = zip(probe(world, world.his), probe(world, UNKNOWN_ID), strict=True)
            for about_his, about_unknown in pairs:
                sent = str(about_his)  # a name in the request is no secret
                for asked_again in range(ASKED_MAX):  # the state may change between two calls
                    answer, of_unknown = [await asked(world, caller, method, one) for one in (about_his, about_unknown)]
                    leaked = [secret for secret in world.secrets if secret in answer and secret not in sent]
                    assert not leaked, (caller, method, about_his, answer)
                    if _same(answer, of_unknown, world):
                        break
                    assert asked_again < ASKED_MAX - 1, (caller, method, about_his, answer, of_unknown)
    assert (await world.mesh.job(world.his)).etag == before  # and the job is unchanged


async def observe_losses(world: World) -> None:
    """Send losses of his job to the predictor, until it can predict the job's end."""
    stub: Any = predictor_service_pb2_grpc.PredictorServiceStub(world.mesh.channel("predictor"))
    wanted = spec(tenant="blue-team", model="bert", loss_goal=GOAL)
    seen = [
        observation_pb.Observation(
            job_id=world.his, number=1, spec=wanted, rate_per_second=2.0, window=duration(10.0), step=step,
            loss=2 / (1 + step / 1000) + 0.5, time=Timestamp(seconds=step),
            allocation=predictor_pb.CandidateAllocation(cores=4),
        )
        for step in range(20, 1200, 20)
    ]  # fmt: skip
    observer: Any = observation_service_pb2_grpc.ObservationServiceStub(world.mesh.channel("predictor"))
    await observer.Observe(observation_pb.ObserveRequest(observations=seen))
    query = predictor_pb.EstimateQuery(job_id=world.his, spec=wanted)
    (known,) = (await stub.Estimate(predictor_pb.EstimateRequest(queries=[query]))).estimates
    assert known.predictable


def _same(answer: str, of_unknown: str, world: World) -> bool:
    """Return whether two answers differ only in the requested id, and in times."""
    named = answer.replace("blue-team", "no-tenant").replace(HIS_TOKEN, UNKNOWN_TOKEN)
    for known in (world.his, world.array, world.schedule):
        named = named.replace(known, UNKNOWN_ID)
    return _timeless(named) == _timeless(of_unknown)


def _timeless(text: str) -> list[str]:
    text = re.sub(r"; did you mean [^?]*\?", "", text)  # it suggests the caller's own jobs
    kept = [line.strip() for line in text.splitlines()]
    return [line for line in kept if not line.startswith(("seconds:", "nanos:", "outlook:", "summary:"))]


async def test_the_only_tenant_of_a_caller_is_the_default(world: World) -> None:
    assert (await created(world.mesh, "ann", "")).spec.tenant == "a"
    request = predictor_pb.EstimateRequest(queries=[predictor_pb.EstimateQuery(spec=spec(model="bert"))])
    assert "NOT_YOUR_TENANT" not in await asked(world, "ann", "PredictorService/Estimate", request)


async def test_request_ids_are_separate_per_caller(world: World) -> None:
    """Another tenant's equal id is neither visible nor in conflict."""
    again = await made(world.mesh, "bob", "blue-team", request_id="nightly")
    assert again == world.his
    hers = await made(world.mesh, "ann", "a", request_id="nightly", name="hers")
    assert hers not in (world.his, world.hers)
    assert await made(world.mesh, "ann", "a", request_id="nightly", name="hers") == hers
    stub: Any = job_service_pb2_grpc.JobServiceStub(world.mesh.channels["ann/queue"])
    cancel = pb.CancelJobRequest(id=hers, request_id="weekly")
    for _ in range(2):
        await stub.CancelJob(cancel)
    assert set(await world.mesh.records_left("queue/requests/")) >= {
        "queue/requests/ann/nightly", "queue/requests/ann/weekly", "queue/requests/bob/nightly",
    }  # fmt: skip


@pytest.mark.parametrize("submitter", ["ann", "bob"])
@pytest.mark.parametrize("array", [False, True])
async def test_a_request_stored_without_a_caller_belongs_to_its_submitter(
    world: World, submitter: str, array: bool
) -> None:
    mesh, tenant = world.mesh, {"ann": "a", "bob": "blue-team"}[submitter]
    ranges = [job_pb2.IndexRange(first=0, last=1, step=1)]
    fields: dict[str, Any] = {"request_id": "older", "array": job_pb2.ArraySpec(ranges=ranges) if array else None}
    first = await made(mesh, submitter, tenant, **fields)
    kept = await mesh.store.get(f"queue/requests/{submitter}/older")
    assert kept
    moved: list[Operation] = [Delete(kept.key), Put("queue/requests/older", kept.value)]
    assert isinstance(await mesh.store.transact([], moved), Committed)
    assert await made(mesh, submitter, tenant, **fields) == first
    other, others = ("bob", "blue-team") if submitter == "ann" else ("ann", "a")
    theirs = await made(mesh, other, others, **fields)
    assert theirs != first
    assert await made(mesh, other, others, **fields) == theirs


async def test_the_preview_of_an_update_names_no_other_tenants_jobs(world: World) -> None:
    record = world.mesh.parts["queue"].service.state.records[world.hers]
    record.job.attempt.stop_detail = f"continues on n2, so that {world.his} can start"
    assert world.his in str(await world.mesh.job(world.hers))
    asks = next(_updating(world, world.hers))
    assert world.his not in await asked(world, "ann", "JobService/UpdateJob", asks)
