from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs
from tests.support.paths import ROOT
from tests.unit.rpc.conftest import JOBS, TOKEN, Mesh, problem_of

from cotenant.codec import errors
from cotenant.codec.method_rules import DEADLINE_SECONDS_DEFAULT
from cotenant.codec.method_table import METHOD_RULES
from cotenant.internal.v1 import observation_service_pb2 as observation_pb
from cotenant.rpc import channel, server
from cotenant.rpc.channel import ATTEMPTS_MAX, connect, replicas_of
from cotenant.rpc.endpoints import SERVICES, Endpoints
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc


def test_only_repeatable_methods_are_retried() -> None:
    of_folders = ("FindMissingChunks", "WriteChunks", "CommitFolder")  # known by their content
    harmless = (
        *("StopAttempts", "ForgetAttempts", "AdviseAttempts", "ResizeReplicas"),  # repeating them changes nothing
        *("PauseSchedule", "ResumeSchedule", "SetSecret", "ReadSecrets", "PlanJobs"),
        *of_folders,
    )
    reads = ("Get", "List", "Summarize", "Explain", "Simulate", "Forecast", "Estimate", "PlanProfile")
    for path, method in METHOD_RULES.items():
        is_read = path.rpartition("/")[2].startswith(reads)
        assert method.retried or not is_read, path
        assert is_read or method.has_request_id or path.endswith(harmless) or not method.retried, path


def failing(times: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> tuple[Any, list[Any]]:
    """Return a behavior that fails so many times, and the requests that it has seen."""
    seen: list[Any] = []

    async def answer(request: Any, context: Any) -> None:
        seen.append(request)
        if len(seen) <= times:
            raise errors.Problem(code, "NOT_NOW", "not now")

    return answer, seen


async def test_a_read_is_retried_until_it_is_answered(mesh: Mesh) -> None:
    await mesh.serve()
    mesh.jobs.answer, seen = failing(ATTEMPTS_MAX - 1)
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest(id="a"))
    assert len(seen) == ATTEMPTS_MAX


async def test_retries_end(mesh: Mesh) -> None:
    await mesh.serve()
    mesh.jobs.answer, seen = failing(100)
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest(id="a")))
    assert problem.reason == "NOT_NOW"
    assert len(seen) == ATTEMPTS_MAX


async def test_nothing_but_unavailable_is_retried(mesh: Mesh) -> None:
    await mesh.serve()
    mesh.jobs.answer, seen = failing(1, grpc.StatusCode.ABORTED)
    await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest(id="a")))
    assert len(seen) == 1


async def test_a_method_that_would_count_twice_is_not_retried(mesh: Mesh) -> None:
    await mesh.serve()
    mesh.predictor.answer, seen = failing(1)
    await problem_of(mesh.predictor_stub().Observe(observation_pb.ObserveRequest()))
    assert len(seen) == 1


async def test_a_retried_write_has_one_request_id_even_if_the_caller_set_none(mesh: Mesh) -> None:
    await mesh.serve()
    mesh.jobs.answer, seen = failing(2)
    request = jobs_pb.CreateJobRequest()
    stub = mesh.job_stub()
    await stub.CreateJob(request)
    assert len({one.request_id for one in seen}) == 1
    assert len(seen) == 3

    await stub.CreateJob(request)  # a second submission of the same message is another job
    assert request.request_id == ""
    assert len({one.request_id for one in seen}) == 2
    assert "" not in {one.request_id for one in seen}


async def test_the_callers_own_request_id_is_kept(mesh: Mesh) -> None:
    await mesh.serve()
    await mesh.job_stub().CreateJob(jobs_pb.CreateJobRequest(request_id="mine"))
    assert [one.request_id for one in mesh.jobs.asked] == ["mine"]


