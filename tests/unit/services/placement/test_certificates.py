"""Agents' reported certificates in node messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from tests.unit.services.mesh import Mesh, eventually, running

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.security.validity import Validity
from cotenant.v1 import node_service_pb2 as node_pb2

READY, AWAY = node_pb2.NODE_STATE_READY, node_pb2.NODE_STATE_AWAY


async def test_an_agent_reports_its_certificates_validity() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        assert not (await node(mesh)).HasField("certificate")
        shown = Validity(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)).to_wire()
        agent._out.put_nowait(agent_pb2.ConnectRequest(certificate=shown))
        await until_so(mesh, lambda told: told.certificate == shown)
        agent.inventory.rack = "elsewhere"
        agent._out.put_nowait(agent_pb2.ConnectRequest(inventory=agent.inventory))
        await until_so(mesh, lambda told: told.inventory.rack == "elsewhere")
        assert (await node(mesh)).certificate == shown
        await agent.stop()
        await until_so(mesh, lambda told: told.state == AWAY)
        assert (await node(mesh)).certificate == shown  # it may be why
        agent.start()
        await until_so(mesh, lambda told: told.state == READY and not told.HasField("certificate"))


async def node(mesh: Mesh) -> node_pb2.Node:
    return await mesh.node("n1")


async def until_so(mesh: Mesh, holds: Callable[[node_pb2.Node], bool]) -> None:
    async def told() -> bool:
        return holds(await node(mesh))

    await eventually(told)
