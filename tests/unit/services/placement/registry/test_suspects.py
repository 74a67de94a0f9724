"""Nodes where launches or jobs keep failing are held, tried with one canary at a time, and released."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.failures.launch_health import HoldRules
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1.placement_service_pb2_grpc import PlacementServiceStub
from cotenant.services.placement.api.server import PlacementConfig
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import node_service_pb2 as node_pb2

READ_ONLY = "memory control group: Read-only file system"
CORDONED, READY = node_pb2.NODE_STATE_CORDONED, node_pb2.NODE_STATE_READY
SOON = HoldRules(canary_seconds=0.2, canary_seconds_max=0.4, quick_seconds=1.0)
LATE = HoldRules(canary_seconds=3600.0)


def config(rules: HoldRules) -> PlacementConfig:
    return PlacementConfig(heartbeat_seconds=0.5, lost_after_seconds=30.0, holding=rules)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(placement_config=config(LATE)) as mesh:
        yield mesh


async def sick_node(mesh: Mesh, node_id: str = "n1", jobs: int = 4) -> tuple[SimulatedAgent, list[str]]:
    """Make a node held: it fails to launch these jobs, which are left waiting."""
    agent = await mesh.agent(node_id)
    agent.cannot_launch = lambda order: READ_ONLY
    job_ids = [await mesh.submit(gpus=1) for _ in range(jobs)]
    await state(mesh, node_id, CORDONED)
    return agent, job_ids


async def state(mesh: Mesh, node_id: str, wanted: node_pb2.NodeState.ValueType) -> node_pb2.Node:
    await eventually(lambda: _is(mesh, node_id, wanted))
    return await mesh.node(node_id)


async def _is(mesh: Mesh, node_id: str, wanted: node_pb2.NodeState.ValueType) -> bool:
    return (await mesh.node(node_id)).state == wanted


async def test_a_node_that_cannot_launch_is_held_and_says_why(mesh: Mesh) -> None:
    await sick_node(mesh)
    node = await mesh.node("n1")
    assert (node.state_owner, node.state_reason) == (
        node_pb2.NODE_STATE_OWNER_HEALTH,
        f"unhealthy: cannot launch: {READ_ONLY}",
    )
    (problem,) = node.inventory.problems
    assert (problem.check, problem.action) == ("cannot_launch", resources_pb2.HEALTH_ACTION_HOLD)
    assert "cotenant uncordon" in problem.remedy


async def test_jobs_that_fit_only_held_nodes_wait_with_that_reason(mesh: Mesh) -> None:
    agent, job_ids = await sick_node(mesh)
    for job_id in job_ids:
        job = await mesh.refused(job_id, "NODES_HELD")
        assert f"n1 (cannot launch: {READ_ONLY})" in job.refusal.detail
        assert job.refusal.numbers["held_nodes"] == 1
        assert 0 < job.refusal.numbers["next_canary_seconds"] <= LATE.canary_seconds
    tried = len(agent.assignments)
    await mesh.submit(gpus=1)
    await mesh.refused(await mesh.submit(gpus=1), "NODES_HELD")
    assert len(agent.assignments) == tried


async def test_one_canary_runs_at_a_time_and_the_first_launch_ends_the_hold() -> None:
    async with running(placement_config=config(SOON)) as mesh:
        agent, job_ids = await sick_node(mesh)
        before = len(agent.assignments)
        await until(lambda: len(agent.assignments) >= before + 2)
        agent.answers_assignments, agent.cannot_launch = False, lambda order: ""
        tried = len(agent.assignments)
        await until(lambda: len(agent.assignments) == tried + 1)
        key = list(agent.assignments)[-1]
        await mesh.refused(await mesh.submit(gpus=1), "NODES_HELD")
        assert len(agent.assignments) == tried + 1
        agent.answers_assignments = True
        agent.report(key, job_pb2.ATTEMPT_STATE_RUNNING)
        await state(mesh, "n1", READY)
        for job_id in job_ids:
            assert (await mesh.reach(job_id, "RUNNING")).failures == 0


async def test_a_hold_survives_a_leader_change(mesh: Mesh) -> None:
    await sick_node(mesh)
    await mesh.restart("placement")
    node = await state(mesh, "n1", CORDONED)
    assert node.state_reason == f"unhealthy: cannot launch: {READ_ONLY}"


async def test_an_operator_ends_a_hold_by_uncordon(mesh: Mesh) -> None:
    agent, job_ids = await sick_node(mesh)
    agent.cannot_launch = lambda order: ""
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
    for job_id in job_ids:
        await mesh.reach(job_id, "RUNNING")
    assert not (await mesh.node("n1")).inventory.problems


async def test_a_hold_and_a_cordon_are_independent(mesh: Mesh) -> None:
    agent, _ = await sick_node(mesh)
    agent.cannot_launch = lambda order: ""  # else its waiting jobs may fail again between release and query
    await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1", reason="a new disk"))
    assert (await mesh.node("n1")).state_reason == "a new disk"
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))  # takes back the cordon, and that alone
    assert (await mesh.node("n1")).state_reason == f"unhealthy: cannot launch: {READ_ONLY}"
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
    assert (await mesh.node("n1")).state == READY


async def test_other_nodes_take_the_work_of_a_held_node(mesh: Mesh) -> None:
    _, job_ids = await sick_node(mesh)
    await mesh.agent("n2")
    for job_id in job_ids:
        job = await mesh.reach(job_id, "RUNNING")
        assert [part.node_id for part in job.attempt.allocations] == ["n2"]


async def test_an_unhealthy_gpu_does_not_make_its_node_suspect(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=3)
    agent.launch_cause, agent.cannot_launch = job_pb2.LAUNCH_CAUSE_DEVICE, refuse_first_gpu(agent)
    for job_id in [await mesh.submit(gpus=1) for _ in range(2)]:
        await mesh.reach(job_id, "RUNNING")
    assert (await mesh.node("n1")).state == READY


def refuse_first_gpu(agent: SimulatedAgent) -> Any:
    """Fail launches on the first GPU, and report it as unhealthy, as an agent does."""
    ill = agent.inventory.gpus[0].uuid

    def refuse(order: agent_pb2.Assignment) -> str:
        if ill not in {share.uuid for task in order.allocation.tasks for share in task.gpus}:
            return ""
        agent.inventory.gpus[0].unhealthy_reason = "it is held by pid 7"
        agent.change_inventory()
        return f"gpu_busy: {ill} is held by pid 7"

    return refuse


# Black holes -------------------------------------------------------------------------------------------------


async def two_nodes(mesh: Mesh) -> tuple[SimulatedAgent, SimulatedAgent]:
    """A node on which jobs of two tenants run well, and another one."""
    good = await mesh.agent("good", gpus=8)
    for tenant in ("a", "b"):
        job_id = await mesh.submit(gpus=1, tenant=tenant)
        await mesh.reach(job_id, "RUNNING")
        good.finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")
    await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="good"))
    return good, await mesh.agent("hole", gpus=8)


async def fail_at_once(mesh: Mesh, hole: SimulatedAgent, tenants: str, **fields: Any) -> None:
    for number, tenant in enumerate(tenants):
        job_id = await mesh.submit(gpus=1, tenant=tenant, command=["work", str(number)], **fields)
        await until(partial(hole.assignments.__contains__, (job_id, 1)))
        hole.finish((job_id, 1), code=1)
        await mesh.reach(job_id, "FAILED")


async def test_a_node_where_jobs_of_several_tenants_fail_at_once_is_held() -> None:
    async with running(placement_config=config(LATE)) as mesh:
        _, hole = await two_nodes(mesh)
        await fail_at_once(mesh, hole, "aba")
        node = await state(mesh, "hole", CORDONED)
        assert node.state_reason.startswith("unhealthy: 3 jobs of 2 tenants failed within 10 s of their start here")


async def test_failing_jobs_of_one_tenant_hold_no_node() -> None:
    async with running(placement_config=config(LATE)) as mesh:
        _, hole = await two_nodes(mesh)
        await fail_at_once(mesh, hole, "aaaaaa")
        assert (await mesh.node("hole")).state == READY


async def test_a_failed_canary_on_a_suspect_node_is_not_the_jobs_responsibility() -> None:
    async with running(placement_config=config(SOON)) as mesh:
        _, hole = await two_nodes(mesh)
        await fail_at_once(mesh, hole, "aba")
        await state(mesh, "hole", CORDONED)
        job_id = await mesh.submit(gpus=1, tenant="a")
        await until(lambda: (job_id, 1) in hole.assignments)
        hole.finish((job_id, 1), code=1)
        job = await mesh.reach(job_id, "QUEUED", lambda job: job.attempt.number == 1)
        assert job.failures == 0
        assert job.attempt.failure.blame == job_pb2.FAILURE_BLAME_INFRASTRUCTURE


async def test_a_successful_canary_ends_the_suspicion() -> None:
    async with running(placement_config=config(SOON)) as mesh:
        _, hole = await two_nodes(mesh)
        await fail_at_once(mesh, hole, "aba")
        await state(mesh, "hole", CORDONED)
        job_id = await mesh.submit(gpus=1, tenant="a")
        await mesh.reach(job_id, "RUNNING")
        await state(mesh, "hole", READY)  # it has outlived a quick failure


async def test_a_gang_across_held_and_healthy_nodes_can_be_the_canary() -> None:
    async with running(placement_config=config(SOON)) as mesh:
        sick = await mesh.agent("n1", gpus=1)
        await mesh.agent("n2", gpus=1)
        sick.cannot_launch = lambda order: READ_ONLY
        job_id = await mesh.submit(gpus=1, replicas=2)
        await state(mesh, "n1", CORDONED)
        sick.cannot_launch = lambda order: ""
        assert (await mesh.reach(job_id, "RUNNING")).failures == 0
        await state(mesh, "n1", READY)


async def test_held_nodes_count_in_total_but_not_in_free_capacity(mesh: Mesh) -> None:
    await sick_node(mesh)
    placement: Any = PlacementServiceStub(mesh.channel("placement"))
    capacity = (await placement.GetCapacity(placement_pb2.GetCapacityRequest())).capacity
    assert capacity.total_gpu_milli > 0  # or no queue would ask for a plan, and no job be tried there
    assert capacity.free_gpu_milli == 0