async def test_each_call_has_a_deadline_of_the_table_or_the_callers(mesh: Mesh) -> None:
    await mesh.serve()
    left: list[float | None] = []

    async def look(request: Any, context: Any) -> None:
        left.append(context.time_remaining())

    mesh.jobs.answer = look
    stub = mesh.job_stub()
    await stub.GetJob(jobs_pb.GetJobRequest())
    await stub.SimulateJob(jobs_pb.SimulateJobRequest())
    await stub.GetJob(jobs_pb.GetJobRequest(), timeout=100)
    async for _ in stub.WatchJobs(jobs_pb.WatchJobsRequest()):
        pass
    assert [round(seconds, -1) for seconds in left[:3] if seconds is not None] == [
        DEADLINE_SECONDS_DEFAULT,
        METHOD_RULES[f"/{JOBS}/SimulateJob"].deadline_seconds,
        100,
    ]
    assert left[3] is None  # a stream lasts until its caller leaves


async def test_the_callers_metadata_goes_along_with_the_token(mesh: Mesh) -> None:
    await mesh.serve()
    seen: list[dict[str, str]] = []

    async def look(request: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))

    mesh.jobs.answer = look
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest(), metadata=(("x-mine", "1"),))
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest(), metadata=grpc.aio.Metadata(("x-mine", "2")))
    assert [one["x-mine"] for one in seen] == ["1", "2"]
    assert all(one["authorization"] == f"Bearer {TOKEN}" for one in seen)


async def test_a_channel_finds_its_server_again_after_a_restart(mesh: Mesh) -> None:
    server = await mesh.serve()
    stub = mesh.job_stub()
    await stub.GetJob(jobs_pb.GetJobRequest())
    await server.stop(0)
    await mesh.serve()
    await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)


async def test_an_unreachable_server_is_reported_soon(mesh: Mesh) -> None:
    server = await mesh.serve()
    await server.stop(0)
    start = time.monotonic()
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert time.monotonic() - start < DEADLINE_SECONDS_DEFAULT / 2
    assert problem.code is grpc.StatusCode.UNAVAILABLE
    assert "cannot be reached" in problem.message
    assert mesh.address in problem.message


async def test_the_environments_proxy_is_not_used(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await mesh.serve()
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())


async def test_calls_go_to_addresses_that_serve(mesh: Mesh) -> None:
    idle = Mesh(mesh._stack)
    (await idle.serve()).set_serving(JOBS, False)
    await mesh.serve()
    both = f"ipv4:{idle.address},{mesh.address}"
    async with connect(both, TOKEN, health_service=JOBS) as balanced:
        stub = jobs_grpc.JobServiceStub(balanced)
        for _ in range(4):
            await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)
    assert (len(idle.jobs.asked), len(mesh.jobs.asked)) == (0, 4)


async def test_calls_spread_over_all_addresses(mesh: Mesh) -> None:
    other = Mesh(mesh._stack)
    await other.serve()
    await mesh.serve()
    async with connect(f"ipv4:{other.address},{mesh.address}", TOKEN, health_service=JOBS) as balanced:
        stub = jobs_grpc.JobServiceStub(balanced)
        while not (mesh.jobs.asked and other.jobs.asked):
            await stub.GetJob(jobs_pb.GetJobRequest())


async def test_a_channel_reports_its_state(mesh: Mesh) -> None:
    await mesh.serve()
    async with connect(mesh.address) as opened:
        await opened.channel_ready()
        assert opened.get_state() is grpc.ChannelConnectivity.READY
    assert opened.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_an_endpoint_is_needed() -> None:
    with pytest.raises(ValueError, match="endpoint"):
        connect("")


