"""The stream to an odd placement, and traces."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import NODE, assignment, shell
from tests.unit.node_agent.placement import Placement

from cotenant import telemetry
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.control import placement_link
from cotenant.node_agent.control.agent import AgentConfig
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.rpc import channel
from cotenant.security.validity import Validity
from cotenant.v1 import job_pb2

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class OddPlacement(agent_service_pb2_grpc.AgentServiceServicer):
    """Does not begin with a welcome."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ConnectResponse]:
        await anext(request_iterator)
        if self._how == "refuses":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another agent bears this name")
        if self._how == "begins with orders":
            yield agent_pb2.ConnectResponse(assignments=[shell("early", "true")])
        if self._how == "says nothing":
            await asyncio.Event().wait()

    async def UploadOutput(self, request_iterator: Any, context: Any) -> agent_pb2.UploadOutputResponse:
        raise NotImplementedError

    def ServeSession(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refuses", "ALREADY_EXISTS: another agent bears this name"),
        ("begins with orders", "placement's first message is not a welcome"),
        ("says nothing", "no welcome within 0 s"),
        ("hangs up", "placement ended the stream at once"),
    ],
)
async def test_an_invalid_placement_is_left_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    monkeypatch.setattr(placement_link, "WELCOME_SECONDS_MAX", 0.3)
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(OddPlacement(how), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agent = RunningAgent(AgentConfig(NODE, tmp_path / "state", f"127.0.0.1:{port}", gpus="fake:0"))
    with capture_logs() as logs:
        await agent.start()
        await until(lambda: sum(entry["event"] == "placement_disconnected" for entry in logs) >= 2)
        await agent.stop()
    await server.stop(0)
    assert why in next(entry["why"] for entry in logs if entry["event"] == "placement_disconnected")
    assert not list((tmp_path / "state" / "attempts").iterdir())


async def test_an_unreachable_placement_does_not_end_the_agent(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        agent = RunningAgent(
            AgentConfig(NODE, tmp_path / "state", f"127.0.0.1:{taken.getsockname()[1]}", gpus="fake:0")
        )
        with capture_logs() as logs:
            await agent.start()
            await until(lambda: sum(entry["event"] == "placement_disconnected" for entry in logs) >= 2)
            await agent.stop()


async def test_names_that_cannot_be_resolved_do_not_end_the_agent(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = placement.endpoint.rpartition(":")[2]
    calls: list[str] = []

    def numbers(address: str, family: socket.AddressFamily) -> list[str]:
        calls.append(address)
        return [f"127.0.0.1:{port}"] if family is socket.AF_INET and len(calls) > 8 else []

    monkeypatch.setattr(channel, "_numbers", numbers)
    monkeypatch.setattr(channel, "_is_number", lambda host: False)
    endpoint = f"placement-1.mesh:{port}|placement-2.mesh:{port}"
    agent = RunningAgent(AgentConfig(NODE, tmp_path / "state", endpoint, gpus="fake:0"))
    with capture_logs() as logs:
        await agent.start()
        await placement.connected()
        await agent.stop()
    failed = [entry["why"] for entry in logs if entry["event"] == "placement_disconnected"]
    assert failed
    assert all("cannot resolve all names" in why for why in failed)


async def test_an_agent_connects_again_after_any_failure(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, failures = channel.resolve, iter([MemoryError])

    async def fail_first(endpoint: str, last_known: str = "") -> channel.ResolvedEndpoint:
        for failure in failures:
            raise failure
        return await resolve(endpoint, last_known)

    monkeypatch.setattr(channel, "resolve", fail_first)
    await placement.connected()
    await placement.stop()
    await placement.start()
    await placement.connected(2)
    assert not list(failures)


async def test_the_last_known_addresses_serve_while_names_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_numbers", lambda address, family: [])
    with pytest.raises(channel.UnresolvedNames):
        await channel.resolve("a.mesh:1|b.mesh:1")
    assert (await channel.resolve("a.mesh:1|b.mesh:1", "ipv4:10.0.0.1:1")).target == "ipv4:10.0.0.1:1"


def test_backoff_grows_to_a_bound_and_resets() -> None:
    backoff = Backoff(first_seconds=1, longest_seconds=4, rng=Random(7))
    bounds = [1, 2, 4, 4, 4]
    assert all(bound / 2 <= backoff.next_seconds() <= bound for bound in bounds)
    backoff.reset()
    assert backoff.next_seconds() <= 1


async def test_spans_continue_the_assignments_trace(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def record(name: str, parent: str, start: float, end: float, **attributes: Any) -> str:
        spans.append((name, parent, start, end, attributes))
        return ""

    monkeypatch.setattr(telemetry, "record", record)
    job = shell("traced", "exit 3")
    job.trace_parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    placement.assign(job)
    await placement.ended("traced")
    assert [(name, parent) for name, parent, *_ in spans] == [("launch", job.trace_parent), ("exit", job.trace_parent)]
    assert all(end >= start > 0 for _, _, start, end, _ in spans)
    assert spans[0][3] == spans[1][2]
    assert spans[1][4]["code"] == 3


@pytest.fixture
def tiny_state(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "tiny"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
async def test_a_full_state_disk_loses_no_exit_and_is_reported(
    tiny_state: Path, placement: Placement, agent: RunningAgent
) -> None:
    await agent.stop()
    await agent.start(state_dir=tiny_state / "state")
    await placement.connected(2)
    placement.assign(shell("flood", "seq 1 500000; exit 9"))
    end = await placement.ended("flood")
    assert (end.state, end.exit.code) == (job_pb2.ATTEMPT_STATE_FAILED, 9)
    placement.assign(assignment("next", ["true"]))
    assert "No space left on device" in (await placement.ended("next")).message
    await agent.stop()
    await agent.start()
    hello = await placement.connected(3)
    assert ("flood", 9) in {(report.job_id, report.exit.code) for report in hello.attempts}
    await agent.stop()


async def test_a_certificate_is_reported_with_the_hello_and_after_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (Validity(BEGAN, BEGAN + timedelta(days=days)) for days in (30, 60))
    shown: list[Validity | None] = [first]
    watched = SimpleNamespace(material=SimpleNamespace(validity=first))
    monkeypatch.setattr(channel, "shown", lambda: watched if shown[0] else None)
    said: list[agent_pb2.ConnectRequest] = []

    class Call:
        """Takes what is written, and welcomes."""

        async def write(self, message: agent_pb2.ConnectRequest) -> None:
            said.append(message)

        async def read(self) -> agent_pb2.ConnectResponse:
            return agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(term=1))

    class Node:
        """A node in good condition."""

        def hello(self) -> agent_pb2.Hello:
            return agent_pb2.Hello(node_id=NODE)

        def condition(self) -> agent_pb2.AgentCondition:
            return agent_pb2.AgentCondition()

    class Leader:
        """Obeys every leader."""

        def accepts(self, welcome: agent_pb2.Welcome) -> bool:
            return True

        def note(self, response: agent_pb2.ConnectResponse) -> None: ...
        def acknowledged(self, sent_seconds: float) -> None: ...

    class Orders:
        """Carries out nothing."""

        def apply(self, response: agent_pb2.ConnectResponse, upload: object, serve: object) -> None: ...

    stand_ins: tuple[Any, Any, Any] = Node(), Leader(), Orders()
    link = placement_link.PlacementLink("127.0.0.1:1", "", PlacementOutbox(), *stand_ins, Random(1))
    for _ in range(2):  # each stream begins with it
        await link._handshake(Call())
        assert said[-1].certificate == first.to_wire()
    assert not link._take_outbox(5.0).HasField("certificate")
    watched.material.validity = second
    assert link._take_outbox(5.0).certificate == second.to_wire()
    assert not link._take_outbox(5.0).HasField("certificate")
    shown[0] = None
    await link._handshake(Call())
    assert not said[-1].HasField("certificate")
