"""Calls for services that a process does not serve."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.etcd_server import free_ports
from tests.unit.rpc.conftest import JOBS, TOKEN, Jobs, Mesh, problem_of

from cotenant.codec import errors
from cotenant.core.model import limits
from cotenant.leadership.process_service import serve_process_service
from cotenant.rpc.channel import connect, secure
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.router import Router, import_public_services
from cotenant.rpc.server import Server
from cotenant.rpc.service_homes import EVERYWHERE, HOMES
from cotenant.security.audit import Audit
from cotenant.security.certificates import Authority
from cotenant.security.credentials import Credentials
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.identity import caller
from cotenant.security.limits import LimitRules, Limits
from cotenant.security.permissions import ROLES
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc
from cotenant.v1 import node_service_pb2_grpc as nodes_grpc
from cotenant.v1 import policy_service_pb2 as policies_pb
from cotenant.v1 import policy_service_pb2_grpc as policies_grpc
from cotenant.v1 import process_service_pb2 as replicas_pb
from cotenant.v1 import process_service_pb2_grpc as replicas_grpc

NODES = "cotenant.v1.NodeService"
GET = jobs_pb.GetJobRequest(id="j")


class Parts:
    """A queue, and placement processes that route to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.queue = Mesh(stack)
        self.stack = stack

    async def placement(self, endpoints: Endpoints, port: int = 0, **options: Any) -> str:
        """Start a process that serves nodes and routes the rest; return its address."""
        server = Server(**{"address": f"127.0.0.1:{port}", "token": TOKEN} | options)
        server.add(nodes_grpc.add_NodeServiceServicer_to_server, nodes_grpc.NodeServiceServicer(), NODES)  # type: ignore[abstract]  # the generated base answers the rest
        serve_policies(server).use("cotenant.placement_policies", "count")
        serve_process_service(server)
        server.route(endpoints)
        port = await server.start()
        self.stack.push_async_callback(server.stop, 0)
        return f"127.0.0.1:{port}"

    def to(self, address: str, token: str = TOKEN, **options: Any) -> Any:
        """Return a channel."""
        channel = connect(address, token, **options)
        self.stack.push_async_callback(channel.close)
        return channel

    def jobs(self, address: str, token: str = TOKEN, **options: Any) -> Any:
        return jobs_grpc.JobServiceStub(self.to(address, token, **options))


@pytest_asyncio.fixture
async def parts() -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        yield Parts(stack)


async def routed(parts: Parts, **options: Any) -> Any:
    """Return a stub of the queue's jobs at the address of placement."""
    await parts.queue.serve()
    return parts.jobs(await parts.placement(Endpoints(queue=parts.queue.address), **options))


def test_each_service_of_the_api_has_a_home() -> None:
    """A new service needs a line in `HOMES`."""
    assert HOMES.keys() | EVERYWHERE == {path.split("/")[1] for path in ROLES}


# Calls --------------------------------------------------------------------------------------------------------------


async def test_a_call_arrives_unchanged(parts: Parts) -> None:
    stub = await routed(parts)
    seen: dict[str, Any] = {}

    async def answer(request: Any, context: Any) -> None:
        seen.update(context.invocation_metadata(), left=context.time_remaining(), who=caller().name, request=request)
        context.set_trailing_metadata((("told", "so"),))

    parts.queue.jobs.answer = answer
    timeout = 29.5  # gRPC may round it up at each hop
    call = stub.GetJob(GET, timeout=timeout, metadata=(("own", "7"), ("own-bin", b"\x00\xff")))
    await call
    assert seen["request"] == GET
    assert (seen["own"], seen["own-bin"], seen["who"]) == ("7", b"\x00\xff", "operator")
    assert 20 < seen["left"] <= 30
    assert dict(await call.trailing_metadata())["told"] == "so"


async def test_unknown_fields_of_a_newer_client_survive(parts: Parts) -> None:
    """Bytes are relayed, not messages: the routing process may be older than the other two."""
    stub = await routed(parts)
    seen: list[bytes] = []

    async def answer(request: Any, context: Any) -> None:
        seen.append(request.SerializeToString())

    parts.queue.jobs.answer = answer
    newer = GET.SerializeToString() + b"\xfa\x3f\x03new"
    await stub.GetJob(jobs_pb.GetJobRequest.FromString(newer))
    assert seen == [newer]


