"""One side of a session: sends what its sources read, and writes what arrives to its sinks, within the windows granted.

The caller and the agent are both such a side. Each sends its frames with `frames`, and is given the other's by `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol, TypeAlias

from cotenant.core.model.session import (
    CHUNK_BYTES_MAX,
    WINDOW_BYTES,
    InputStreams,
    ReceiveWindow,
    SendWindow,
    SessionBroken,
)
from cotenant.rpc.frame_pipe import FramePipe
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.v1.session_pb2 import SessionEnd, SessionFrame, SessionStream, TerminalSize

Stream: TypeAlias = "SessionStream.ValueType"


class Source(Protocol):
    """What a side sends: stdin of the caller, stdout of a command, a socket."""

    async def ready(self) -> None:
        """Wait until `read` returns something."""

    def read(self, most: int) -> bytes | None:
        """Return some bytes; b"" at the end, None if there is nothing yet."""


class Sink(Protocol):
    """Where a side writes what arrives."""

    async def write(self, data: bytes) -> bool:
        """Write all of it; return False if nobody reads it any longer."""

    def close(self) -> None:
        """End the stream."""


class SessionPeer:
    """One side of a session. `on_terminal` and `on_started` are called when the other side says so."""

    def __init__(
        self,
        sources: Mapping[Stream, Source],
        sinks: Mapping[Stream, Sink],
        on_terminal: Callable[[TerminalSize], None] = lambda size: None,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources, self._sinks = dict(sources), dict(sinks)
        self._on_terminal, self._on_started = on_terminal, on_started
        self._outgoing = FramePipe()
        self._arrived: asyncio.Queue[SessionFrame] = asyncio.Queue()  # bounded by the window that was granted
        self._send, self._receive = SendWindow(), ReceiveWindow()
        self._granted = asyncio.Event()
        self._streams = InputStreams(list(sinks))
        self.sources_ended, self.sinks_ended = asyncio.Event(), asyncio.Event()
        self.end: SessionEnd | None = None  # what the other side said last

    # Sending -------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncIterator[SessionFrame]:
        """Yield this side's frames until `finish`."""
        yield SessionFrame(window=WINDOW_BYTES)
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    async def send(self, frame: SessionFrame) -> None:
        """Send a frame that is not data; wait while the other side, or the network, is slow."""
        await self._outgoing.put(frame)

    async def finish(self, end: SessionEnd | None = None) -> None:
        """Send how the session ended, and nothing after it."""
        if end is not None:
            await self.send(SessionFrame(end=end))
        self._outgoing.close()

    async def _pump(self, stream: Stream, source: Source) -> None:
        """Send what a source reads, to its end."""
        while True:
            await source.ready()
            while not (count := self._send.take(CHUNK_BYTES_MAX)):
                self._granted.clear()
                await self._granted.wait()
            data = source.read(count)
            self._send.left += count - len(data or b"")
            if data is None:
                continue
            await self.send(SessionFrame(stream=stream, data=data, eof=not data))
            if not data:
                return

    async def _pump_all(self) -> None:
        async with asyncio.TaskGroup() as pumps:
            for stream, source in self._sources.items():
                pumps.create_task(self._pump(stream, source))
        self.sources_ended.set()

    # Receiving -----------------------------------------------------------------------------------------------

    async def run(self, incoming: AsyncIterator[SessionFrame]) -> None:
        """Carry the session until the other side has sent its last frame; what arrived is written before this returns.

        Raises:
            SessionBroken: the other side does not keep to the rules.
            OSError: a source cannot be read, or a sink not written.
        """
        reading = asyncio.create_task(self._read(incoming), name="session-read")
        working = [
            asyncio.create_task(self._pump_all(), name="session-send"),
            asyncio.create_task(self._write(), name="session-write"),
        ]
        try:
            left = {reading, *working}
            while reading in left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if self.end is not None and working[1] in left:
                working.append(asyncio.create_task(self._arrived.join(), name="session-drain"))
                await asyncio.wait(working[1:], return_when=asyncio.FIRST_COMPLETED)
        except BaseExceptionGroup as group:  # of the pumps, which fail for the same reasons
            raise group.exceptions[0] from None
        finally:
            await cancel_and_wait(reading, *working)

    async def _read(self, incoming: AsyncIterator[SessionFrame]) -> None:
        async for frame in incoming:
            self._handle(frame)
            if self.end is not None:
                return

    def _handle(self, frame: SessionFrame) -> None:
        if frame.window:
            self._send.grant(frame.window)
            self._granted.set()
        if frame.started:
            self._on_started()
        if frame.HasField("terminal"):
            self._on_terminal(frame.terminal)
        if frame.data or frame.eof:
            self._streams.check(frame.stream, ends=frame.eof)
            self._receive.receive(len(frame.data))
            self._arrived.put_nowait(frame)
        if frame.HasField("end"):
            self.end = frame.end

    async def _write(self) -> None:
        """Write what arrives; what nobody reads any longer is dropped."""
        open_sinks, wanted = set(self._sinks), set(self._sinks)
        while open_sinks:
            frame = await self._arrived.get()
            sink = self._sinks[frame.stream]
            if frame.data and frame.stream in wanted and not await sink.write(frame.data):
                wanted.discard(frame.stream)
            if frame.eof:
                sink.close()
                open_sinks.discard(frame.stream)
            if granted := self._receive.passed_on(len(frame.data)):
                await self.send(SessionFrame(window=granted))
            self._arrived.task_done()
        self.sinks_ended.set()


__all__ = ["SessionBroken", "SessionPeer", "Sink", "Source", "Stream"]