def test_a_token_with_invalid_characters_is_rejected_at_once() -> None:
    for token in ("tökén", "a\nb"):
        with pytest.raises(ValueError, match="invalid characters"):
            connect("127.0.0.1:1", token)


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("127.0.0.1:7070", Endpoints.one("127.0.0.1:7070")),
        ("[::1]:7070", Endpoints.one("[::1]:7070")),
        ("queue=a:1", Endpoints(queue="a:1")),
        (" queue = a:1 , contention=[::1]:2 ", Endpoints(queue="a:1", contention="[::1]:2")),
    ],
)
def test_an_endpoint_is_one_address_or_one_for_each_service(text: str, endpoints: Endpoints) -> None:
    assert Endpoints.parse(text) == endpoints


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid address ''"),
        ("host", "invalid address 'host'"),
        ("host:port", "invalid address 'host:port'"),
        ("host:65536", "with a port up to 65535"),
        ("queue=a:1,b:2", "unknown service 'b:2'|invalid address ''"),
        ("qeue=a:1", "unknown service 'qeue'; the services are queue, placement"),
        ("queue=a:1,", "invalid address"),
    ],
)
def test_an_endpoint_that_cannot_be_read_is_quoted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Endpoints.parse(text)


def test_the_services_are_those_of_the_endpoints() -> None:
    assert Endpoints._fields == SERVICES


# Names ---------------------------------------------------------------------------------------------------------------


