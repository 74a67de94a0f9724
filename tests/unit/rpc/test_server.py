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
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from tests.unit.rpc.conftest import JOBS, TOKEN, Mesh, consume, nothing, problem_of

from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.rpc import restartable_server
from cotenant.rpc.channel import connect
from cotenant.rpc.server import CannotListen, Server
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_message_over_the_limit_is_refused_with_both_sizes(mesh: Mesh) -> None:
    await mesh.serve(message_bytes_max=10_000)
    request = jobs_pb.CreateJobRequest()
    request.spec.name = "x" * 20_000
    problem = await problem_of(mesh.job_stub().CreateJob(request))
    assert (problem.code, problem.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert "the request has 20,042 bytes; the server reads at most 10,000 bytes" in problem.message
    assert mesh.jobs.asked == []
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())


async def test_calls_beyond_the_limit_are_rejected_and_the_others_continue(mesh: Mesh) -> None:
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


async def test_a_port_in_use_is_one_clear_error(mesh: Mesh) -> None:
    await mesh.serve()
    with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{mesh.port}: address already in use"):
        await Server(mesh.address).start()


@pytest.mark.parametrize("address", ["192.0.2.1:0", "127.0.0.1:99999", "nowhere.invalid:0", "7070"])
async def test_an_unusable_address_is_one_clear_error(address: str) -> None:
    with pytest.raises(CannotListen, match="cannot listen on"):
        await Server(address).start()


async def health_of(stub: Any, service: str = "") -> Any:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_needs_no_token_for_each_service_and_for_all(mesh: Mesh) -> None:
    server = await mesh.serve()
    stub = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(mesh.address))
    assert await health_of(stub) == await health_of(stub, JOBS) == SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=JOBS))
    assert (await watch.read()).status == SERVING

    server.set_serving(JOBS, False)
    assert (await watch.read()).status == NOT_SERVING
    assert await health_of(stub) == await health_of(stub, JOBS) == NOT_SERVING
    assert await health_of(stub, "cotenant.agent.v1.AgentService") == SERVING

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
    with pytest.raises(KeyError, match=r"this server has cotenant\.v1\.JobService"):
        server.set_serving("cotenant.v1.JobServise", True)


async def test_reflection_lists_services_to_callers_with_the_token(mesh: Mesh) -> None:
    await mesh.serve()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel())
    (answer,) = [response async for response in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {JOBS, "cotenant.agent.v1.AgentService", "grpc.health.v1.Health"} <= names

    unknown = reflection_pb2_grpc.ServerReflectionStub(mesh.channel(token=""))
    problem = await problem_of(consume(unknown.ServerReflectionInfo(iter([request]))))
    assert problem.reason == "TOKEN_MISSING"


async def test_calls_in_progress_finish_and_new_ones_are_rejected_while_stopping(mesh: Mesh) -> None:
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
    """Check the server's health; return how that failed."""
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


async def test_services_cannot_be_added_to_a_running_server(mesh: Mesh) -> None:
    server = await mesh.serve()
    with pytest.raises(RuntimeError, match="before the server starts"):
        server.add(jobs_grpc.add_JobServiceServicer_to_server, mesh.jobs, JOBS)


async def test_stopping_a_server_that_never_started_is_no_error() -> None:
    await Server().stop(0)


def test_port_zero_selects_a_free_port() -> None:
    async def bound() -> int:
        server = Server()
        port = await server.start()
        with socket.create_connection(("127.0.0.1", port)):
            await server.stop(0)
        return port

    assert asyncio.run(bound()) > 0


def test_a_token_is_never_shown() -> None:
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


def _framed(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _call_of(path: bytes) -> bytes:
    """Return what a client sends for a call, up to an empty message."""
    fields = ((b":path", path), (b":authority", b"x:1"), (b"te", b"trailers"), (b"content-type", b"application/grpc"))
    headers = b"\x83\x86" + b"".join(bytes([0, len(name)]) + name + bytes([len(text)]) + text for name, text in fields)
    frames = _framed(4, 0, 0), _framed(1, 4, 1, headers), _framed(0, 1, 1, bytes(5))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames)


def test_private_methods_of_grpcio_are_tested_with_this_version() -> None:
    version = ".".join(grpc.__version__.split(".")[:2])
    assert version in restartable_server.TESTED_VERSIONS, (
        f"grpcio {version} is new here: see whether its aio server still ends at a path that is no text, run the tests "
        f"of bad paths, and add it to TRIED of cotenant.rpc.restartable_server, or take that module away"
    )
    assert not [name for name in restartable_server.PRIVATE_METHODS if not hasattr(restartable_server._PLAIN, name)]


async def test_a_grpcio_without_the_private_methods_serves_unchanged(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restartable_server, "PRIVATE_METHODS", ("_something_else",))
    with capture_logs() as logs:
        await mesh.serve()
    assert [(line["event"], line["missing"]) for line in logs if line["log_level"] == "warning"] == [
        ("server_not_restartable", ["_something_else"])
    ]
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())


async def test_a_path_that_is_not_utf8_stops_no_server(mesh: Mesh) -> None:
    """gRPC's server stops because of it; another one replaces it on the same port, and calls work."""
    server = await mesh.serve()
    stub = mesh.job_stub()
    await stub.GetJob(jobs_pb.GetJobRequest())
    waiting = asyncio.Event()

    async def wait(request: Any, context: Any) -> None:
        waiting.set()
        await asyncio.Event().wait()

    for _ in range(5):
        mesh.jobs.answer = wait
        under_way = asyncio.ensure_future(consume(stub.WatchJobs(jobs_pb.WatchJobsRequest())))
        await waiting.wait()
        waiting.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
        writer.write(_call_of(b"/a\x88/b"))
        with pytest.raises(grpc.aio.AioRpcError):  # as at a restart
            await under_way
        writer.transport.abort()
        mesh.jobs.answer = nothing
        await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)
    await server.stop(0)
    await server.wait()
