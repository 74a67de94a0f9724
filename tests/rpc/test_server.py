from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.rpc.conftest import JOBS, TOKEN, Mesh

from cotenant.rpc import errors, identity
from cotenant.rpc.channel import connect
from cotenant.rpc.errors import Problem, Violation
from cotenant.rpc.server import CannotListen, Server
from cotenant.store.port import StoreUnavailable
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc
from cotenant.v1 import node_service_pb2 as nodes_pb

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def problem_of(call: Any) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return errors.from_error(failed.value)


async def consume(stream: Any) -> None:
    async for _ in stream:
        pass


async def calls_of_every_kind(mesh: Mesh, token: str) -> list[Problem]:
    """Make a call of each of gRPC's four kinds; those that ask with a stream send nothing before they are answered."""
    jobs, agents = mesh.job_stub(token), mesh.agent_stub(token)
    upload = agents.UploadOutput()
    return [
        await problem_of(jobs.GetJob(jobs_pb.GetJobRequest(id="a"))),
        await problem_of(consume(jobs.WatchJobs(jobs_pb.WatchJobsRequest()))),
        await problem_of(consume(agents.Connect())),
        await problem_of(upload),
    ]


@pytest.mark.parametrize(
    ("token", "reason"),
    [("", "TOKEN_MISSING"), ("wrong", "TOKEN_WRONG"), (TOKEN + "x", "TOKEN_WRONG"), (TOKEN[:-1], "TOKEN_WRONG")],
)
async def test_nobody_is_served_without_the_token(mesh: Mesh, token: str, reason: str) -> None:
    await mesh.serve()
    for problem in await calls_of_every_kind(mesh, token):
        assert (problem.code, problem.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        assert "COTENANT_TOKEN" in problem.message
    assert mesh.jobs.asked == []


async def test_another_scheme_is_no_token(mesh: Mesh) -> None:
    await mesh.serve()
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Digest {TOKEN}"),))
    assert (await problem_of(call)).reason == "TOKEN_WRONG"


async def test_an_empty_token_is_no_lock() -> None:
    with pytest.raises(ValueError, match="empty token"):
        Server(token="")


async def test_who_calls_is_known_in_every_kind_of_servicer(mesh: Mesh) -> None:
    await mesh.serve()
    seen: list[identity.Identity] = []

    async def look(request: Any, context: Any) -> None:
        seen.append(identity.caller())

    mesh.jobs.answer = mesh.agents.answer = look
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    await consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest()))
    await consume(mesh.agent_stub().Connect(iter([nodes_pb.ConnectRequest()])))
    await mesh.agent_stub().UploadOutput(iter([nodes_pb.UploadOutputRequest()]))
    assert seen == [identity.OPERATOR] * 4
    assert identity.caller() == identity.ANYONE


async def test_another_authenticator_sees_the_method_and_decides(mesh: Mesh) -> None:
    class ReadOnly:
        def authenticate(self, method: str, metadata: identity.Metadata, peer: identity.Peer) -> identity.Identity:
            if "/Get" in method:
                return identity.Identity("reader")
            raise Problem(grpc.StatusCode.PERMISSION_DENIED, "READ_ONLY", f"{method} is not for readers")

    await mesh.serve(authenticator=ReadOnly())
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    problem = await problem_of(mesh.job_stub().CreateJob(jobs_pb.CreateJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.PERMISSION_DENIED, "READ_ONLY")


async def test_a_problem_reaches_the_caller_whole_from_every_kind_of_call(mesh: Mesh) -> None:
    await mesh.serve()
    told = Problem(
        grpc.StatusCode.FAILED_PRECONDITION,
        "NODE_DRAINING",
        "the node is being drained – wait",
        metadata={"node": "n1"},
        violations=[Violation("spec.name", "is too long")],
        retry_after_seconds=1.5,
    )

    async def fail(request: Any, context: Any) -> None:
        raise told

    mesh.jobs.answer = mesh.agents.answer = fail
    upload = mesh.agent_stub().UploadOutput(iter([nodes_pb.UploadOutputRequest()]))
    for problem in [
        await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest())),
        await problem_of(consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest()))),
        await problem_of(consume(mesh.agent_stub().Connect(iter([nodes_pb.ConnectRequest()])))),
        await problem_of(upload),
    ]:
        assert vars(problem) == vars(told)


