"""Agents' reported clocks, loop lag and name errors in node messages."""

from __future__ import annotations

import time

import pytest
from tests.unit.services.mesh import eventually, running

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import HEALTH_ACTIONS, timestamp
from cotenant.core.model.node import HealthAction
from cotenant.services.placement.cluster.agent_conditions import (
    BEATS_COMPARED,
    CLOCK_SECONDS_MAX,
    ERROR_LENGTH_MAX,
    ERRORS_MAX,
    ReportedCondition,
)
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1.condition_pb2 import LoopLag


def beat(wall: float) -> agent_pb2.AgentCondition:
    return agent_pb2.AgentCondition(wall_time=timestamp(wall))


async def test_an_agents_condition_is_shown_while_it_is_connected() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        told = await mesh.node("n1")
        assert told.heartbeat_interval.ToMilliseconds() > 0
        assert not told.HasField("clock_offset")
        condition = agent_pb2.AgentCondition(loop_lag=LoopLag(windows_behind=2), name_errors=["it cannot resolve x"])
        condition.tls_error = "CERTIFICATE_EXPIRED: it was valid until today"
        condition.wall_time.CopyFrom(timestamp(time.time() + 3600))
        agent._out.put_nowait(agent_pb2.ConnectRequest(condition=condition))

        async def shown() -> bool:
            told = await mesh.node("n1")
            return told.loop_lag.windows_behind == 2 and abs(told.clock_offset.seconds - 3600) < 60

        await eventually(shown)
        problem, certificate = (await mesh.node("n1")).inventory.problems
        assert (problem.check, problem.reason) == ("names", "it cannot resolve x")
        assert (certificate.check, "CERTIFICATE_EXPIRED" in certificate.reason) == ("certificate", True)
        assert HEALTH_ACTIONS.from_wire(problem.action) is HealthAction.IGNORE
        await agent.stop()

        async def gone() -> bool:
            told = await mesh.node("n1")
            return not told.HasField("loop_lag") and not told.HasField("clock_offset") and not told.inventory.problems

        await eventually(gone)


def test_the_least_delayed_heartbeat_gives_the_clock_offset() -> None:
    told = ReportedCondition()
    for sent, arrived in ((1000.0, 3.0), (1001.0, 1.0), (1002.0, 9.0)):
        told.take(beat(sent), now=iter([arrived]).__next__)
    assert told.clock_offset(wall=lambda: 1010.0, now=lambda: 10.0) == pytest.approx(0.0)


def test_a_clock_set_back_shows_after_three_heartbeats() -> None:
    told = ReportedCondition()
    told.take(beat(1000.0), now=lambda: 0.0)
    for number in range(1, BEATS_COMPARED + 1):
        told.take(beat(900.0 + number), now=iter([float(number)]).__next__)
    assert told.clock_offset(wall=lambda: 1010.0, now=lambda: 10.0) == pytest.approx(-100.0)


def test_a_jump_of_placements_clock_shows_at_once() -> None:
    told = ReportedCondition()
    told.take(beat(1000.0), now=lambda: 0.0)
    assert told.clock_offset(wall=lambda: 1500.0, now=lambda: 1.0) == pytest.approx(-499.0)


def test_reported_name_errors_are_bounded() -> None:
    told = ReportedCondition()
    condition = agent_pb2.AgentCondition(name_errors=["x" * 1000] * 100)
    condition.wall_time.seconds = 2**62
    told.take(condition)
    message = node_pb2.Node()
    told.describe(message)
    assert message.clock_offset.ToSeconds() == CLOCK_SECONDS_MAX
    assert [len(one.reason) for one in message.inventory.problems] == [ERROR_LENGTH_MAX] * ERRORS_MAX
