"""Unauthenticated connections are few and short-lived, whatever they do; the others are left alone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rpc.conftest import Mesh
from tests.unit.rpc.test_server import _framed

from cotenant import file_descriptors
from cotenant.rpc import connections
from cotenant.rpc.channel import connect
from cotenant.rpc.connections import (
    RULES,
    Connection,
    ConnectionRules,
    Connections,
    address_of,
    connections_to_close,
    peer_name,
)
from cotenant.rpc.server import Server
from cotenant.security.certificates import Authority
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = _framed(4, 0, 0)
NO_WINDOW = _framed(4, 0, 0, b"\0\4" + bytes(4))  # SETTINGS_INITIAL_WINDOW_SIZE = 0: nothing may be sent to us
QUICK = replace(RULES, silent_seconds=0.3, young_seconds=0.1, per_address=5, handshake_seconds=0.5)
SECONDS = 60.0


def watch_frames(stream: int) -> bytes:
    """Return what a client sends to watch the health of the whole server."""
    fields = (
        (b":path", b"/grpc.health.v1.Health/Watch"),
        (b":authority", b"x:1"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    headers = b"\x83\x86" + b"".join(bytes([0, len(name)]) + name + bytes([len(text)]) + text for name, text in fields)
    return _framed(1, 4, stream, headers) + _framed(0, 1, stream, bytes(5))


@asynccontextmanager
async def idle(port: int, count: int, *, first: bytes = PREFACE + SETTINGS) -> AsyncIterator[list[Any]]:
    """Open `count` connections that send only `first`, and yield their readers."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in opened:
        writer.write(first)
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> None:
    """Read until the server has closed the connection."""
    try:
        async with asyncio.timeout(SECONDS):
            while await reader.read(65536):
                pass
    except ConnectionError:
        return


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # the server sets no event of ours
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("first", [b"", b"PRI", PREFACE + SETTINGS], ids=["mute", "half a preface", "handshake"])
async def test_a_connection_that_never_calls_is_closed(mesh: Mesh, first: bytes) -> None:
    await mesh.serve(connections=QUICK)
    async with idle(mesh.port, 3, first=first) as readers:
        await asyncio.gather(*(ended(reader) for reader in readers))


async def test_a_connection_that_has_authenticated_is_never_closed_and_new_ones_get_in(mesh: Mesh) -> None:
    server = await mesh.serve(connections=replace(QUICK, silent_seconds=1000.0))
    stub = mesh.job_stub()
    await stub.GetJob(jobs_pb.GetJobRequest())
    watching = asyncio.Event()
    finish = asyncio.Event()

    async def hold(request: Any, context: Any) -> None:
        watching.set()
        await finish.wait()

    mesh.jobs.answer = hold
    stream = asyncio.ensure_future(_first(stub.WatchJobs(jobs_pb.WatchJobsRequest())))
    await watching.wait()
    async with idle(mesh.port, 60) as readers:
        for closed in islice(asyncio.as_completed(map(ended, readers)), 60 - QUICK.per_address):
            await closed
        mesh.jobs.answer = _nothing
        await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
        assert "unauthenticated connections were closed" in server.problems()[0].reason
    finish.set()
    assert await stream


async def _first(stream: Any) -> Any:
    return await anext(aiter(stream))


async def _nothing(request: Any, context: Any) -> None:
    """Answer at once."""


async def test_a_wrong_token_does_not_authenticate_a_connection(mesh: Mesh) -> None:
    await mesh.serve(connections=QUICK)
    channel = mesh.channel("guessed")
    stub = mesh.job_stub("guessed")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.GetJob(jobs_pb.GetJobRequest())
    async with asyncio.timeout(SECONDS):
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)  # the server has closed it


