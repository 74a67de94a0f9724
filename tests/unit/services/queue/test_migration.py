"""Cheap jobs are migrated so that a gang can start, over the real mesh, through crashes of services and nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.histories import History
from tests.unit.services.mesh import BACKFILL, QUICK, Mesh, eventually, running, until

from cotenant.codec.job_events import kind_of
from cotenant.services.placement.planning import tentative_reservations
from cotenant.services.queue.scheduling import scheduler
from cotenant.store.keyspace import HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

AT_ONCE = {"settled_seconds": "0", "gain_min": "0"}
SETTLED = {"settled_seconds": "1800", "gain_min": "0"}
SERVER = job_pb2.LOCALITY_SERVER


@asynccontextmanager
async def fragmented(
    options: dict[str, str] = AT_ONCE, **fields: object
) -> AsyncIterator[tuple[Mesh, History, list[str]]]:
    """Yield a mesh that is `half_taken`; at the end check that nothing was ever allocated twice."""
    placement = replace(QUICK, placement="locality", options={"locality": options})
    store = MemoryStore(limit=HistoryLimit(revisions=1_000_000))
    async with running(store, placement_config=placement) as mesh:
        history = History()
        history.follow(store)
        yield mesh, history, await half_taken(mesh, history, **fields)
        await history.stop()
        assert history.wrong == []
        assert not [key for key, times in history.ran.items() if times > 1]


async def half_taken(mesh: Mesh, history: History, **fields: object) -> list[str]:
    """Add two nodes of 2 GPUs, each with one GPU taken by a job; return the job ids."""
    history.watch(await mesh.agent("n1", gpus=2, cores=24))
    jobs = [await mesh.submit(gpus=1, grace=5.0, **fields) for _ in range(2)]
    for job_id in jobs:
        await mesh.reach(job_id, "RUNNING")
    history.watch(await mesh.agent("n2", gpus=2, cores=24))
    jobs.append(await mesh.submit(gpus=1, grace=5.0, **fields))
    await mesh.reach(jobs[-1], "RUNNING")
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=jobs[1]))
    await mesh.reach(jobs.pop(1), "CANCELLED")
    return jobs


def nodes_of(job: job_pb2.Job) -> list[str]:
    return [part.node_id for part in job.attempt.allocations]


async def moved(mesh: Mesh, jobs: list[str]) -> job_pb2.Job:
    """Return the job that was ordered to migrate."""
    told = [order.job_id for agent in mesh.agents.values() for order in agent.stops]
    (job_id,) = set(told) & set(jobs)
    return await mesh.job(job_id)


def stubborn(mesh: Mesh, *, stubborn: bool = True) -> None:
    for agent in mesh.agents.values():
        agent.refuses_to_stop = stubborn


def give_in(mesh: Mesh) -> None:
    """Stop all attempts that were ordered to stop."""
    stubborn(mesh, stubborn=False)
    for agent in mesh.agents.values():
        for order in agent.stops:
            agent.end((order.job_id, order.number), job_pb2.ATTEMPT_STATE_STOPPED)


async def stopping(mesh: Mesh, jobs: list[str]) -> str:
    """Wait until one of the jobs is ordered to stop, and return its id."""
    await until(lambda: any(o.job_id in jobs for agent in mesh.agents.values() for o in agent.stops))
    mover = await moved(mesh, jobs)
    await mesh.reach(mover.id, "STOPPING")
    return mover.id


async def test_a_cheap_job_is_migrated_so_that_a_gang_fits_on_one_server() -> None:
    async with fragmented() as (mesh, _, jobs):
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        started = await mesh.reach(gang, "RUNNING")
        mover = await moved(mesh, jobs)
        mover = await mesh.reach(mover.id, "RUNNING", lambda job: job.attempt.number == 2)
        assert set(nodes_of(started)).isdisjoint(nodes_of(mover))
        assert (mover.migrations, mover.preemptions, mover.failures) == (1, 0, 0)
        assert mover.past_attempts[0].stop_reason == job_pb2.STOP_REASON_MIGRATED
        (where,) = nodes_of(mover)
        told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=mover.id))
        story = [(kind_of(event), event.detail) for event in told.events]
        assert ("migrated", f"continues on {where}, so that {gang} can start") in story
        assert [what for what, _ in story][-4:] == ["stopping", "migrated", "assigned", "running"]


async def test_both_places_are_reserved_while_a_migrating_job_stops() -> None:
    async with fragmented() as (mesh, _, jobs):
        stubborn(mesh)
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        waiting = await mesh.refused(gang, "MAKING_ROOM")
        assert "1 job to move elsewhere" in waiting.refusal.detail
        explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=mover))
        assert f"so that {gang} can start" in explained.summary
        thieves = [await mesh.submit(gpus=1, priority=9) for _ in range(2)]
        for thief in thieves:
            await mesh.refused(thief, "CAPACITY")
        give_in(mesh)
        await mesh.reach(gang, "RUNNING")
        await mesh.reach(mover, "RUNNING", lambda job: job.attempt.number == 2)
        for thief in thieves:
            assert (await mesh.job(thief)).phase == job_pb2.JOB_PHASE_QUEUED


async def test_a_migrated_job_precedes_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older job waits at the head of a strict queue, and holds back all others except the migrated job."""
    monkeypatch.setattr(scheduler, "PAGE_MIN", 1)
    strict = replace(BACKFILL, options={"fifo": {"mode": "strict"}})
    placement = replace(QUICK, placement="locality", options={"locality": AT_ONCE})
    async with running(placement_config=placement, queue_config=strict) as mesh:
        await mesh.agent("n0", gpus=4, cores=24)
        older = await mesh.submit(gpus=1, replicas=4)
        await mesh.reach(older, "RUNNING")
        jobs = await half_taken(mesh, History())
        for node_id in ("n1", "n2"):
            mesh.agents[node_id].refuses_to_stop = True
        await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n0"))
        await mesh.refused(older, "CAPACITY")
        give_in(mesh)
        await mesh.reach(mover, "RUNNING", lambda job: job.attempt.number == 2)
        await mesh.refused(older, "CAPACITY")