async def test_a_thousand_violations_do_not_burst_the_trailers(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise errors.invalid([Violation(f"spec.roles[{index}].name", "π is no name") for index in range(1000)])

    mesh.jobs.answer = fail
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.violations[0] == Violation("spec.roles[0].name", "π is no name")
    assert "more" in problem.violations[-1].description


async def test_a_store_that_is_away_asks_for_patience(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise StoreUnavailable("no quorum")

    mesh.jobs.answer = fail
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert problem.retry_after_seconds is not None


async def test_a_surprise_is_logged_once_with_its_story_and_told_by_number_only(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise LookupError("a secret of the inside")

    mesh.jobs.answer = fail
    with structlog.testing.capture_logs() as lines:
        problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in problem.message
    (line,) = lines
    assert line["event"] == "call_failed"
    assert line["method"] == f"/{JOBS}/GetJob"
    assert line["incident"] == problem.metadata["incident"]
    assert line["incident"] in problem.message
    assert str(line["exc_info"]) == "a secret of the inside"


async def test_a_servicer_may_abort_in_its_own_words(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    mesh.jobs.answer = fail
    with structlog.testing.capture_logs() as lines:
        for call in (
            mesh.job_stub().GetJob(jobs_pb.GetJobRequest()),
            consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest())),
        ):
            problem = await problem_of(call)
            assert (problem.code, problem.message) == (grpc.StatusCode.DATA_LOSS, "gone")
    assert lines == []


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_failure_further_down_is_not_the_callers(
    mesh: Mesh, inner: grpc.StatusCode, outer: grpc.StatusCode
) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise grpc.aio.AioRpcError(inner, grpc.aio.Metadata(), grpc.aio.Metadata(), details="below")

    mesh.jobs.answer = fail
    assert (await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))).code is outer


async def test_a_call_without_a_deadline_gets_the_servers(mesh: Mesh) -> None:
    await mesh.serve(deadline_seconds_default=0.05)
    cancelled = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    mesh.jobs.answer = hang
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
    problem = await problem_of(call)
    assert (problem.code, problem.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert "0.05 s" in problem.message
    assert cancelled.is_set()


async def test_a_servicers_own_time_out_is_not_taken_for_the_calls(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise TimeoutError

    mesh.jobs.answer = fail
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
    assert (await problem_of(call)).code is grpc.StatusCode.INTERNAL


async def test_a_servicer_is_cancelled_when_its_caller_gives_up(mesh: Mesh) -> None:
    await mesh.serve()
    cancelled = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    mesh.jobs.answer = hang
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest(), timeout=0.1))
    assert problem.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_message_over_the_limit_is_refused_with_both_sizes(mesh: Mesh) -> None:
    await mesh.serve(message_bytes_max=10_000)
    request = jobs_pb.CreateJobRequest()
    request.spec.name = "x" * 20_000
    problem = await problem_of(mesh.job_stub().CreateJob(request))
    assert (problem.code, problem.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert "10000 bytes" in problem.message
    assert mesh.jobs.asked == []
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())


async def test_calls_beyond_the_limit_are_refused_and_the_others_go_on(mesh: Mesh) -> None:
    await mesh.serve(calls_max=1)
    begun, finish = asyncio.Event(), asyncio.Event()

    async def work(request: Any, context: Any) -> None:
        begun.set()
        await finish.wait()

    mesh.jobs.answer = work
    stub = mesh.job_stub()
    first = asyncio.ensure_future(_awaited(stub.GetJob(jobs_pb.GetJobRequest())))
    await begun.wait()
    assert (await problem_of(stub.GetJob(jobs_pb.GetJobRequest()))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    finish.set()
    assert await first == jobs_pb.GetJobResponse()


async def test_a_method_that_a_servicer_leaves_to_its_base_is_not_implemented(mesh: Mesh) -> None:
    await mesh.serve()
    problem = await problem_of(mesh.job_stub().CancelJob(jobs_pb.CancelJobRequest()))
    assert problem.code is grpc.StatusCode.UNIMPLEMENTED
    assert "CancelJob" in problem.message


async def test_a_port_in_use_is_one_clear_error(mesh: Mesh) -> None:
    await mesh.serve()
    with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{mesh.port}: address already in use"):
        await Server(mesh.address).start()


@pytest.mark.parametrize("address", ["192.0.2.1:0", "127.0.0.1:99999", "nowhere.invalid:0", "7070"])
async def test_an_address_that_cannot_be_had_is_one_clear_error(address: str) -> None:
    with pytest.raises(CannotListen, match="cannot listen on"):
        await Server(address).start()


async def health_of(stub: Any, service: str = "") -> Any:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_is_told_without_a_token_for_each_service_and_for_all(mesh: Mesh) -> None:
    server = await mesh.serve()
    stub = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(mesh.address))
    assert await health_of(stub) == await health_of(stub, JOBS) == SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=JOBS))
    assert (await watch.read()).status == SERVING

    server.set_serving(JOBS, False)
    assert (await watch.read()).status == NOT_SERVING
    assert await health_of(stub) == await health_of(stub, JOBS) == NOT_SERVING
    assert await health_of(stub, "cotenant.v1.AgentService") == SERVING

    server.set_serving(JOBS, True)
    assert (await watch.read()).status == SERVING
    assert await health_of(stub) == SERVING
    watch.cancel()


