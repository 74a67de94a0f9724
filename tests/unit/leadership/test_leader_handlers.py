"""A service that is built for one term ends its calls with it, and every caller gets a status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cotenant.agent.v1 import agent_service_pb2 as pb
from cotenant.agent.v1.agent_service_pb2_grpc import AgentServiceServicer, add_AgentServiceServicer_to_server
from cotenant.leadership.leader_handlers import LeaderHandlers, LeaderReplaced

CONNECT = "/cotenant.agent.v1.AgentService/Connect"


class Agents(AgentServiceServicer):
    """Sends one message and then nothing."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def Connect(self, requests: AsyncIterator[pb.ConnectRequest], context: Any) -> AsyncIterator[Any]:
        try:
            yield pb.ConnectResponse(heard=1)
            await asyncio.Event().wait()
        finally:
            self.over.set()

    async def UploadOutput(self, requests: Any, context: Any) -> Any:
        raise NotImplementedError

    def ServeSession(self, requests: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def leader_handlers(agents: Agents) -> LeaderHandlers:
    made = LeaderHandlers()
    made.add(add_AgentServiceServicer_to_server, agents, "cotenant.agent.v1.AgentService")
    return made


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def test_a_waiting_stream_ends_with_the_term(leader_handlers: LeaderHandlers, agents: Agents) -> None:
    stream = leader_handlers.stream(CONNECT, nothing(), None)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    leader_handlers.close()
    with pytest.raises(LeaderReplaced):
        await waiting
    assert agents.over.is_set()


async def test_a_stream_that_is_being_written_ends_with_the_term(
    leader_handlers: LeaderHandlers, agents: Agents
) -> None:
    """gRPC sends no status if a call is cancelled while it writes: the caller would wait forever."""
    stream = leader_handlers.stream(CONNECT, nothing(), None)
    await anext(stream)
    leader_handlers.close()
    await asyncio.sleep(0)  # where a writer would be cancelled
    with pytest.raises(LeaderReplaced):
        await anext(stream)
    assert agents.over.is_set()
