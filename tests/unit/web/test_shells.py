"""Shells on a page, at a session relay of the test's own."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.client.errors import InvalidArgument, NotFound
from cotenant.core.model.session import WINDOW_BYTES
from cotenant.v1.job_service_pb2 import OpenSessionRequest, OpenSessionResponse
from cotenant.v1.session_pb2 import SessionEnd, SessionFrame, SessionStart, SessionStream, TerminalSize
from cotenant.web import shells as module
from cotenant.web.sessions import Session
from cotenant.web.shells import SHELLS_MAX, Opening, Shells, Typed, read_opening, read_typed

OUTPUT = SessionStream.SESSION_STREAM_OUTPUT
SIZE = TerminalSize(rows=24, columns=80)
CTRL_D = b"\x04"


class Relay:
    """Answers as a node does on which a program echoes what it reads, until Ctrl-D."""

    def __init__(self, refusal: grpc.aio.AioRpcError | None = None) -> None:
        self.refusal = refusal
        self.starts: list[SessionStart] = []
        self.sizes: list[TerminalSize] = []
        self.cancelled = 0
        self.jobs = SimpleNamespace(OpenSession=self._open)

    def _open(self, requests: AsyncIterator[OpenSessionRequest]) -> Any:
        return _Call(self._frames(requests), self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1

    async def _frames(self, requests: AsyncIterator[OpenSessionRequest]) -> AsyncGenerator[OpenSessionResponse]:
        if self.refusal:
            raise self.refusal
        self.starts.append((await anext(requests)).start)
        yield OpenSessionResponse(frame=SessionFrame(started=True, window=WINDOW_BYTES))
        async for request in requests:
            frame = request.frame
            if frame.HasField("terminal"):
                self.sizes.append(frame.terminal)
            if CTRL_D in frame.data:
                yield OpenSessionResponse(frame=SessionFrame(end=SessionEnd(code=3)))
                return
            if frame.data:
                yield OpenSessionResponse(frame=SessionFrame(stream=OUTPUT, data=frame.data))


class _Call:
    """A call of a stub."""

    def __init__(self, frames: AsyncGenerator[OpenSessionResponse], cancel: Any) -> None:
        self._frames, self.cancel = frames, cancel

    def __aiter__(self) -> AsyncGenerator[OpenSessionResponse]:
        return self._frames


def login() -> Session:
    return Session("token", "csrf", 0.0, 0.0)


def opened(
    shells: Shells, relay: Any, session: Session, *, alive: bool = True, rank: int | None = None
) -> AsyncGenerator[str]:
    return shells.run(relay, session, "j1", Opening(rank, SIZE), lambda: alive)


async def told(events: AsyncGenerator[str]) -> tuple[str, Any]:
    """Return the name and data of the next event that is not a comment."""
    async for text in events:
        if text.startswith("event: "):
            head, _, data = text.rstrip("\n").partition("\ndata: ")
            return head.removeprefix("event: "), json.loads(data)
    raise AssertionError("the stream has ended")


async def test_what_is_typed_is_passed_on_and_output_and_the_end_are_told() -> None:
    shells, relay, session = Shells(), Relay(), login()
    events = opened(shells, relay, session, rank=1)
    name, data = await told(events)
    assert name == "opened"
    shell = shells.find(data["shell"], session)
    await shell.send(Typed(b"ls\r", TerminalSize(rows=5, columns=7)))
    name, output = await told(events)
    assert (name, base64.b64decode(output)) == ("output", b"ls\r")
    assert relay.sizes == [TerminalSize(rows=5, columns=7)]
    [start] = relay.starts
    assert (start.id, start.rank, start.exec.terminal, start.exec.terminal_type) == ("j1", 1, SIZE, "xterm-256color")
    await shell.send(Typed(CTRL_D, None))
    assert await told(events) == ("ended", {"why": "the program ended with exit code 3"})
    assert [one async for one in events] == []
    with pytest.raises(NotFound):
        shells.find(data["shell"], session)


async def test_a_page_that_goes_away_ends_the_session() -> None:
    shells, relay, session = Shells(), Relay(), login()
    async with contextlib.aclosing(opened(shells, relay, session)) as events:
        _, data = await told(events)
        await shells.find(data["shell"], session).send(Typed(b"x", None))
        await told(events)
        assert relay.cancelled == 0
    assert relay.cancelled == 1


async def test_a_shell_ends_with_the_login() -> None:
    events = opened(Shells(), relay := Relay(), login(), alive=False)
    await told(events)
    module.QUIET_SECONDS, before = 0.01, module.QUIET_SECONDS
    try:
        assert await told(events) == ("session", {})
    finally:
        module.QUIET_SECONDS = before
    assert [one async for one in events] == []
    assert relay.cancelled == 1


async def test_a_shell_is_its_logins_own_and_each_login_has_few() -> None:
    shells, session = Shells(), login()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SHELLS_MAX):
            shells.check_room(session)
            events = await stack.enter_async_context(contextlib.aclosing(opened(shells, Relay(), session)))
            _, data = await told(events)
        with pytest.raises(InvalidArgument, match="3 shells of this login are open"):
            shells.check_room(session)
        shells.check_room(login())
        with pytest.raises(NotFound):
            shells.find(data["shell"], login())
    shells.check_room(session)


async def test_a_refusal_is_told_in_the_words_of_the_mesh() -> None:
    metadata = grpc.aio.Metadata()
    refusal = grpc.aio.AioRpcError(
        grpc.StatusCode.FAILED_PRECONDITION, metadata, metadata, "job j1 is not running: it is queued"
    )
    events = opened(Shells(), Relay(refusal), login())
    await told(events)
    assert await told(events) == ("ended", {"why": "job j1 is not running: it is queued"})


async def test_what_a_program_does_not_read_is_refused_and_not_kept() -> None:
    shell = module.Shell(login())  # nothing carries it
    assert await shell.send(Typed(b"x" * WINDOW_BYTES, None))
    assert not await shell.send(Typed(b"x", None))


@pytest.mark.parametrize(
    ("read", "body", "words"),
    [
        (read_opening, b"{}", "rows, columns: missing"),
        (read_opening, b'{"rows": 0, "columns": 80}', "rows, columns: must be numbers from 1 to"),
        (read_opening, b'{"rows": 24}', "rows, columns: must be"),
        (read_opening, b'{"rows": true, "columns": 80}', "rows, columns: must be"),
        (read_opening, b'{"rows": 24, "columns": 80, "rank": -1}', "rank: must be a number"),
        (read_opening, b'{"rows": 24, "columns": 80, "rank": "0"}', "rank: must be a number"),
        (read_typed, b"[]", "must be a JSON object"),
        (read_typed, b"\xff", "must be a JSON object"),
        (read_typed, b'{"data": 3}', "data: must be text"),
    ],
)
def test_what_a_page_cannot_have_sent_is_refused(read: Any, body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read(body)


def test_half_a_character_is_replaced() -> None:
    assert read_typed(b'{"data": "\\ud83d"}').data == b"?"