async def test_health_checks_keep_a_connection_and_need_no_token(mesh: Mesh) -> None:
    await mesh.serve(connections=replace(QUICK, silent_seconds=1.5))
    channel = mesh.channel("")
    stub = health_pb2_grpc.HealthStub(channel)
    for _ in range(6):
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.4)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_health_watches_without_a_token_are_few_and_the_newest_lives(mesh: Mesh) -> None:
    await mesh.serve(connections=replace(RULES, watches_per_address=10))
    stub = health_pb2_grpc.HealthStub(mesh.channel(""))
    watches = []
    for _ in range(50):
        watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
        await watches[-1].read()
    over = [asyncio.ensure_future(watch.code()) for watch in watches]
    await eventually(lambda: sum(code.done() for code in over) == 40)
    assert not any(code.done() for code in over[-10:])
    for code in over:
        code.cancel()


async def test_a_health_watch_without_a_token_is_short_and_one_that_authenticates_lasts(mesh: Mesh) -> None:
    await mesh.serve(connections=replace(RULES, watch_seconds=0.5))
    stranger, client = mesh.channel(""), mesh.channel()
    short = health_pb2_grpc.HealthStub(stranger).Watch(health_pb2.HealthCheckRequest())
    long = health_pb2_grpc.HealthStub(client).Watch(health_pb2.HealthCheckRequest())
    await short.read()
    await long.read()
    over = asyncio.ensure_future(long.code())
    async with asyncio.timeout(SECONDS):
        assert await short.code() is grpc.StatusCode.OK
        again = health_pb2_grpc.HealthStub(stranger).Watch(health_pb2.HealthCheckRequest())
        await again.read()
        assert await again.code() is grpc.StatusCode.OK
    assert not over.done()
    over.cancel()


async def test_watches_of_one_authenticated_connection_are_bounded(mesh: Mesh) -> None:
    await mesh.serve(connections=replace(RULES, watches_per_connection=3))
    channel = grpc.aio.insecure_channel(mesh.address)
    with pytest.raises(grpc.aio.AioRpcError):
        await jobs_grpc.JobServiceStub(channel).GetJob(jobs_pb.GetJobRequest(), metadata=())
    token = (("authorization", "Bearer a-token-for-tests"),)
    await jobs_grpc.JobServiceStub(channel).GetJob(jobs_pb.GetJobRequest(), metadata=token)
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for watch in watches:
        await watch.read()
    refused = stub.Watch(health_pb2.HealthCheckRequest())
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "health watches open" in await refused.details()
    await channel.close()


async def test_a_watcher_that_never_reads_delays_no_other(mesh: Mesh) -> None:
    server = await mesh.serve()
    async with idle(mesh.port, 1, first=PREFACE + NO_WINDOW + watch_frames(1)):
        watch = health_pb2_grpc.HealthStub(mesh.channel()).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.set_serving("cotenant.v1.JobService", False)
        async with asyncio.timeout(SECONDS):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await server.stop(0)


async def test_reflection_needs_a_token(mesh: Mesh) -> None:
    await mesh.serve()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stream = reflection_pb2_grpc.ServerReflectionStub(mesh.channel("")).ServerReflectionInfo(iter([request]))
    assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_with_mutual_tls_a_finished_handshake_is_authentication_and_an_unfinished_one_ends(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    authority.create()
    served = authority.issue(Subject.parse("service/queue"), ["127.0.0.1"])
    shown = authority.issue(Subject.parse("user/eve?tenants=lab"))
    tls = WatchedTlsFiles(TlsFiles(authority.cert_path, served.path, served.key_path))
    server = Server("127.0.0.1:0", "", authenticator=_Nobody(), security=Security(tls=tls), connections=QUICK)
    port = await server.start()
    try:
        files = TlsFiles(authority.cert_path, shown.path, shown.key_path)
        async with connect(f"127.0.0.1:{port}", tls=files) as channel, idle(port, 3, first=b"") as readers:
            assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            await asyncio.gather(*(ended(reader) for reader in readers))
            assert channel.get_state() is grpc.ChannelConnectivity.READY
    finally:
        await server.stop(0)


class _Nobody:
    def authenticate(self, method: str, metadata: Any, peer: Any) -> Any:
        raise AssertionError(method)


# What is decided, without a server ------------------------------------------------------------------------------------

Many = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.floats(0, 100), st.booleans()), max_size=60)


