"""A scripted placement: it records what an agent reports and sends what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from tests.unit.node_agent.conditions import PATIENCE_SECONDS

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc, sample_service_pb2, sample_service_pb2_grpc
from cotenant.v1 import contention_service_pb2, job_pb2

TERMINAL_STATES = (
    job_pb2.ATTEMPT_STATE_SUCCEEDED,
    job_pb2.ATTEMPT_STATE_FAILED,
    job_pb2.ATTEMPT_STATE_STOPPED,
    job_pb2.ATTEMPT_STATE_NOT_LAUNCHED,
)


class Placement(agent_service_pb2_grpc.AgentServiceServicer, sample_service_pb2_grpc.SampleServiceServicer):
    """Serves the agent's streams on a port of the loopback interface."""

    def __init__(self) -> None:
        self.term = 1
        self.heartbeat_seconds = 5.0
        self.hellos: list[agent_pb2.Hello] = []
        self.reports: list[agent_pb2.AttemptReport] = []
        self.progress: list[agent_pb2.ProgressReport] = []
        self.resized: list[agent_pb2.ResizeReport] = []
        self.profiled: list[agent_pb2.ProfileReport] = []
        self.inventories: list[Any] = []
        self.beats = 0
        self.deaf = False  # it hears, but does not say so
        self.uploads: dict[str, list[agent_pb2.UploadOutputRequest]] = {}
        self.finished_uploads: set[str] = set()
        self.samples: list[contention_service_pb2.NodeSample] = []
        self.directives: list[sample_service_pb2.Directive] = []
        self.acknowledge_ends = False
        self.port = 0
        self._news = asyncio.Condition()
        self._streams: list[asyncio.Queue[agent_pb2.ConnectResponse | None]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        agent_service_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        sample_service_pb2_grpc.add_SampleServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        assert self.port
        await self._server.start()

    async def stop(self) -> None:
        assert self._server
        for stream in self._streams:
            stream.put_nowait(None)
        await self._server.stop(grace=0)
        self._streams.clear()

    def send(self, **fields: Any) -> None:
        self._streams[-1].put_nowait(agent_pb2.ConnectResponse(**fields))

    def assign(self, *assignments: agent_pb2.Assignment) -> None:
        self.send(assignments=assignments)

    async def until(self, what: Callable[[], Any]) -> Any:
        """Wait until a condition is true, checking after each of the agent's messages; return its value."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(what)
        return what()

    async def connected(self, count: int = 1) -> agent_pb2.Hello:
        await self.until(lambda: len(self.hellos) >= count and self._streams)
        return self.hellos[-1]

    def states(self, job_id: str, number: int = 1) -> list[str]:
        return [
            job_pb2.AttemptState.Name(report.state).removeprefix("ATTEMPT_STATE_")
            for report in self.reports
            if (report.job_id, report.number) == (job_id, number)
        ]

    def end(self, job_id: str, number: int = 1) -> agent_pb2.AttemptReport | None:
        ends = (report for report in reversed(self.reports) if report.state in TERMINAL_STATES)
        return next((report for report in ends if (report.job_id, report.number) == (job_id, number)), None)

    async def ended(self, job_id: str, number: int = 1) -> agent_pb2.AttemptReport:
        end = await self.until(lambda: self.end(job_id, number))
        assert isinstance(end, agent_pb2.AttemptReport)
        return end

    async def running(self, job_id: str, number: int = 1) -> None:
        await self.until(lambda: "RUNNING" in self.states(job_id, number) or self.end(job_id, number))
        assert self.end(job_id, number) is None, self.end(job_id, number)

    async def answered(self, epoch: int, count: int = 1) -> str:
        """Return the error of the newest answer to a resize order, once that many answers have arrived."""

        def answers() -> list[str]:
            return [report.error for report in self.resized if report.epoch == epoch]

        await self.until(lambda: len(answers()) >= count)
        return answers()[-1]

    async def profile_over(self, count: int = 1) -> list[agent_pb2.ProfileReport]:
        """Return all reports of profiles, once that many profiles are done."""
        await self.until(lambda: sum(report.done for report in self.profiled) >= count)
        return self.profiled

    def output(self, read_id: str) -> bytes:
        return b"".join(piece.data for piece in self.uploads.get(read_id, []))

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ConnectResponse]:
        first = await anext(request_iterator)
        stream: asyncio.Queue[agent_pb2.ConnectResponse | None] = asyncio.Queue()
        welcome = agent_pb2.Welcome(term=self.term)
        welcome.heartbeat_interval.FromMicroseconds(int(self.heartbeat_seconds * 1e6))
        yield agent_pb2.ConnectResponse(welcome=welcome)
        self._streams.append(stream)
        self.hellos.append(first.hello)
        await self._tell()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (response := await stream.get()) is not None:
                yield response
        finally:
            reader.cancel()
            if stream in self._streams:
                self._streams.remove(stream)

    async def _read(self, requests: Any, stream: asyncio.Queue[agent_pb2.ConnectResponse | None]) -> None:
        async for request in requests:
            condition = request.condition if request.HasField("condition") else None
            self.beats += request == agent_pb2.ConnectRequest(beat=request.beat, condition=condition)
            if request.beat and not self.deaf:
                stream.put_nowait(agent_pb2.ConnectResponse(heard=request.beat))
            self.reports.extend(request.reports)
            self.progress.extend(request.progress)
            self.resized.extend(request.resized)
            self.profiled.extend(request.profiled)
            if request.HasField("inventory"):
                self.inventories.append(request.inventory)
            if self.acknowledge_ends:
                acks = [
                    agent_pb2.AttemptAck(job_id=report.job_id, number=report.number)
                    for report in request.reports
                    if report.state in TERMINAL_STATES
                ]
                if acks:
                    stream.put_nowait(agent_pb2.ConnectResponse(acks=acks))
            await self._tell()
        stream.put_nowait(None)

    async def UploadOutput(self, request_iterator: Any, context: Any) -> agent_pb2.UploadOutputResponse:
        read_id = ""
        try:
            async for piece in request_iterator:
                read_id = piece.read_id or read_id
                self.uploads.setdefault(read_id, []).append(piece)
                await self._tell()
        finally:
            self.finished_uploads.add(read_id)
            await self._tell()
        return agent_pb2.UploadOutputResponse()

    def ServeSession(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    async def StreamSamples(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[sample_service_pb2.StreamSamplesResponse]:
        async for request in request_iterator:
            self.samples.extend(request.samples)
            await self._tell()
            if self.directives:
                yield sample_service_pb2.StreamSamplesResponse(directives=self.directives)
                self.directives.clear()

    async def ListIncidents(self, request: Any, context: Any) -> contention_service_pb2.ListIncidentsResponse:
        raise NotImplementedError

    async def ListSamples(self, request: Any, context: Any) -> contention_service_pb2.ListSamplesResponse:
        raise NotImplementedError
