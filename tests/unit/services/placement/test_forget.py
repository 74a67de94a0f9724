"""Nodes that an operator gives up, and returning ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.services.mesh import Mesh, eventually, reason, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import duration
from cotenant.services.placement.registry import node_removal
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import node_service_pb2 as node_pb2


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def away(mesh: Mesh, node_id: str) -> None:
    async def is_so() -> bool:
        return (await mesh.node(node_id)).state == node_pb2.NODE_STATE_AWAY

    await eventually(is_so)


async def forget(mesh: Mesh, node_id: str, *, powered_off: bool = False) -> node_pb2.Node:
    request = node_pb2.ForgetNodeRequest(id=node_id, reason="burnt", powered_off=powered_off)
    response: node_pb2.ForgetNodeResponse = await mesh.nodes.ForgetNode(request)
    return response.node


async def nodes(mesh: Mesh) -> list[str]:
    return [node.id for node in (await mesh.nodes.ListNodes(node_pb2.ListNodesRequest())).nodes]


async def test_attempts_of_a_forgotten_node_start_elsewhere_at_once(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await mesh.agent("n2")
    await agent.stop()
    await away(mesh, "n1")
    await forget(mesh, "n1")
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.attempt.allocations[0].node_id == "n2"
    assert job.past_attempts[-1].state == job_pb2.ATTEMPT_STATE_LOST
    assert job.past_attempts[-1].message == "n1 was given up by an operator: burnt"
    assert await nodes(mesh) == ["n2"]
    await mesh.restart("placement")
    assert await nodes(mesh) == ["n2"]


async def test_a_node_that_says_goodbye_is_removed_at_once(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await mesh.agent("n2")
    agent.send(goodbye=agent_pb2.Goodbye(reason="its Slurm job 7 is being ended"))
    await until(lambda: len(agent.errors) > 0 or len(agent.welcomes) > 1)
    await agent.stop()
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.past_attempts[-1].message == "n1 left: its Slurm job 7 is being ended"


async def test_an_outer_job_that_ends_drains_its_node_without_a_word_about_health(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.inventory.problems.add(
        check="outer_job", action=resources_pb2.HEALTH_ACTION_DRAIN, reason="the time of Slurm job 7 is nearly over"
    )
    agent.send(inventory=agent.inventory)
    await mesh.agent("n2")
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert agent.stops[0].reason == job_pb2.STOP_REASON_DRAINED
    assert job.past_attempts[0].stop_detail == "was on n1: the time of Slurm job 7 is nearly over"
    assert (job.failures, job.preemptions, list(job.avoided_nodes)) == (0, 0, [])


async def test_a_returning_node_is_new_and_its_old_attempts_are_stopped(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    first = await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    await away(mesh, "n1")
    await forget(mesh, "n1")
    await mesh.reach(job_id, "QUEUED")
    agent.refuses_to_stop = True
    agent.start()
    await until(lambda: bool(agent.stops))
    order = agent.stops[0]
    assert (order.job_id, order.number, order.reason) == (job_id, 1, job_pb2.STOP_REASON_SUPERSEDED)
    assert (await mesh.job(job_id)).attempt.number == 1, "until it is gone it holds its node"
    agent.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.attempt.epoch > first.attempt.epoch


async def test_jobs_that_must_not_run_twice_are_waited_for_unless_powered_off(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    job_id = await mesh.submit(stop_after_disconnected=duration(3600))
    await mesh.reach(job_id, "RUNNING")
    await mesh.agent("n2", gpus=1)
    await agent.stop()
    await away(mesh, "n1")
    told = await forget(mesh, "n1")
    assert told.attempts == [f"{job_id}/1"]
    assert await nodes(mesh) == ["n1", "n2"]
    assert (await mesh.job(job_id)).attempt.number == 1
    assert not (await forget(mesh, "n1", powered_off=True)).attempts
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert await nodes(mesh) == ["n2"]


async def test_a_gang_stops_on_its_other_nodes_before_the_node_is_removed(mesh: Mesh) -> None:
    one, other = await mesh.agent("n1", gpus=1), await mesh.agent("n2", gpus=1)
    job_id = await mesh.submit(replicas=2)
    await mesh.reach(job_id, "RUNNING")
    other.refuses_to_stop = True
    await one.stop()
    await away(mesh, "n1")
    assert (await forget(mesh, "n1")).attempts == [f"{job_id}/1"]
    await until(lambda: bool(other.stops))
    assert await nodes(mesh) == ["n1", "n2"]
    other.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)

    async def gone() -> bool:
        return await nodes(mesh) == ["n2"]

    await eventually(gone)


async def test_the_next_leader_finishes_a_removal(mesh: Mesh) -> None:
    one, other = await mesh.agent("n1", gpus=1), await mesh.agent("n2", gpus=1)
    job_id = await mesh.submit(replicas=2)
    await mesh.reach(job_id, "RUNNING")
    other.refuses_to_stop = True
    await one.stop()
    await away(mesh, "n1")
    await forget(mesh, "n1")
    await mesh.restart("placement")
    await until(lambda: len(other.welcomes) == 2)
    assert await nodes(mesh) == ["n1", "n2"]
    other.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)

    async def gone() -> bool:
        return await nodes(mesh) == ["n2"]

    await eventually(gone)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_late_retry_does_not_affect_a_new_node_with_the_id(mesh: Mesh, restarts: bool) -> None:
    agent = await mesh.agent("n1")
    await agent.stop()
    await away(mesh, "n1")
    request = node_pb2.ForgetNodeRequest(id="n1", reason="burnt", powered_off=True, request_id="asked")
    await mesh.nodes.ForgetNode(request)
    assert (await mesh.nodes.ForgetNode(request)).node.id == "n1", "it is done"
    if restarts:
        await mesh.restart("placement")
    assert await nodes(mesh) == []
    agent.start()
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    await away(mesh, "n1")
    await mesh.nodes.ForgetNode(request)
    assert await nodes(mesh) == ["n1"]
    agent.start()
    await until(lambda: mesh.parts["placement"].service.cluster.nodes["n1"].connected)
    assert (await mesh.job(job_id)).attempt.number == 1


async def test_request_ids_of_the_last_removed_nodes_are_kept(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_removal, "FORGOTTEN_MAX", 2)
    for node_id in ("n1", "n2", "n3"):
        await (await mesh.agent(node_id)).stop()
        await away(mesh, node_id)
        await mesh.nodes.ForgetNode(node_pb2.ForgetNodeRequest(id=node_id, request_id=f"asked of {node_id}"))
    assert len(await mesh.records_left("placement/forgotten/")) == 2
    await mesh.restart("placement")
    left = mesh.parts["placement"].service.cluster.forgotten
    assert {node_id: list(one.request_ids) for node_id, one in left.items()} == {
        "n2": ["asked of n2"],
        "n3": ["asked of n3"],
    }


async def test_forgetting_a_connected_or_unknown_node_is_refused(mesh: Mesh) -> None:
    await mesh.agent("n1")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await forget(mesh, "n1")
    assert reason(caught.value) == "NODE_CONNECTED"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await forget(mesh, "n2")
    assert reason(caught.value) == "NODE_NOT_FOUND"


async def test_draining_a_node_that_was_just_forgotten_fails(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    await agent.stop()
    await away(mesh, "n1")
    registry = mesh.parts["placement"].service.registry
    lock = registry._lock("n1")
    async with lock:
        draining = asyncio.ensure_future(mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1")))
        await until(lambda: lock._waiters)
        registry.cluster.remove_node(registry.cluster.nodes["n1"])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await draining
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