def connections_of(drawn: list[tuple[int, float, float, bool]]) -> list[Connection]:
    return [
        Connection(number, number, f"ipv4:10.0.0.{address}:{number}", min(since, active), max(since, active), watches)
        for number, (address, since, active, watches) in enumerate(drawn)
    ]


@given(Many, st.integers(0, 70))
def test_the_remaining_connections_keep_the_limits_and_the_newest_stay(
    drawn: list[tuple[int, float, float, bool]], shortage: int
) -> None:
    rules = ConnectionRules(silent_seconds=10.0, per_address=5, in_all=12)
    every, now = connections_of(drawn), 100.0
    closing = connections_to_close(every, rules, now, shortage)
    gone = {one.descriptor for one, _ in closing}
    left = [one for one in every if one.descriptor not in gone]
    assert len(gone) >= min(shortage, len(every))
    assert all(one.watches or now - one.active <= rules.silent_seconds for one in left)
    old = [one for one in left if now - one.since >= rules.young_seconds]
    by_address = Counter(address_of(one.peer) for one in left)
    assert all(by_address[address_of(one.peer)] <= rules.per_address for one in old)
    assert len(left) <= rules.in_all or not old
    for one, why in closing:
        if why == connections.TOO_MANY:  # no older one of the same address and kind was spared
            spared = [
                other
                for other in left
                if address_of(other.peer) == address_of(one.peer) and other.watches == one.watches
            ]
            assert all(other.since >= one.since for other in spared)


def test_a_reused_descriptor_number_is_left_alone() -> None:
    warden = Connections()
    warden._null = os.open(os.devnull, os.O_RDONLY)
    warden._spare = os.dup(warden._null)
    ours, other = socket.socketpair()
    inode = os.fstat(ours.fileno()).st_ino
    assert not warden._close(Connection(ours.fileno(), inode + 1, "ipv4:10.0.0.1:1", 0.0, 0.0))
    other.send(b"x")
    assert ours.recv(1) == b"x"
    assert warden._close(Connection(ours.fileno(), inode, "ipv4:10.0.0.1:1", 0.0, 0.0))
    assert ours.recv(1) == b""
    for descriptor in (warden._spare, warden._null):
        os.close(descriptor)


async def test_peers_are_named_as_grpc_names_them(mesh: Mesh) -> None:
    seen: list[str] = []

    async def note(request: Any, context: Any) -> None:
        seen.append(context.peer())

    mesh.jobs.answer = note
    for host in ("127.0.0.1", "[::1]"):
        server = await mesh.serve(address=f"{'[::]' if host == '[::1]' else host}:0")
        found: set[str] = set()
        async with connect(f"{host}:{mesh.port}", "a-token-for-tests") as channel:
            await jobs_grpc.JobServiceStub(channel).GetJob(jobs_pb.GetJobRequest())
            used = file_descriptors.usage().used
            found = {
                peer
                for descriptor, _ in connections.open_sockets(used)
                if (peer := connections.accepted_peer(descriptor, mesh.port))
            }
        assert seen[-1] in found
        await server.stop(0)


def test_addresses_of_version_6_count_by_network() -> None:
    assert address_of(peer_name("2001:db8::1", 1)) == address_of(peer_name("2001:db8::2", 2))
    assert address_of(peer_name("2001:db8:0:1::1", 1)) != address_of(peer_name("2001:db8::2", 2))
    assert address_of(peer_name("fe80::1%eth0", 1)) == "fe80::/64"


def test_a_look_that_finds_nothing_new_reads_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    warden = Connections(clock=lambda: clock[0], usage=lambda: file_descriptors.Usage(50, 1000))
    scans: list[int] = []

    def scanned(used: int) -> Iterator[tuple[int, int]]:
        scans.append(used)
        return iter(())

    monkeypatch.setattr(connections, "open_sockets", scanned)
    for _ in range(16):
        warden.look(1)
        clock[0] += connections.LOOK_SECONDS
    assert len(scans) == 1
