"""Sessions that placement relays: frames in both directions, and what is left when one side goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.errors import Problem
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.agents.agent_sessions import Session, Sessions
from cotenant.services.placement.api import session_relay
from cotenant.services.placement.api.session_relay import SessionRelay
from cotenant.v1.session_pb2 import SessionEnd, SessionFrame, SessionStart

NODE = "n1"


def frame(data: bytes) -> SessionFrame:
    return SessionFrame(data=data)


class Relayed:
    """A relay, an agent's stream that gets its orders, and the two sides of a session."""

    def __init__(self) -> None:
        self.sessions, self.stream = Sessions(), Session(NODE, "i")
        self.sessions.open(self.stream)
        self.relay = SessionRelay(self.sessions)

    async def caller(self, *frames: SessionFrame, hangs: bool = True) -> AsyncIterator[Any]:
        yield placement_pb2.OpenAttemptSessionRequest(start=SessionStart(id="job"), number=1, node_id=NODE)
        for one in frames:
            yield placement_pb2.OpenAttemptSessionRequest(frame=one)
        if hangs:
            await asyncio.Event().wait()

    async def agent(self, session_id: str, *frames: SessionFrame, hangs: bool = True) -> AsyncIterator[Any]:
        yield agent_pb2.ServeSessionRequest(session_id=session_id)
        for one in frames:
            yield agent_pb2.ServeSessionRequest(frame=one)
        if hangs:
            await asyncio.Event().wait()

    async def order(self) -> agent_pb2.SessionOrder:
        message = await anext(self.stream.messages())
        return message.sessions[0]

    def assert_nothing_left(self) -> None:
        assert self.relay._relayed == {}
        assert len(asyncio.all_tasks()) == 1


@pytest.fixture
def relayed() -> Relayed:
    return Relayed()


async def test_frames_go_both_ways_until_the_end(relayed: Relayed) -> None:
    opened = relayed.relay.open(relayed.caller(frame(b"1"), frame(b"2")))
    first = asyncio.create_task(anext(opened))
    order = await relayed.order()
    assert (order.start.id, order.number) == ("job", 1)
    served = relayed.relay.serve(relayed.agent(order.session_id, frame(b"a"), SessionFrame(end=SessionEnd(code=3))))
    got = [(await anext(served)).frame.data for _ in range(2)]
    assert got == [b"1", b"2"]
    assert (await first).frame.data == b"a"
    assert (await anext(opened)).frame.end.code == 3
    with pytest.raises(StopAsyncIteration):
        await anext(opened)
    with pytest.raises(StopAsyncIteration):
        await anext(served)
    relayed.assert_nothing_left()


@pytest.mark.parametrize("sent", range(3))
async def test_a_caller_that_goes_ends_the_agents_call(relayed: Relayed, sent: int) -> None:
    opened = relayed.relay.open(relayed.caller(*[frame(b"x")] * sent))
    waiting = asyncio.create_task(anext(opened))
    served = relayed.relay.serve(relayed.agent((await relayed.order()).session_id))
    for _ in range(sent):
        await anext(served)
    waiting.cancel()
    await asyncio.wait({waiting})
    with pytest.raises(StopAsyncIteration):
        await anext(served)
    relayed.assert_nothing_left()


@pytest.mark.parametrize("sent", range(3))
async def test_an_agent_that_goes_is_named_after_what_it_sent(relayed: Relayed, sent: int) -> None:
    opened = relayed.relay.open(relayed.caller())
    waiting = asyncio.create_task(anext(opened))
    agent = relayed.agent((await relayed.order()).session_id, *[frame(b"x")] * sent, hangs=False)
    serving = asyncio.create_task(anext(relayed.relay.serve(agent), None))
    for _ in range(sent):
        assert (await waiting).frame.data == b"x"
        waiting = asyncio.create_task(anext(opened))
    with pytest.raises(Problem, match="agent of n1 is disconnected, which ends the session; the job goes on"):
        await waiting
    assert await serving is None
    relayed.assert_nothing_left()


async def test_an_agent_that_is_away_or_silent_is_named(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_relay, "ANSWER_SECONDS_MAX", 0.01)
    with pytest.raises(Problem, match="does not answer"):
        await anext(relayed.relay.open(relayed.caller()))
    relayed.sessions.close_all()
    with pytest.raises(Problem, match="is disconnected"):
        await anext(relayed.relay.open(relayed.caller()))
    relayed.assert_nothing_left()


async def test_a_session_that_is_over_or_taken_is_not_served(relayed: Relayed) -> None:
    with pytest.raises(StopAsyncIteration):
        await anext(relayed.relay.serve(relayed.agent("unknown")))
    opened = relayed.relay.open(relayed.caller(frame(b"1")))
    waiting = asyncio.create_task(anext(opened))
    session_id = (await relayed.order()).session_id
    served = relayed.relay.serve(relayed.agent(session_id))
    await anext(served)
    with pytest.raises(StopAsyncIteration):
        await anext(relayed.relay.serve(relayed.agent(session_id)))
    waiting.cancel()
    await asyncio.wait({waiting})
    await served.aclose()


async def test_a_slow_reader_holds_back_both_hops(relayed: Relayed) -> None:
    sent = 0

    async def flood() -> AsyncIterator[Any]:
        nonlocal sent
        async for request in relayed.caller(*[frame(b"x")] * 1000):
            sent += 1
            yield request

    opened = relayed.relay.open(flood())
    waiting = asyncio.create_task(anext(opened))
    await relayed.order()
    for _ in range(100):
        await asyncio.sleep(0)
    assert sent < 20
    waiting.cancel()
    await asyncio.wait({waiting})
    relayed.assert_nothing_left()
