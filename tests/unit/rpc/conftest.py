from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from cotenant.agent.v1 import agent_service_pb2 as agents_pb
from cotenant.agent.v1 import agent_service_pb2_grpc as agents_grpc
from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.internal.v1 import observation_service_pb2 as observation_pb
from cotenant.internal.v1 import observation_service_pb2_grpc as observation_grpc
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.server import Server
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc

JOBS = "cotenant.v1.JobService"
AGENTS = "cotenant.agent.v1.AgentService"
PREDICTOR = "cotenant.internal.v1.ObservationService"
TOKEN = "a-token-for-tests"

Answer = Callable[[Any, Any], Awaitable[None]]


async def nothing(request: Any, context: Any) -> None:
    """Answer at once."""


async def problem_of(call: Any) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return errors.from_error(failed.value)


async def consume(stream: Any) -> None:
    async for _ in stream:
        pass


class Jobs(jobs_grpc.JobServiceServicer):
    """Runs the test's behavior for each call, and records the requests."""

    def __init__(self) -> None:
        self.answer: Answer = nothing
        self.asked: list[Any] = []

    async def _ask(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        await self.answer(request, context)

    async def GetJob(self, request: Any, context: Any) -> Any:
        await self._ask(request, context)
        return jobs_pb.GetJobResponse()

    async def CreateJob(self, request: Any, context: Any) -> Any:
        await self._ask(request, context)
        return jobs_pb.CreateJobResponse()

    async def SimulateJob(self, request: Any, context: Any) -> Any:
        await self._ask(request, context)
        return jobs_pb.SimulateJobResponse()

    async def WatchJobs(self, request: Any, context: Any) -> Any:
        await self._ask(request, context)
        yield jobs_pb.WatchJobsResponse(synced=True)


class Agents(agents_grpc.AgentServiceServicer):
    """The same for calls with a request stream."""

    def __init__(self) -> None:
        self.answer: Answer = nothing

    async def Connect(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            await self.answer(request, context)
            yield agents_pb.ConnectResponse()

    async def UploadOutput(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            await self.answer(request, context)
        return agents_pb.UploadOutputResponse()

    def ServeSession(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError


class Predictor(observation_grpc.ObservationServiceServicer):
    """The same for a method that must not be retried."""

    def __init__(self) -> None:
        self.answer: Answer = nothing

    async def Observe(self, request: Any, context: Any) -> Any:
        await self.answer(request, context)
        return observation_pb.ObserveResponse()


class Mesh:
    """A server with scripted services, and channels to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.jobs = Jobs()  # type: ignore[abstract]  # the generated base answers the other methods
        self.agents = Agents()
        self.predictor = Predictor()
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, **options: Any) -> Server:
        server = Server(**{"address": self.address, "token": TOKEN} | options)
        server.add(jobs_grpc.add_JobServiceServicer_to_server, self.jobs, JOBS)
        server.add(agents_grpc.add_AgentServiceServicer_to_server, self.agents, AGENTS)
        server.add(observation_grpc.add_ObservationServiceServicer_to_server, self.predictor, PREDICTOR)
        self.port = await server.start()
        self._stack.push_async_callback(server.stop, 0)
        return server

    def channel(self, token: str = TOKEN) -> Channel:
        channel = connect(self.address, token)
        self._stack.push_async_callback(channel.close)
        return channel

    def job_stub(self, token: str = TOKEN) -> Any:
        return jobs_grpc.JobServiceStub(self.channel(token))

    def agent_stub(self, token: str = TOKEN) -> Any:
        return agents_grpc.AgentServiceStub(self.channel(token))

    def predictor_stub(self) -> Any:
        return observation_grpc.ObservationServiceStub(self.channel())


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        yield Mesh(stack)
