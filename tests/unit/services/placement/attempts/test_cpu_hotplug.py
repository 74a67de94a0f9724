"""CPUs of a node go offline and come back while jobs run there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.histories import History
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.store.keyspace import HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import node_service_pb2 as node_pb2


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    """A mesh that checks at every commit that no core has two owners."""
    history = History()
    async with running(MemoryStore(limit=HistoryLimit(revisions=1_000_000))) as mesh:
        history.follow(mesh.store)
        yield mesh
        await history.stop()
        assert history.wrong == []


def off_line(agent: SimulatedAgent, gone: Iterable[int]) -> None:
    """Make an agent report its inventory without some cores."""
    kept = [core for core in agent.inventory.cores if core.id not in set(gone)]
    del agent.inventory.cores[:]
    agent.inventory.cores.extend(kept)
    agent.change_inventory()


def on_line(agent: SimulatedAgent, *cores: int) -> None:
    """Make an agent report more cores."""
    agent.inventory.cores.extend(resources_pb2.Core(id=core, cpus=[core]) for core in cores)
    agent.change_inventory()


def cores_held(job: job_pb2.Job) -> set[int]:
    return {core for part in job.attempt.allocations for task in part.tasks for core in task.core_ids}


async def holding(mesh: Mesh, job_id: str, count: int, without: Iterable[int] = ()) -> job_pb2.Job:
    """Wait until a job holds so many cores, none of the given ones, and no resize is in progress."""

    def so(job: job_pb2.Job) -> bool:
        tasks = [task for part in job.attempt.allocations for task in part.tasks]
        held = cores_held(job)
        return len(held) == count and not held & set(without) and not any(task.target_cores for task in tasks)

    return await mesh.reach(job_id, "RUNNING", so)


async def test_a_job_runs_on_with_fewer_cores_and_gets_them_back(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=4)
    job_id = await mesh.submit(cores=4)
    await mesh.reach(job_id, "RUNNING")
    off_line(agent, [3])
    job = await holding(mesh, job_id, 3, [3])
    assert job.attempt.number == 1
    assert job.attempt.sizing == "core 3 of n1 went offline"
    (order,) = agent.resizes
    assert sorted(order.allocation.tasks[0].cpu_ids) == [0, 1, 2]
    assert (await mesh.node("n1")).used_cores == 3
    on_line(agent, 3)
    job = await holding(mesh, job_id, 4)
    assert job.attempt.sizing == "n1 has all of its cores again"
    assert (job.attempt.number, job.failures) == (1, 0)


async def test_a_free_core_replaces_an_offline_one(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=6)
    job_id = await mesh.submit(cores=3)
    held = cores_held(await mesh.reach(job_id, "RUNNING"))
    gone = min(held)
    off_line(agent, [gone])
    job = await holding(mesh, job_id, 3, [gone])
    assert held - {gone} < cores_held(job)


async def test_a_returned_core_is_allocated_once(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2, cores=4)
    first, second = await mesh.submit(cores=2), await mesh.submit(cores=2)
    held = cores_held(await mesh.reach(first, "RUNNING"))
    await mesh.reach(second, "RUNNING")
    gone = min(held)
    off_line(agent, [gone])
    await holding(mesh, first, 1)
    assert len(cores_held(await mesh.job(second))) == 2
    on_line(agent, gone)
    await holding(mesh, first, 2)
    assert not cores_held(await mesh.job(first)) & cores_held(await mesh.job(second))


@pytest.mark.deep
async def test_a_job_without_cores_restarts_elsewhere_without_a_failure(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=2)
    job_id = await mesh.submit(cores=2)
    await mesh.reach(job_id, "RUNNING")
    await mesh.agent("n2", gpus=1, cores=2)
    off_line(agent, [0, 1])
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.attempt.allocations[0].node_id == "n2"
    assert agent.stops[0].reason == job_pb2.STOP_REASON_UNHEALTHY
    past = job.past_attempts[-1]
    assert past.stop_detail == "was on n1: all cores of rank 0 have gone offline"
    assert (past.failure.failure_class, past.failure.blame) == (
        "node_unhealthy",
        job_pb2.FAILURE_BLAME_INFRASTRUCTURE,
    )
    assert job.failures == 0


async def test_an_offline_sibling_removes_only_itself(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=2)
    for core in agent.inventory.cores:
        core.cpus.append(core.id + 2)
    agent.change_inventory()
    await eventually(lambda: has_cpus(mesh, 4))
    job_id = await mesh.submit(cores=2)
    await mesh.reach(job_id, "RUNNING")
    del agent.inventory.cores[1].cpus[1]
    agent.change_inventory()
    await until(lambda: bool(agent.resizes))
    assert sorted(agent.resizes[0].allocation.tasks[0].cpu_ids) == [0, 1, 2]
    await holding(mesh, job_id, 2)


async def has_cpus(mesh: Mesh, count: int) -> bool:
    return sum(len(core.cpus) for core in (await mesh.node("n1")).inventory.cores) == count


async def test_cores_that_went_offline_during_a_disconnect_are_removed_on_reconnect(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=4)
    job_id = await mesh.submit(cores=4)
    await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    await eventually(lambda: away(mesh))
    off_line(agent, [2, 3])
    agent.start()
    await holding(mesh, job_id, 2, [2, 3])


async def away(mesh: Mesh) -> bool:
    return (await mesh.node("n1")).state == node_pb2.NODE_STATE_AWAY


async def test_a_job_in_a_resize_is_adapted_after_the_resize(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=4)
    agent.answers_resizes = False
    job_id = await mesh.submit(cores=4)
    await mesh.reach(job_id, "RUNNING")
    off_line(agent, [3])
    await until(lambda: len(agent.resizes) == 1)
    off_line(agent, [2])
    agent.answer_resize(agent.resizes[0])
    await until(lambda: len(agent.resizes) == 2)
    assert sorted(agent.resizes[1].allocation.tasks[0].cpu_ids) == [0, 1]
    agent.answer_resize(agent.resizes[1])
    await holding(mesh, job_id, 2, [2, 3])


async def test_a_stuck_resize_ends_on_the_available_cores(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=4)
    agent.cannot_resize = lambda order: "CPUs [2] are off line" if 2 in order.allocation.tasks[0].cpu_ids else ""
    job_id = await mesh.submit(cores=4)
    await mesh.reach(job_id, "RUNNING")
    off_line(agent, [3])  # and 2 goes before the order comes, and the way back is barred too
    await until(lambda: len(agent.resizes) >= 2)
    off_line(agent, [2])
    await holding(mesh, job_id, 2, [2, 3])
