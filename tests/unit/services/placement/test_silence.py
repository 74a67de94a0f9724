"""A placement that could not listen counts no node as silent; one that may have been replaced confirms nothing."""

from __future__ import annotations

import time

import grpc
import pytest
from tests.unit.services.mesh import QUICK, Mesh, Part, again, reason, running, until, without

from cotenant import fail_points
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.errors import Problem
from cotenant.core.model.lifecycle import AttemptState
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.services.placement.placement_leadership import LEADER
from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2

HASTY = without(QUICK, heartbeat_seconds=0.5, lost_after_seconds=2.0)


def placement_of(mesh: Mesh) -> Part:
    return mesh.parts["placement"]


async def looked(mesh: Mesh, times: int = 2) -> None:
    """Wait until placement has checked for silent nodes so many times."""
    registry, count = placement_of(mesh).service.registry, 0
    tick = registry.expire_silent_nodes

    def counted() -> None:
        nonlocal count
        tick()
        count += 1

    registry.expire_silent_nodes = counted
    await until(lambda: count >= times)
    registry.expire_silent_nodes = tick


async def test_a_halted_placement_loses_no_node() -> None:
    async with running(placement_config=HASTY) as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        time.sleep(1.2 * HASTY.lost_after_seconds)  # noqa: ASYNC251  # nobody gets a turn of this loop
        placement_of(mesh).service.registry.expire_silent_nodes()  # as where it comes first of all that waits
        await looked(mesh)
        assert len(agent.welcomes) == 1
        job = await mesh.job(job_id)
        assert (job.phase, job.attempt.number) == (job_pb2.JOB_PHASE_RUNNING, 1)


async def test_a_store_outage_loses_no_node() -> None:
    async with running(placement_config=HASTY) as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        store = placement_of(mesh).store
        store.away = True
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1"), timeout=5)
        assert reason(refused.value) == "STORE_AWAY"
        await agent.stop()
        agent.start()
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 1.2 * HASTY.lost_after_seconds and bool(agent.errors))
        assert "the store does not answer placement; nothing was decided" in agent.errors
        store.away = False
        await until(lambda: len(agent.welcomes) == 2)
        await looked(mesh)
        job = await mesh.job(job_id)
        assert (job.phase, job.attempt.number) == (job_pb2.JOB_PHASE_RUNNING, 1)


async def test_agents_stay_connected_during_a_store_outage_and_their_reports_are_saved() -> None:
    async with running(placement_config=HASTY) as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        mesh.parts["placement"].store.away = True
        agent.finish((job_id, 1))
        await until(lambda: _in_doubt(mesh))
        await looked(mesh)
        assert len(agent.welcomes) == 1
        assert (await mesh.job(job_id)).phase == job_pb2.JOB_PHASE_RUNNING
        mesh.parts["placement"].store.away = False
        await mesh.reach(job_id, "SUCCEEDED")
        assert len(agent.welcomes) == 1
        await again(lambda: mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1")))


def _in_doubt(mesh: Mesh) -> bool:
    try:
        placement_of(mesh).service.leadership.check()
    except Problem:
        return True
    return False


async def test_heartbeats_are_answered_only_while_no_other_process_can_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that stops when disconnected counts from the last answer; the next leader counts from its start."""
    async with running(placement_config=HASTY) as mesh:
        agent = await mesh.agent("n1")
        heard: list[int] = []
        take = agent._take

        def listen(message: agent_pb2.ConnectResponse) -> None:
            heard.append(message.heard)
            take(message)

        monkeypatch.setattr(agent, "_take", listen)
        leadership_term = placement_of(mesh).service.leadership._leadership_term

        async def answered(beat: int) -> bool:
            """Return whether a heartbeat is answered, which happens before the order that follows it."""
            agent.send(beat=beat)
            agent.send(inventory=agent.inventory)
            seen = placement_of(mesh).service.cluster.nodes["n1"].seen_seconds
            await until(lambda: placement_of(mesh).service.cluster.nodes["n1"].seen_seconds > seen)
            released = len(agent.released)
            await mesh.nodes.ReleaseGpu(node_pb2.ReleaseGpuRequest(id="n1", gpu_uuid=agent.inventory.gpus[0].uuid))
            await until(lambda: len(agent.released) > released)
            return beat in heard

        assert await answered(11)
        now = time.monotonic()
        leadership_term.valid_until_seconds = now - 10
        assert not await answered(22)
        leadership_term.valid_until_seconds = now + 60
        assert await answered(33)


async def test_an_uncertain_leader_disconnects_agents_now_and_then() -> None:
    """They may reach the next leader, which would otherwise give up their jobs."""
    async with running(placement_config=without(HASTY, lost_after_seconds=4.0)) as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        leadership_term = placement_of(mesh).service.leadership._leadership_term
        leadership_term.valid_until_seconds = time.monotonic()
        await until(lambda: len(agent.welcomes) >= 3)  # it finds nobody else
        leadership_term.valid_until_seconds = time.monotonic() + 60
        await looked(mesh)
        job = await mesh.job(job_id)
        assert (job.phase, job.attempt.number) == (job_pb2.JOB_PHASE_RUNNING, 1)


async def test_a_leader_without_a_lease_certainly_leads() -> None:
    async with running() as mesh:
        held = HeldTerm(mesh.store, LEADER)
        assert held.valid_until_seconds > time.monotonic() + 1e9
        lease = await mesh.store.grant(2.0)
        held = HeldTerm(mesh.store, LEADER, lease=lease)
        assert held.valid_until_seconds < time.monotonic()
        held.extend(5.0)
        assert held.valid_until_seconds == 7.0


async def test_a_start_is_published_as_it_was_committed_whatever_happened_since() -> None:
    """A placement that was halted right after the commit gives its nodes up, and only then goes on."""
    async with running() as mesh:
        await mesh.agent("n1")
        placement = placement_of(mesh)

        async def give_up(point: str) -> None:
            if point == "placement.started":
                placement.store.away = True  # the end is not committed
                (live,) = placement.service.cluster.attempts.values()
                placement.service.attempts.give_up(live, "n1", AttemptState.LOST, "n1 has been away for 7 s")

        with fail_points.armed(give_up):
            job_id = await mesh.submit()
            await until(lambda: placement.service.events.committed(job_id) is not None)
            assert placement.service.events.committed(job_id).attempt.state == job_pb2.ATTEMPT_STATE_ASSIGNED
            assert (await mesh.job(job_id)).attempt.state in (0, job_pb2.ATTEMPT_STATE_ASSIGNED)
        placement.store.away = False
        await until(lambda: placement.service.events.committed(job_id).attempt.state != job_pb2.ATTEMPT_STATE_ASSIGNED)