@pytest.mark.parametrize("names", [("queue",), ("placement",), ("placement", "queue")])
async def test_services_may_die_during_a_migration(names: tuple[str, ...]) -> None:
    async with fragmented() as (mesh, _, jobs):
        stubborn(mesh)
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        await mesh.restart(*names)
        for agent in mesh.agents.values():
            await until(partial(_welcome, agent, 1 + ("placement" in names)))
        give_in(mesh)
        both = [await mesh.reach(job_id, "RUNNING") for job_id in (gang, mover)]
        assert set(nodes_of(both[0])).isdisjoint(nodes_of(both[1]))
        assert both[1].migrations == 1


async def test_a_migrated_job_queues_normally_if_its_new_place_is_lost() -> None:
    async with fragmented() as (mesh, _, jobs):
        stubborn(mesh)
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        (before,) = nodes_of(await mesh.job(mover))
        (other,) = {"n1", "n2"} - {before}
        await mesh.agents[other].stop()
        await eventually(lambda: _is_away(mesh, other))
        give_in(mesh)
        await mesh.reach(gang, "RUNNING")
        await mesh.refused(mover, "CAPACITY")
        mesh.agents[other].start()
        back = await mesh.reach(mover, "RUNNING", lambda job: job.attempt.number == 2)
        assert nodes_of(back) == [other]


def _welcome(agent: SimulatedAgent, times: int) -> bool:
    return len(agent.welcomes) >= times


async def _is_away(mesh: Mesh, node_id: str) -> bool:
    return not mesh.parts["placement"].service.cluster.nodes[node_id].connected


async def test_the_reservation_of_a_cancelled_migration_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tentative_reservations, "KEPT_SECONDS", -4.0)
    monkeypatch.setattr("cotenant.services.placement.planning.planner.KEPT_SECONDS", -4.0)
    async with fragmented() as (mesh, _, jobs):
        stubborn(mesh)
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        for job_id in (mover, gang):
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
        others = [await mesh.submit(gpus=1) for _ in range(2)]
        for other in others:
            await mesh.refused(other, "CAPACITY")
        give_in(mesh)
        for other in others:
            await mesh.reach(other, "RUNNING")
        assert (await mesh.job(mover)).phase == job_pb2.JOB_PHASE_CANCELLED


@pytest.mark.parametrize(
    ("options", "fields"), [(SETTLED, {}), (AT_ONCE, {"preemptible": False}), ({**AT_ONCE, "gain_min": "100"}, {})]
)
async def test_jobs_that_are_new_or_exempt_or_expensive_are_not_migrated(
    options: dict[str, str], fields: dict[str, bool]
) -> None:
    async with fragmented(options, **fields) as (mesh, _, jobs):
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        await mesh.refused(gang, "FRAGMENTED")
        cycles = mesh.parts["queue"].service.scheduler.cycles
        other = await mesh.submit(gpus=1)
        await mesh.reach(other, "RUNNING")
        await until(lambda: mesh.parts["queue"].service.scheduler.cycles > cycles)
        assert [(await mesh.job(job_id)).migrations for job_id in jobs] == [0, 0]
        assert [(await mesh.job(job_id)).attempt.number for job_id in jobs] == [1, 1]


async def test_a_job_that_ends_during_its_migration_stays_ended() -> None:
    async with fragmented() as (mesh, _, jobs):
        stubborn(mesh)
        gang = await mesh.submit(gpus=1, replicas=2, locality=SERVER)
        mover = await stopping(mesh, jobs)
        for agent in mesh.agents.values():
            agent.finish((mover, 1))
        ended = await mesh.reach(mover, "SUCCEEDED")
        await mesh.reach(gang, "RUNNING")
        assert ended.migrations == 0
        other = await mesh.submit(gpus=1)
        await mesh.reach(other, "RUNNING")
