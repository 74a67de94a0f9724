"""A service that is built for one term ends its calls with it, and every caller is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cotenant.leadership.leader_handlers import Replaced, Stage
from cotenant.v1 import node_service_pb2 as pb
from cotenant.v1.node_service_pb2_grpc import AgentServiceServicer, add_AgentServiceServicer_to_server

CONNECT = "/cotenant.v1.AgentService/Connect"


class Agents(AgentServiceServicer):
    """Says one word, and is silent from then on."""

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


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def stage(agents: Agents) -> Stage:
    made = Stage()
    made.add(add_AgentServiceServicer_to_server, agents, "cotenant.v1.AgentService")
    return made


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def test_a_stream_that_waits_ends_with_the_stage(stage: Stage, agents: Agents) -> None:
    stream = stage.stream(CONNECT, nothing(), None)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stage.close()
    with pytest.raises(Replaced):
        await waiting
    assert agents.over.is_set()


async def test_a_stream_of_which_something_is_being_written_ends_with_the_stage_too(
    stage: Stage, agents: Agents
) -> None:
    """gRPC tells a caller nothing whose call is cancelled while it writes: the caller would wait for ever."""
    stream = stage.stream(CONNECT, nothing(), None)
    await anext(stream)
    stage.close()
    await asyncio.sleep(0)  # where a writer would be cancelled
    with pytest.raises(Replaced):
        await anext(stream)
    assert agents.over.is_set()
