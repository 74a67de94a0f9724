"""A placement without a brain: it serves the streams of an executor, sends what a script says, and keeps what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.v1 import job_pb2

Key = tuple[str, int]
LINES_KEPT = 60
BEAT_SECONDS = 0.5
LOST_AFTER_SECONDS = 30.0


class Stream:
    """One stream of an executor: what it has sent, and what is still to be sent to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hello: agent_pb2.Hello | None = None
        self.messages = 0
        self.closed = False
        self.outgoing: asyncio.Queue[agent_pb2.ConnectResponse | None] = asyncio.Queue()

    def close(self) -> None:
        """End the stream."""
        self.outgoing.put_nowait(None)


class ScriptedPlacement(agent_service_pb2_grpc.AgentServiceServicer):
    """The server, and everything that it has received, in the order in which it came.

    `reports` has the latest report of each attempt, `states` all states that were reported of it.
    """

    def __init__(self) -> None:
        self.term = 100
        self.streams: list[Stream] = []
        self.reports: dict[Key, agent_pb2.AttemptReport] = {}
        self.states: dict[Key, list[int]] = {}
        self.lines: list[str] = []  # of the transcript
        self._changed = asyncio.Condition()
        self._server = grpc.aio.server()

    async def start(self) -> int:
        """Serve on a free port of this machine, and return it."""
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        """End all streams and the server."""
        for stream in self.streams:
            stream.close()
        await self._server.stop(0.5)

    @property
    def stream(self) -> Stream | None:
        """The open stream that came last; None if there is none."""
        return next((stream for stream in reversed(self.streams) if not stream.closed and stream.hello), None)

    def send(self, message: agent_pb2.ConnectResponse) -> None:
        """Send a message on the open stream; it is lost if there is none."""
        if stream := self.stream:
            self._note("sent", message, stream)
            stream.outgoing.put_nowait(message)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, and return whether it did in time; it is tried after each message."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def Connect(  # noqa: N802  # the name of the method on the wire
        self, requests: AsyncIterator[agent_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        """Serve a stream."""
        stream = Stream(len(self.streams) + 1)
        self.streams.append(stream)
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            while (message := await stream.outgoing.get()) is not None:
                yield message
        finally:
            stream.closed = True
            reader.cancel()
            await self._wake()

    async def UploadOutput(  # noqa: N802  # the same
        self, requests: AsyncIterator[agent_pb2.UploadOutputRequest], context: Any
    ) -> agent_pb2.UploadOutputResponse:
        """Accept output, although the check never asks for any."""
        async for _ in requests:
            pass
        return agent_pb2.UploadOutputResponse()

    async def ServeSession(  # noqa: N802  # the same
        self, requests: AsyncIterator[agent_pb2.ServeSessionRequest], context: Any
    ) -> AsyncIterator[agent_pb2.ServeSessionResponse]:
        """End a session that nothing has asked for."""
        async for _ in requests:
            return
        yield agent_pb2.ServeSessionResponse()  # makes this a generator; never reached by a caller that sends anything

    async def _read(self, stream: Stream, requests: AsyncIterator[agent_pb2.ConnectRequest]) -> None:
        try:
            async for request in requests:
                await self._take(stream, request)
        finally:
            stream.closed = True
            stream.close()
            await self._wake()

    async def _take(self, stream: Stream, request: agent_pb2.ConnectRequest) -> None:
        stream.messages += 1
        self._note("received", request, stream)
        if request.HasField("hello") and stream.hello is None:
            stream.hello = request.hello
            stream.outgoing.put_nowait(self._welcome())
        for report in (*request.hello.attempts, *request.reports):
            key = report.job_id, report.number
            self.reports[key] = report
            self.states.setdefault(key, []).append(report.state)
        if request.beat:
            stream.outgoing.put_nowait(agent_pb2.ConnectResponse(heard=request.beat))
        await self._wake()

    def _welcome(self) -> agent_pb2.ConnectResponse:
        message = agent_pb2.ConnectResponse()
        message.welcome.term = self.term
        message.welcome.heartbeat_interval.FromMilliseconds(round(BEAT_SECONDS * 1000))
        message.welcome.lost_after.FromMilliseconds(round(LOST_AFTER_SECONDS * 1000))
        return message

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _note(self, what: str, message: Message, stream: Stream) -> None:
        """Add a line to the transcript; heartbeats alone are left out."""
        told = MessageToDict(message, preserving_proto_field_name=True)
        told.pop("beat", None)
        told.pop("condition", None)
        if isinstance(told.get("hello"), dict):
            told["hello"].pop("inventory", None)
        for assignment in told.get("assignments", ()):
            assignment["allocation"] = "…"
        if told:
            self.lines.append(f"{what} on stream {stream.number}: {told}")
            del self.lines[:-LINES_KEPT]


def state_name(state: int) -> str:
    """Return the name of an attempt's state.

    >>> state_name(job_pb2.ATTEMPT_STATE_RUNNING), state_name(99)
    ('RUNNING', 'state 99')
    """
    known = job_pb2.AttemptState.DESCRIPTOR.values_by_number.get(state)
    return known.name.removeprefix("ATTEMPT_STATE_") if known else f"state {state}"
