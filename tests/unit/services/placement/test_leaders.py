"""Two placements on one store: the newer one leads, and the older one commits nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, patch

import grpc
import pytest
from tests.unit.services.histories import History
from tests.unit.services.mesh import CuttableStore, Mesh, Part, eventually, reason, running, spec, until

from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.rpc.channel import connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.placement.api import server as placement
from cotenant.services.placement.cluster.committer import Fenced, Halted
from cotenant.services.placement.placement_leadership import PlacementLeadership
from cotenant.services.placement.registry import agent_registry
from cotenant.store.port import NotLeader
from cotenant.v1 import node_service_pb2 as node_pb2


@asynccontextmanager
async def rival(mesh: Mesh) -> AsyncIterator[Part]:
    """Another placement on the same store."""
    store, server = CuttableStore(mesh.store), Server()
    service = await placement.start(server, store, serve_policies(server), mesh.placement_config)
    try:
        yield Part(store, server, service, await server.start())
    finally:
        await server.stop(0)
        await service.close()


def plan(job_id: str) -> placement_pb2.PlanPlacementRequest:
    candidate = placement_pb2.Candidate(job_id=job_id, number=1, spec=spec())
    return placement_pb2.PlanPlacementRequest(candidates=[candidate])


async def test_the_older_leader_is_fenced() -> None:
    async with running() as mesh:
        history = History()
        history.follow(mesh.store)
        agent = await mesh.agent("n1")
        async with rival(mesh):
            before = await mesh.records_left("placement/")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await mesh.plans.PlanPlacement(plan("a"))
            assert reason(refused.value) == "NOT_LEADER"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await mesh.plans.PlanPlacement(plan("b"))
            assert reason(refused.value) == "NOT_LEADER"
            with pytest.raises(grpc.aio.AioRpcError):
                await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1"), timeout=1)
            assert await mesh.records_left("placement/") == before
            assert not agent.assignments
            await history.stop()
            assert history.numbers == {}


async def test_the_older_leader_does_not_acknowledge_forgetting() -> None:
    """The newer leader may know records that it does not: the queue would not ask again."""
    forget = placement_pb2.ForgetAttemptsRequest(attempts=[placement_pb2.Victim(job_id="a", number=1)])
    async with running() as mesh:
        await mesh.plans.ForgetAttempts(forget)
        async with rival(mesh):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await mesh.plans.ForgetAttempts(forget)
            assert reason(refused.value) == "NOT_LEADER"


async def test_the_older_leader_reports_no_capacity_or_refusals_after_its_lease() -> None:
    """A queue without nodes schedules nothing until the newer leader reports a change."""
    asked = placement_pb2.GetCapacityRequest()
    async with running() as mesh:
        leadership_term = mesh.parts["placement"].service.leadership._leadership_term
        leadership_term.valid_until_seconds = 0.0  # as where etcd cannot be reached
        await mesh.plans.GetCapacity(asked)
        assert (await mesh.plans.PlanPlacement(plan("a"))).refused
        async with rival(mesh):
            for call, request in ((mesh.plans.GetCapacity, asked), (mesh.plans.PlanPlacement, plan("a"))):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request)
                assert reason(refused.value) == "NOT_LEADER"


async def test_the_older_leader_notices_without_writing() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        async with rival(mesh):
            await until(lambda: "another placement leads now" in agent.errors)


async def test_the_older_leader_never_leads_again() -> None:
    async with running() as mesh:
        await mesh.agent("n1")
        async with rival(mesh) as younger:
            with pytest.raises(grpc.aio.AioRpcError):
                await mesh.plans.PlanPlacement(plan("a"))
            await eventually(lambda: _deposed(mesh))
            term = await mesh.store.get("placement/leader")
            async with connect(f"127.0.0.1:{younger.port}") as channel:
                stub = placement_service_pb2_grpc.PlacementServiceStub(channel)
                answer = await stub.PlanPlacement(plan("a"))
            assert [refused.refusal.code for refused in answer.refused] == ["NO_NODES"]  # it has no agents
            assert await mesh.store.get("placement/leader") == term


async def _deposed(mesh: Mesh) -> bool:
    try:
        await mesh.plans.GetCapacity(placement_pb2.GetCapacityRequest(), timeout=1)
    except grpc.aio.AioRpcError as error:
        return reason(error) == "NOT_LEADER"
    return False


@pytest.mark.parametrize("after", [True, False], ids=["the answer", "the request"])
async def test_a_lost_answer_costs_a_new_term_but_no_agents(after: bool) -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        before = await mesh.store.get("placement/leader")
        mesh.parts["placement"].store.lose_answer = after
        mesh.parts["placement"].store.lose_request = not after
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        assert mesh.parts["placement"].store.failures == 1
        assert len(agent.assignments) == 1
        assert len(agent.welcomes) == 1
        now = await mesh.store.get("placement/leader")
        assert before is not None
        assert now is not None
        assert before.mod_revision < now.mod_revision
        late = await mesh.agent("n2")
        assert late.welcomes[0].term == now.mod_revision


async def test_a_failure_after_its_caller_was_cancelled_is_not_logged() -> None:
    """Python logs unretrieved task exceptions with a traceback."""
    loop, untold = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: untold.append(context))
    async with running() as mesh:
        await _cut_off(mesh.parts["placement"].service.leadership)
        for _ in range(3):  # what else was cancelled ends in the next turns, and names the failure until then
            await asyncio.sleep(0)
        gc.collect()
        assert not [context for context in untold if "never retrieved" in context["message"]]  # gRPC has others


async def _cut_off(leadership: PlacementLeadership) -> None:
    async def fenced() -> None:
        asyncio.get_running_loop().call_soon(calling.cancel)  # before the caller is woken by the failure
        raise Fenced("another placement has begun to lead")

    calling = asyncio.ensure_future(leadership.committed(fenced()))
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize("why", [Fenced("replaced"), Halted("reading again"), NotLeader("replaced")])
async def test_an_uncommitted_node_change_is_not_blamed_on_the_agent(why: Exception) -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        with (
            patch.object(mesh.parts["placement"].service.registry.committer, "commit", AsyncMock(side_effect=why)),
            patch.object(agent_registry, "log") as log,
        ):
            agent.inventory.memory_bytes += 1
            agent.send(inventory=agent.inventory)
            await until(lambda: log.info.called or log.exception.called)
            assert log.info.call_args.args == ("agent_message_not_committed",)
            assert not log.exception.called
        await until(lambda: len(agent.welcomes) > 1)
