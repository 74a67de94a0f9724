"""Two agents with one node id, and two nodes on one machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.v1 import node_service_pb2 as node_pb2

READY, CORDONED, AWAY = node_pb2.NODE_STATE_READY, node_pb2.NODE_STATE_CORDONED, node_pb2.NODE_STATE_AWAY


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def on_machine(mesh: Mesh, node_id: str, machine: str = "boot-1", cpus: int = 0) -> SimulatedAgent:
    """Start an agent on a machine; its cores have CPUs from `cpus` on."""
    agent = SimulatedAgent(node_id, mesh.channel("placement"), gpus=1, cores=4)
    agent.inventory.machine = machine
    for gpu in agent.inventory.gpus:
        gpu.declared = True
    for place, core in enumerate(agent.inventory.cores):
        core.cpus[:] = [cpus + place]
    mesh.agents[node_id] = agent
    agent.start()
    await until(lambda: bool(agent.welcomes))
    return agent


async def becomes(mesh: Mesh, node_id: str, holds: Callable[[node_pb2.Node], bool]) -> node_pb2.Node:
    async def is_so() -> bool:
        return holds(await mesh.node(node_id))

    await eventually(is_so)
    return await mesh.node(node_id)


async def test_a_second_agent_with_a_nodes_id_is_refused_and_shown_on_the_node(mesh: Mesh) -> None:
    await mesh.agent("n1")
    other = SimulatedAgent("n1", mesh.channel("placement"))
    other.incarnation, other.inventory.address = "two", "10.0.0.9"
    mesh.agents["other"] = other
    other.start()
    await until(lambda: len(other.errors) > 1)
    assert "give each agent its own node id" in other.errors[0]
    node = await mesh.node("n1")
    (problem,) = node.inventory.problems
    assert problem.check == "node_id"
    assert "a second agent with this node id at 10.0.0.9 was refused" in problem.reason
    assert node.state == READY, "the first one works on"


async def test_of_two_nodes_that_offer_the_same_cpus_the_later_one_gets_no_work(mesh: Mesh) -> None:
    first = await on_machine(mesh, "a")
    await on_machine(mesh, "b", cpus=2)
    assert (await mesh.node("a")).state == READY
    late = await mesh.node("b")
    assert (late.state, late.state_owner) == (CORDONED, node_pb2.NODE_STATE_OWNER_HEALTH)
    assert late.state_reason == "it offers 2 CPUs that a on the same machine offers, which connected first"
    (problem,) = late.inventory.problems
    assert (problem.check, "--cpus" in problem.remedy) == ("machine", True)
    job_ids = [await mesh.submit() for _ in range(2)]
    await mesh.reach(job_ids[0], "RUNNING")
    await mesh.refused(job_ids[1], "CAPACITY")
    await first.stop()
    await becomes(mesh, "b", lambda node: node.state == READY and not node.inventory.problems)
    await mesh.reach(job_ids[1], "RUNNING")


async def test_disjoint_parts_and_other_machines_do_not_conflict(mesh: Mesh) -> None:
    await on_machine(mesh, "a")
    await on_machine(mesh, "b", cpus=4)
    await on_machine(mesh, "c", machine="boot-2")
    await on_machine(mesh, "d", machine="")
    await on_machine(mesh, "e", machine="")
    assert {node_id: (await mesh.node(node_id)).state for node_id in "abcde"} == dict.fromkeys("abcde", READY)


async def test_a_node_gets_work_again_after_a_conflict_ends(mesh: Mesh) -> None:
    await on_machine(mesh, "a")
    late = await on_machine(mesh, "b")
    assert (await mesh.node("b")).state == CORDONED
    for place, core in enumerate(late.inventory.cores):
        core.cpus[:] = [4 + place]
    late.send(inventory=late.inventory)
    await becomes(mesh, "b", lambda node: node.state == READY)
    late.inventory.machine = "boot-2"
    for place, core in enumerate(late.inventory.cores):
        core.cpus[:] = [place]
    late.send(inventory=late.inventory)
    assert (await becomes(mesh, "b", lambda node: node.inventory.machine == "boot-2")).state == READY


async def test_a_gpu_is_not_offered_twice_unless_it_is_declared(mesh: Mesh) -> None:
    for node_id, cpus in (("a", 0), ("b", 4)):
        agent = await on_machine(mesh, node_id, cpus=cpus)
        agent.inventory.gpus[0].uuid, agent.inventory.gpus[0].declared = "GPU-real", False
        agent.send(inventory=agent.inventory)
    node = await becomes(mesh, "b", lambda node: node.state == CORDONED)
    assert node.state_reason == "it offers 1 GPU that a on the same machine offers, which connected first"
