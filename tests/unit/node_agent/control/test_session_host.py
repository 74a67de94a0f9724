"""Sessions that an agent carries, with commands in memory: nothing is left wherever the call is cut."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control import session_host
from cotenant.node_agent.control.session_host import SessionHost
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.runtime_port import SessionCommand, SessionFailed
from cotenant.v1.session_pb2 import (
    SESSION_STREAM_INPUT,
    SESSION_STREAM_OUTPUT,
    ExecSession,
    ForwardSession,
    SessionFrame,
    SessionStart,
    TerminalSize,
)

KEY = AttemptKey("job", 1)
SAID = b"what the command says"


class Command:
    """A command that says something, ends when its input ends, and is closed once."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._input, self.input = os.pipe()
        self.output, self._output = os.pipe()
        self.error = -1
        for descriptor in (self.input, self.output):
            os.set_blocking(descriptor, False)
        self.sizes: list[tuple[int, int]] = []
        self.closed, self.finished = 0, asyncio.Event()
        os.write(self._output, SAID)

    async def started(self) -> None:
        if self._fails:
            raise SessionFailed("command not found: it")

    async def ended(self) -> tuple[int, int]:
        await self.finished.wait()
        os.close(self._output)
        self._output = -1
        return 7, 0

    def resize(self, rows: int, columns: int) -> None:
        self.sizes.append((rows, columns))

    async def close(self) -> None:
        self.closed += 1
        os.close(self._input)
        if self._output >= 0:
            os.close(self._output)


class Runtime:
    """Starts such commands."""

    name = "memory"

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.wanted: list[SessionCommand] = []
        self.fails = False

    async def open_session(self, key: AttemptKey, wanted: SessionCommand) -> Command:
        self.wanted.append(wanted)
        self.commands.append(Command(fails=self.fails))
        return self.commands[-1]


class Placement:
    """The other end of the agent's call: it sends `frames`, then waits for the end, or cuts the call with `cut`."""

    def __init__(self, *frames: SessionFrame, cut: bool = False) -> None:
        self._frames, self._cut = frames, cut
        self.got: list[SessionFrame] = []
        self.answered = asyncio.Event()

    async def serve(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        assert (await anext(requests)).session_id == "s"
        reading = asyncio.create_task(self._read(requests))
        try:
            for frame in self._frames:
                yield agent_pb2.ServeSessionResponse(frame=frame)
            if not self._cut:
                await reading
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self.got.append(request.frame)
            if request.frame.data:
                self.answered.set()

    def said(self) -> bytes:
        return b"".join(frame.data for frame in self.got if frame.stream == SESSION_STREAM_OUTPUT)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def host(runtime: Runtime) -> SessionHost:
    status = SimpleNamespace(status=SimpleNamespace(ended=False))
    attempts: Any = {KEY: status}
    double: Any = runtime
    return SessionHost(double, attempts)


def order(**more: Any) -> agent_pb2.SessionOrder:
    what = more or {"exec": ExecSession(command=["it"], terminal=TerminalSize(rows=9, columns=8))}
    return agent_pb2.SessionOrder(session_id="s", number=1, start=SessionStart(id="job", **what))


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


def running() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


GRANT = SessionFrame(window=1000)
FRAMES = (
    GRANT,
    SessionFrame(terminal=TerminalSize(rows=3, columns=4)),
    SessionFrame(stream=SESSION_STREAM_INPUT, data=b"typed"),
    SessionFrame(stream=SESSION_STREAM_INPUT, eof=True),
)


async def test_a_command_starts_says_something_and_ends(host: SessionHost, runtime: Runtime) -> None:
    placement = Placement(*FRAMES)
    host.order(order(), placement.serve)
    await placement.answered.wait()
    (command,) = runtime.commands
    assert runtime.wanted == [SessionCommand(["it"], 0, (9, 8), {"TERM": "dumb"})]
    await until(lambda: command.sizes == [(3, 4)])
    command.finished.set()
    await until(lambda: command.closed and not running())
    assert placement.got[0].window > 0
    assert placement.got[1].started
    assert placement.said() == SAID
    assert (placement.got[-1].end.code, placement.got[-1].end.error) == (7, "")


@pytest.mark.parametrize("cut", range(len(FRAMES) + 1))
async def test_a_cut_anywhere_closes_the_command_once(host: SessionHost, runtime: Runtime, cut: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    host.order(order(), Placement(*FRAMES[:cut], cut=True).serve)
    await until(lambda: runtime.commands and runtime.commands[0].closed and not running())
    assert runtime.commands[0].closed == 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("frame", [SessionFrame(window=-1), SessionFrame(stream=SESSION_STREAM_OUTPUT, data=b"?")])
async def test_a_caller_that_breaks_the_rules_ends_its_session(
    host: SessionHost, runtime: Runtime, frame: SessionFrame
) -> None:
    host.order(order(), Placement(GRANT, frame).serve)
    await until(lambda: runtime.commands and runtime.commands[0].closed and not running())


async def test_sizes_that_no_terminal_has_are_ignored(host: SessionHost, runtime: Runtime) -> None:
    sizes = [TerminalSize(rows=-1), TerminalSize(rows=1_000_000), TerminalSize(rows=1, columns=1)]
    placement = Placement(GRANT, *(SessionFrame(terminal=size) for size in sizes))
    host.order(order(), placement.serve)
    await until(lambda: runtime.commands and runtime.commands[0].sizes)
    assert runtime.commands[0].sizes == [(1, 1)]
    await host.close()


async def test_the_end_of_the_job_is_named(host: SessionHost, runtime: Runtime) -> None:
    placement = Placement(GRANT)
    host.order(order(), placement.serve)
    await placement.answered.wait()
    host.attempt_ended(KEY)
    await until(lambda: runtime.commands[0].closed and not running())
    assert placement.got[-1].end.reason == "JOB_ENDED"


async def test_an_agent_that_stops_ends_its_sessions(host: SessionHost, runtime: Runtime) -> None:
    placement = Placement(GRANT)
    host.order(order(), placement.serve)
    await placement.answered.wait()
    await host.close()
    assert runtime.commands[0].closed == 1
    assert not running()


async def refusal(host: SessionHost, wanted: agent_pb2.SessionOrder) -> str:
    placement = Placement()
    host.order(wanted, placement.serve)
    await until(lambda: placement.got)
    await until(lambda: not running())
    return placement.got[-1].end.error


async def test_what_cannot_be_started_is_refused_with_the_reason(host: SessionHost, runtime: Runtime) -> None:
    runtime.fails = True
    assert await refusal(host, order()) == "command not found: it"
    assert runtime.commands[0].closed == 1
    assert "start.forward.port is 0" in await refusal(host, order(forward=ForwardSession()))
    other = order()
    other.number = 2
    assert await refusal(host, other) == "job job is not running on this node"


async def test_a_job_has_a_limited_number_of_commands(
    host: SessionHost, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_host, "SESSIONS_PER_JOB_MAX", 2)
    open_ones = [Placement(GRANT) for _ in range(2)]
    for one in open_ones:
        host.order(order(), one.serve)
    await until(lambda: all(one.answered.is_set() for one in open_ones))
    third = Placement()
    host.order(order(), third.serve)
    await until(lambda: third.got)
    assert "has 2 sessions on this node already" in third.got[-1].end.error
    runtime.commands[0].finished.set()
    await until(lambda: runtime.commands[0].closed)
    fourth = Placement(GRANT)
    host.order(order(), fourth.serve)
    await fourth.answered.wait()
    await host.close()