async def test_names_in_a_list_are_looked_up_again(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a service was restarted on another machine under its name."""
    server = await mesh.serve(address="127.0.0.2:0")
    stands_for = {"a.mesh": "127.0.0.2", "b.mesh": "127.0.0.3"}  # nothing listens at the second

    def found(host: str, port: int, family: int, *more: Any) -> list[Any]:
        if host not in stands_for or family != socket.AF_INET:
            raise socket.gaierror
        return [(family, socket.SOCK_STREAM, 0, "", (stands_for[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(channel, "LOOK_SECONDS", 0.0)
    async with connect(f"a.mesh:{mesh.port}|b.mesh:{mesh.port}", TOKEN) as opened:
        stub = jobs_grpc.JobServiceStub(opened)
        await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)
        await server.stop(0)
        await mesh.serve(address=f"127.0.0.4:{mesh.port}")
        stands_for["a.mesh"] = "127.0.0.4"
        async with asyncio.timeout(60):
            while not (await answered(stub)):  # noqa: ASYNC110  # the name is looked up beside the calls
                await asyncio.sleep(0.01)
        stands_for.clear()  # the name server is unavailable: the known addresses stay
        for _ in range(5):
            await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)


def test_a_name_with_several_addresses_stands_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_for = {"both.mesh": ["10.0.0.2", "10.0.0.1", "10.0.0.2"], "one.mesh": ["10.0.0.3"], "gone.mesh": []}

    def found(host: str, port: int, family: int, *more: Any) -> list[Any]:
        if family != socket.AF_INET:
            raise socket.gaierror
        return [(family, socket.SOCK_STREAM, 0, "", (number, port)) for number in stands_for[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert replicas_of("both.mesh:7|one.mesh:8|gone.mesh:9|10.0.0.4:7") == [
        ("10.0.0.1:7", "both.mesh"),
        ("10.0.0.2:7", "both.mesh"),
        ("one.mesh:8", ""),
        ("gone.mesh:9", ""),
        ("10.0.0.4:7", ""),
    ]


async def test_a_process_out_of_file_descriptors_has_unresolved_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> list[Any]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(channel.UnresolvedNames):
        await channel.resolve("a.mesh:7|b.mesh:7")
    async with asyncio.timeout(60):
        assert await channel.look_up("a.mesh:7") == [("a.mesh:7", "")]


async def answered(stub: Any) -> bool:
    try:
        await stub.GetJob(jobs_pb.GetJobRequest(), timeout=0.5)
    except grpc.aio.AioRpcError:
        return False
    return True


class NameServer(asyncio.DatagramProtocol):
    """Answers every address query with the current address."""

    address = "127.0.0.2"
    asked = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked += 1
        end = data.index(0, 12) + 5
        question, kind = data[12:end], int.from_bytes(data[end - 4 : end - 2], "big")
        answers = b""
        if kind == 1:
            answers = b"\xc0\x0c" + bytes((0, 1, 0, 1, 0, 0, 0, 1, 0, 4)) + socket.inet_aton(self.address)
        head = data[:2] + b"\x81\x80" + bytes((0, 1, 0, bool(answers), 0, 0, 0, 0))
        self.transport.sendto(head + question + answers, addr)


async def test_a_single_name_is_looked_up_again_by_grpc(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOOK_SECONDS", 0.2)
    names = NameServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: names, ("127.0.0.1", 0))
    server = await mesh.serve(address="127.0.0.2:0")
    target = f"dns://127.0.0.1:{transport.get_extra_info('sockname')[1]}/queue.mesh:{mesh.port}"
    async with connect(target, TOKEN) as opened:
        stub = jobs_grpc.JobServiceStub(opened)
        await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True)
        await server.stop(0)
        names.address = "127.0.0.4"
        await mesh.serve(address=f"127.0.0.4:{mesh.port}")
        await stub.GetJob(jobs_pb.GetJobRequest(), wait_for_ready=True, timeout=60)
        assert names.asked > 1
    transport.close()


HALTED = """
import asyncio, os, signal, sys
from tests.unit.rpc.conftest import JOBS
from cotenant.rpc.server import Server
from cotenant.v1 import job_service_pb2 as pb, job_service_pb2_grpc
class Jobs(job_service_pb2_grpc.JobServiceServicer):
    async def WatchJobs(self, request, context):
        yield pb.WatchJobsResponse(synced=True)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
async def main():
    server = Server("127.0.0.1:0", "t")
    server.add(job_service_pb2_grpc.add_JobServiceServicer_to_server, Jobs(), JOBS)
    print(server.bind(), flush=True)
    await server.start()
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_halted_server_with_open_connections_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PING_SECONDS", 1.0)
    monkeypatch.setattr(channel, "PONG_SECONDS", 0.5)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HALTED, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        port = int(await process.stdout.readline())
        async with connect(f"127.0.0.1:{port}", "t") as to:
            stub: Any = jobs_grpc.JobServiceStub(to)
            stream = stub.WatchJobs(jobs_pb.WatchJobsRequest(), wait_for_ready=True)
            async with asyncio.timeout(60):
                assert (await stream.read()).synced
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stream.read()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()


def test_pings_are_not_more_frequent_than_servers_allow() -> None:
    assert channel.PING_SECONDS > server.PINGS_SECONDS_MIN


async def test_a_channel_is_opened_as_soon_as_the_names_of_its_list_resolve(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.serve()
    calls: list[str] = []

    def numbers(address: str, family: socket.AddressFamily) -> list[str]:
        calls.append(address)
        return [mesh.address] if family is socket.AF_INET and len(calls) > 8 else []

    monkeypatch.setattr(channel, "UNRESOLVED_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(channel, "_numbers", numbers)
    monkeypatch.setattr(channel, "_is_number", lambda host: False)
    with capture_logs() as logs:
        opened = await channel.connect_when_resolved(f"a.mesh:{mesh.port}|b.mesh:{mesh.port}", TOKEN)
    await jobs_grpc.JobServiceStub(opened).GetJob(jobs_pb.GetJobRequest(id="a"))
    await opened.close()
    assert [entry["event"] for entry in logs] == ["names_unresolved"]


async def test_a_request_that_no_server_reads_names_its_field_before_it_is_sent(mesh: Mesh) -> None:
    await mesh.serve()
    request = jobs_pb.CreateJobRequest()
    request.spec.environment["DATA"] = "x" * 5_000_000
    problem = await problem_of(_calling(mesh.job_stub(), request))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "spec.environment: has 5,000,016 bytes, of 327,680 allowed for the whole request" in problem.message
    assert mesh.jobs.asked == []


async def _calling(stub: Any, request: Any) -> Any:
    return await stub.CreateJob(request)