async def test_a_service_can_start_as_not_serving(mesh: Mesh) -> None:
    server = Server()
    server.add(jobs_grpc.add_JobServiceServicer_to_server, mesh.jobs, JOBS)
    server.set_serving(JOBS, False)
    mesh.port = await server.start()
    stub = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(mesh.address))
    assert await health_of(stub) == await health_of(stub, JOBS) == NOT_SERVING
    await server.stop(0)


async def test_the_health_of_an_unknown_service_is_a_mistake(mesh: Mesh) -> None:
    server = await mesh.serve()
    with pytest.raises(KeyError, match=r"is not served here; cotenant\.v1\.JobService"):
        server.set_serving("cotenant.v1.JobServise", True)


async def test_services_are_told_by_reflection_to_who_has_the_token(mesh: Mesh) -> None:
    await mesh.serve()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel())
    (answer,) = [response async for response in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {JOBS, "cotenant.v1.AgentService", "grpc.health.v1.Health"} <= names

    unknown = reflection_pb2_grpc.ServerReflectionStub(mesh.channel(token=""))
    problem = await problem_of(consume(unknown.ServerReflectionInfo(iter([request]))))
    assert problem.reason == "TOKEN_MISSING"


async def test_calls_under_way_are_finished_and_new_ones_refused_while_stopping(mesh: Mesh) -> None:
    server = await mesh.serve()
    begun, finish = asyncio.Event(), asyncio.Event()

    async def work(request: Any, context: Any) -> None:
        begun.set()
        await finish.wait()

    mesh.jobs.answer = work
    call = mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    pending = asyncio.ensure_future(_awaited(call))
    await begun.wait()
    stopping = asyncio.ensure_future(server.stop(30))
    watcher = connect(mesh.address, TOKEN)
    while (await _refused_or_none(watcher)) is None:
        pass
    finish.set()
    assert await pending == jobs_pb.GetJobResponse()
    await stopping
    await watcher.close()


async def _awaited(call: Any) -> Any:
    return await call


async def _refused_or_none(channel: Any) -> Problem | None:
    """Try to reach the server's health; tell how that failed."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        return errors.from_error(error)
    return None


async def test_streams_that_never_end_are_cut_off_after_the_grace(mesh: Mesh) -> None:
    server = await mesh.serve()
    begun = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    mesh.jobs.answer = hang
    watching = asyncio.ensure_future(problem_of(consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest()))))
    await begun.wait()
    await server.stop(0.01)
    assert (await watching).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_nothing_can_be_added_to_a_server_that_runs(mesh: Mesh) -> None:
    server = await mesh.serve()
    with pytest.raises(RuntimeError, match="before the server starts"):
        server.add(jobs_grpc.add_JobServiceServicer_to_server, mesh.jobs, JOBS)


async def test_stopping_what_never_ran_is_no_error() -> None:
    await Server().stop(0)


def test_a_free_port_is_asked_for_by_zero() -> None:
    async def bound() -> int:
        server = Server()
        port = await server.start()
        with socket.create_connection(("127.0.0.1", port)):
            await server.stop(0)
        return port

    assert asyncio.run(bound()) > 0


def test_a_token_is_never_part_of_what_is_shown() -> None:
    assert TOKEN not in json.dumps(repr(vars(Server(token=TOKEN))))


def test_grpc_writes_no_lines_of_its_own_among_ours() -> None:
    code = """
import asyncio
from cotenant.rpc.channel import connect
from cotenant.rpc.server import CannotListen, Server

async def main():
    server = Server()
    port = await server.start()
    try:
        await Server(f"127.0.0.1:{port}").start()
    except CannotListen as error:
        print(error)
    channel = connect(f"127.0.0.1:{port}")
    await channel.channel_ready()
    await server.stop(0)
    await channel.close()

asyncio.run(main())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "address already in use" in done.stdout
    assert done.stderr == ""