async def test_the_status_of_a_routed_call_is_the_answering_services(parts: Parts) -> None:
    stub = await routed(parts)

    async def refuse(request: Any, context: Any) -> None:
        raise errors.not_found("job", request.id)

    parts.queue.jobs.answer = refuse
    problem = await problem_of(stub.GetJob(GET))
    assert (problem.code, problem.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
    assert problem.metadata == {"kind": "job", "id": "j"}

    async def away(request: Any, context: Any) -> None:
        raise errors.unavailable("the store is unavailable: x")

    parts.queue.jobs.answer = away
    assert (await problem_of(stub.GetJob(GET))).message == "the store is unavailable: x"


@pytest.mark.parametrize("name", ["GetJob", "WatchJobs"])
async def test_a_cancelled_call_is_cancelled_where_it_is_answered(parts: Parts, name: str) -> None:
    stub = await routed(parts)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    parts.queue.jobs.answer = hang
    call = getattr(stub, name)(getattr(jobs_pb, f"{name}Request")())
    reading = asyncio.ensure_future(_first(call))
    await asyncio.wait_for(begun.wait(), 10)
    call.cancel()
    await asyncio.wait_for(cancelled.wait(), 10)
    await asyncio.gather(reading, return_exceptions=True)


async def _first(call: Any) -> Any:
    if not hasattr(call, "read"):
        return await call
    return await call.read()


class Firehose(Jobs):
    """Sends large messages as fast as they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.stopped = asyncio.Event()

    async def WatchJobs(self, request: Any, context: Any) -> Any:
        try:
            for index in range(10_000):
                yield jobs_pb.WatchJobsResponse(jobs=[job_pb2.Job(id=f"{index}", etag="x" * 65_536)])
                self.sent = index + 1
        finally:
            self.stopped.set()


async def test_a_slow_reader_slows_down_the_answering_service_and_misses_nothing(parts: Parts) -> None:
    parts.queue.jobs = hose = Firehose()  # type: ignore[abstract]  # the generated base answers the rest
    stub = await routed(parts)
    call = stub.WatchJobs(jobs_pb.WatchJobsRequest())
    assert (await call.read()).jobs[0].id == "0"
    settled = -1
    while settled != hose.sent:  # until the windows on both connections are full
        settled = hose.sent
        await asyncio.sleep(0.3)
    assert hose.sent < 1_000, "65 MB are buffered somewhere"
    assert [(await call.read()).jobs[0].id for _ in range(500)] == [str(index) for index in range(1, 501)]
    call.cancel()
    await asyncio.wait_for(hose.stopped.wait(), 10)


async def test_a_stream_ends_with_the_service_that_answers(parts: Parts) -> None:
    server = await parts.queue.serve()
    stub = parts.jobs(await parts.placement(Endpoints(queue=parts.queue.address)))
    begun = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    parts.queue.jobs.answer = hang
    reading = asyncio.ensure_future(_first(stub.WatchJobs(jobs_pb.WatchJobsRequest())))
    await begun.wait()
    await server.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(reading, 10)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


# Endpoints ----------------------------------------------------------------------------------------------------------


async def test_a_service_without_an_address_is_named_with_the_option(parts: Parts) -> None:
    stub = parts.jobs(await parts.placement(Endpoints(predictor="127.0.0.1:1")))
    problem = await problem_of(stub.GetJob(GET))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_ADDRESS_UNKNOWN")
    assert "start it with --endpoints …,queue=HOST:PORT" in problem.message


async def test_a_service_that_is_down_is_named_with_its_address(parts: Parts) -> None:
    (port,) = free_ports(1)
    stub = parts.jobs(await parts.placement(Endpoints(queue=f"127.0.0.1:{port}")))
    problem = await problem_of(stub.GetJob(GET))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_UNREACHABLE")
    assert f"the queue service at 127.0.0.1:{port} cannot be reached" in problem.message


async def test_endpoints_in_a_circle_end_after_one_hop(parts: Parts) -> None:
    one, other = free_ports(2)
    for port, to in ((one, other), (other, one)):
        await parts.placement(Endpoints(queue=f"127.0.0.1:{to}"), port)
    begin = time.monotonic()
    problem = await problem_of(parts.jobs(f"127.0.0.1:{one}").GetJob(GET))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "MISROUTED")
    assert "this process (placement) does not serve cotenant.v1.JobService" in problem.message
    assert "wrong address for the queue service" in problem.message
    assert time.monotonic() - begin < 5


async def test_calls_are_spread_over_the_replicas_that_serve(parts: Parts) -> None:
    (port,) = free_ports(1)
    await parts.queue.serve()
    stub = parts.jobs(await parts.placement(Endpoints(queue=f"127.0.0.1:{port}|{parts.queue.address}")))
    for _ in range(5):
        await stub.GetJob(GET)
    assert len(parts.queue.jobs.asked) == 5


async def test_a_name_that_does_not_resolve_yet_is_resolved_by_a_later_call(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cotenant.rpc import channel, router

    known: list[str] = []

    async def relaying(endpoint: str, called: str = "") -> Any:
        if not known:
            raise channel.UnresolvedNames("queue.mesh: cannot resolve")
        return await channel.relaying_channel(known[0])

    monkeypatch.setattr(router, "relaying_channel", relaying)
    await parts.queue.serve()
    stub = parts.jobs(await parts.placement(Endpoints(queue="queue.mesh:7070|other.mesh:7070")))
    assert (await problem_of(stub.GetJob(GET))).reason == "SERVICE_UNREACHABLE"
    known.append(parts.queue.address)
    await stub.GetJob(GET)


# Checks at the entry ------------------------------------------------------------------------------------------------


async def test_roles_are_checked_before_a_call_is_routed(parts: Parts, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(Subject.parse("viewer/vic?tenants=*"))
    await parts.queue.serve()
    address = await parts.placement(
        Endpoints(queue=parts.queue.address), token=None, security=Security(Credentials("", file))
    )
    assert (await problem_of(parts.jobs(address, token).CreateJob(jobs_pb.CreateJobRequest()))).reason == "ROLE_MAY_NOT"
    assert (await problem_of(parts.jobs(address, "wrong").GetJob(GET))).code is grpc.StatusCode.UNAUTHENTICATED
    assert parts.queue.jobs.asked == []


async def test_limits_hold_for_routed_calls(parts: Parts, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(Subject.parse("user/eve?tenants=lab"))
    rules = LimitRules(calls_per_second=0.01, calls_at_once=2)
    await parts.queue.serve(token=None, security=Security(Credentials("", file)))
    address = await parts.placement(
        Endpoints(queue=parts.queue.address), token=None, security=Security(Credentials("", file), limits=Limits(rules))
    )
    stub = parts.jobs(address, token)
    large = jobs_pb.GetJobRequest(id="x" * limits.REQUEST_BYTES_MAX)
    assert "id: has 65,540 bytes" in (await problem_of(stub.GetJob(large))).message
    await stub.GetJob(GET)
    assert (await problem_of(stub.GetJob(GET))).reason == "TOO_MANY_CALLS"
    assert len(parts.queue.jobs.asked) == 1


async def test_a_certificates_holder_is_the_caller_at_the_answering_service(parts: Parts, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certs")
    authority.create()

    def files(subject: str, *names: str) -> TlsFiles:
        issued = authority.issue(Subject.parse(subject), names)
        return TlsFiles(authority.cert_path, issued.path, issued.key_path)

    shown, told = files("service/mesh", "127.0.0.1"), tmp_path / "audit"
    secure(shown)
    try:
        seen: list[tuple[str, str]] = []

        async def answer(request: Any, context: Any) -> None:
            seen.append((caller().name, caller().via))

        parts.queue.jobs.answer = answer
        tls = WatchedTlsFiles(shown)
        await parts.queue.serve(
            token=None, security=Security(Credentials(), tls=tls, audit=Audit(told / "queue.jsonl", "queue"))
        )
        entry = Audit(told / "placement.jsonl", "placement")
        address = await parts.placement(
            Endpoints(queue=parts.queue.address), token=None, security=Security(Credentials(), tls=tls, audit=entry)
        )
        eve = parts.jobs(address, "", tls=files("user/eve?tenants=lab"))
        await eve.CreateJob(jobs_pb.CreateJobRequest())
    finally:
        secure(None)
    assert seen == [("eve", "service/mesh")]
    lines = {path.stem: json.loads(path.read_text()) for path in told.iterdir() if path.suffix == ".jsonl"}
    assert {line["call"] for line in lines.values()} == {lines["queue"]["call"]}
    assert lines["placement"]["forwarded"] == parts.queue.address
    assert "forwarded" not in lines["queue"]
    assert [(line["who"], line["what"], line["answer"]) for line in lines.values()] == [("eve", "CreateJob", "OK")] * 2


# What a process tells -----------------------------------------------------------------------------------------------


async def test_reflection_lists_routed_services_and_health_only_own_ones(parts: Parts) -> None:
    await parts.queue.serve()
    channel = parts.to(await parts.placement(Endpoints(queue=parts.queue.address)))
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest
    call = stub.ServerReflectionInfo(
        iter([asked(list_services=""), asked(file_containing_symbol="cotenant.v1.JobService")])
    )
    listed, described = [answer async for answer in call]
    names = {one.name for one in listed.list_services_response.service}
    assert {JOBS, NODES, "cotenant.v1.TenantService"} <= names
    assert not {"cotenant.v1.ContentionService", "cotenant.agent.v1.AgentService"} & names
    assert described.file_descriptor_response.file_descriptor_proto
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(service=NODES))).status
    problem = await problem_of(health.Check(health_pb2.HealthCheckRequest(service=JOBS)))
    assert problem.code is grpc.StatusCode.NOT_FOUND


async def test_a_caller_chooses_the_process_that_describes_itself(parts: Parts) -> None:
    queue = Server(token=TOKEN)
    queue.add(jobs_grpc.add_JobServiceServicer_to_server, Jobs(), JOBS)  # type: ignore[abstract]  # the generated base answers the rest
    serve_policies(queue).use("cotenant.queue_policies", "fifo")
    serve_process_service(queue)
    port = await queue.start()
    parts.stack.push_async_callback(queue.stop, 0)
    reached = f"127.0.0.1:{port}"
    own = free_ports(1)[0]
    entry = parts.to(await parts.placement(Endpoints(queue=reached, placement=f"127.0.0.1:{own}"), own))

    async def groups(channel: Any) -> set[str]:
        stub = policies_grpc.PolicyServiceStub(channel)
        return {one.group for one in (await stub.ListPolicies(policies_pb.ListPoliciesRequest())).policies}

    placed, queued = {"cotenant.placement_policies"}, {"cotenant.queue_policies"}
    assert [await groups(one) for one in (entry, entry.to("placement"), entry.to("queue"), entry.to(reached))] == [
        placed,
        placed,
        queued,
        queued,
    ]
    stub: Any = replicas_grpc.ProcessServiceStub(entry)
    listed = await stub.GetProcess(replicas_pb.GetProcessRequest())
    assert list(listed.process.services) == ["placement"]
    assert [(one.service, one.address) for one in listed.endpoints] == [
        ("queue", reached),
        ("placement", f"127.0.0.1:{own}"),
    ]
    ids = []
    for to in (f"127.0.0.1:{own}", reached):
        other: Any = replicas_grpc.ProcessServiceStub(entry.to(to))
        ids.append((await other.GetProcess(replicas_pb.GetProcessRequest())).process.id)
    assert ids[0] == listed.process.id != ids[1]


async def test_a_process_calls_no_strangers(parts: Parts) -> None:
    (port,) = free_ports(1)
    entry = parts.to(await parts.placement(Endpoints(queue=f"127.0.0.1:{port}")))
    stub: Any = policies_grpc.PolicyServiceStub(entry.to("127.0.0.1:1"))
    problem = await problem_of(stub.ListPolicies(policies_pb.ListPoliciesRequest()))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.violations[0].field == "cotenant-to"


async def test_private_calls_are_not_routed(parts: Parts) -> None:
    await parts.queue.serve()
    address = await parts.placement(Endpoints.one(parts.queue.address))
    call = parts.to(address)._inner.unary_unary("/cotenant.internal.v1.ObservationService/Observe")
    problem = await problem_of(call(b"", metadata=(("authorization", f"Bearer {TOKEN}"),)))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED_HERE")
    assert "is served by predictor" in problem.message


def test_a_router_finds_the_methods_of_all_public_services() -> None:
    import_public_services()
    router = Router(Endpoints.one("a:1"))
    for path in ROLES:
        handler = router.handler(path, (), None)
        assert (handler is not None) == (path.startswith("/cotenant.v1.") and path.split("/")[1] not in EVERYWHERE)
