"""Sessions between two sides in memory: order, flow control, and what is left after a cut at any point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from cotenant.core.model.session import (
    CHUNK_BYTES_MAX,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    SessionBroken,
)
from cotenant.rpc.session_peer import SessionPeer
from cotenant.v1.session_pb2 import (
    SESSION_STREAM_ERROR,
    SESSION_STREAM_INPUT,
    SESSION_STREAM_OUTPUT,
    SessionEnd,
    SessionFrame,
    TerminalSize,
)

INPUT, OUTPUT, ERROR = SESSION_STREAM_INPUT, SESSION_STREAM_OUTPUT, SESSION_STREAM_ERROR


class Data:
    """A source with this data; `pieces` draws how much one read returns."""

    def __init__(self, data: bytes, seed: int = 0, *, ends: bool = True) -> None:
        self.left, self.read_bytes, self._random, self._ends = data, 0, Random(seed), ends

    async def ready(self) -> None:
        await asyncio.sleep(0)
        if not self.left and not self._ends:
            await asyncio.Event().wait()

    def read(self, most: int) -> bytes | None:
        if self._random.random() < 0.1:
            return None
        piece = self.left[: self._random.randint(1, most)]
        self.left = self.left[len(piece) :]
        self.read_bytes += len(piece)
        return piece


class Kept:
    """A sink that keeps what it is given, once it is open; with `closed`, nobody reads it."""

    def __init__(self, *, opened: bool = True, closed: bool = False) -> None:
        self.data, self.ended, self.opened, self._closed = b"", False, asyncio.Event(), closed
        if opened:
            self.opened.set()

    async def write(self, data: bytes) -> bool:
        await self.opened.wait()
        if self._closed:
            return False
        assert not self.ended
        self.data += data
        return True

    def close(self) -> None:
        self.ended = True


async def first(frames: AsyncIterator[SessionFrame], count: int) -> AsyncIterator[SessionFrame]:
    """Yield the first frames; then the connection is cut."""
    for _ in range(count):
        if (frame := await anext(frames, None)) is None:
            return
        yield frame


async def given(*frames: SessionFrame) -> AsyncIterator[SessionFrame]:
    for frame in frames:
        yield frame
    await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0)


def caller_of(data: bytes, seed: int) -> tuple[SessionPeer, Kept, Kept]:
    out, err = Kept(), Kept()
    return SessionPeer({INPUT: Data(data, seed)}, {OUTPUT: out, ERROR: err}), out, err


@pytest.mark.parametrize("seed", range(4))
async def test_all_streams_arrive_whole_and_before_the_end(seed: int) -> None:
    random = Random(seed)
    texts = [random.randbytes(random.randint(0, 3 * WINDOW_BYTES)) for _ in range(3)]
    caller, out, err = caller_of(texts[0], seed)
    stdin = Kept()
    agent = SessionPeer({OUTPUT: Data(texts[1], seed), ERROR: Data(texts[2], seed)}, {INPUT: stdin})

    async def end() -> None:
        await agent.sources_ended.wait()
        await agent.sinks_ended.wait()
        await agent.finish(SessionEnd(code=3))

    async with asyncio.timeout(60), asyncio.TaskGroup() as both:
        both.create_task(end())
        both.create_task(agent.run(caller.frames()))
        await caller.run(agent.frames())
        assert (stdin.data, out.data, err.data) == tuple(texts)
        assert (stdin.ended, out.ended, err.ended) == (True, True, True)
        assert caller.end == SessionEnd(code=3)
        await caller.finish()


async def test_a_slow_reader_holds_back_the_writer() -> None:
    source, sink = Data(bytes(8 * WINDOW_BYTES)), Kept(opened=False)
    agent, caller = SessionPeer({OUTPUT: source}, {}), SessionPeer({}, {OUTPUT: sink, ERROR: Kept()})
    async with asyncio.timeout(60), asyncio.TaskGroup() as both:
        both.create_task(agent.run(caller.frames()))
        both.create_task(caller.run(agent.frames()))
        await until(lambda: source.read_bytes == WINDOW_BYTES)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert source.read_bytes == WINDOW_BYTES
        sink.opened.set()
        await agent.sources_ended.wait()
        await until(lambda: sink.ended)
        assert len(sink.data) == 8 * WINDOW_BYTES
        await agent.finish(SessionEnd())
        await caller.finish()


async def test_what_nobody_reads_does_not_hold_back_the_other_streams() -> None:
    closed, err = Kept(closed=True), Kept()
    agent = SessionPeer({OUTPUT: Data(bytes(3 * WINDOW_BYTES)), ERROR: Data(b"said")}, {})
    caller = SessionPeer({}, {OUTPUT: closed, ERROR: err})
    async with asyncio.timeout(60), asyncio.TaskGroup() as both:
        both.create_task(agent.run(caller.frames()))
        both.create_task(caller.run(agent.frames()))
        await until(lambda: closed.ended and err.ended)
        assert err.data == b"said"
        await agent.finish()
        await caller.finish()


@pytest.mark.parametrize(
    "frames",
    [
        [SessionFrame(stream=INPUT, data=b"of no stream that it takes")],
        [SessionFrame(data=b"of none")],
        [SessionFrame(stream=OUTPUT, eof=True), SessionFrame(stream=OUTPUT, data=b"after its end")],
        [SessionFrame(stream=OUTPUT, eof=True), SessionFrame(stream=OUTPUT, eof=True)],
        [SessionFrame(stream=OUTPUT, data=bytes(CHUNK_BYTES_MAX + 1))],
        [SessionFrame(stream=OUTPUT, data=bytes(CHUNK_BYTES_MAX))] * (1 + WINDOW_BYTES // CHUNK_BYTES_MAX),
        [SessionFrame(window=-1)],
        [SessionFrame(window=WINDOW_BYTES_MAX), SessionFrame(window=1)],
    ],
)
async def test_a_side_that_breaks_the_rules_ends_the_session(frames: list[SessionFrame]) -> None:
    peer = SessionPeer({}, {OUTPUT: Kept(opened=False), ERROR: Kept()})
    with pytest.raises(SessionBroken):
        await peer.run(given(*frames))


async def test_sizes_and_the_start_are_passed_on() -> None:
    seen: list[object] = []
    peer = SessionPeer(
        {}, {}, on_terminal=lambda size: seen.append(size.rows), on_started=lambda: seen.append("started")
    )
    await peer.run(
        given(SessionFrame(started=True), SessionFrame(terminal=TerminalSize(rows=7)), SessionFrame(started=True))
    )
    assert seen == ["started", 7, "started"]


@pytest.mark.parametrize("cut", range(14))
async def test_a_cut_at_any_point_leaves_nothing(cut: int) -> None:
    before = asyncio.all_tasks()
    caller, out, _ = caller_of(bytes(5 * CHUNK_BYTES_MAX), cut)
    agent = SessionPeer({OUTPUT: Data(bytes(5 * CHUNK_BYTES_MAX), cut), ERROR: Data(b"", ends=False)}, {INPUT: Kept()})
    async with asyncio.timeout(60):
        running = asyncio.create_task(agent.run(caller.frames()))
        await caller.run(first(agent.frames(), cut))
        assert caller.end is None
        assert not out.ended
        running.cancel()
        await asyncio.wait({running})
    assert asyncio.all_tasks() == before
