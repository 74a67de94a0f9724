"""Pre-runs: one replica on one GPU before the gang, over the real mesh, with agents without processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.job_events import kind_of
from cotenant.codec.specs import duration, timestamp
from cotenant.core.failures.retry import RetryRules
from cotenant.services.queue.attempts import pre_runs
from cotenant.v1 import job_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as pb

AT_ONCE = RetryRules(back_off_seconds=0.02, infrastructure_retries=2, untold_back_off_seconds=0.02)
IMPORT = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torhc'\n"
LONG = duration(600)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(queue_config=replace(BACKFILL, retrying=AT_ONCE)) as mesh:
        yield mesh


async def submit(mesh: Mesh, **fields: Any) -> str:
    """Submit a job of two replicas with two GPUs and six cores each."""
    return await mesh.submit(**({"gpus": 2, "cores": 6, "replicas": 2, "pre_run": LONG} | fields))


async def runs(mesh: Mesh, job_id: str, number: int) -> job_pb2.Job:
    return await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == number)


def held(job: job_pb2.Job) -> tuple[int, int, bool]:
    """Return the GPUs and cores that a job's attempt holds, and whether it is a pre-run."""
    tasks = [task for part in job.attempt.allocations for task in part.tasks]
    return sum(len(task.gpus) for task in tasks), sum(len(task.core_ids) for task in tasks), job.attempt.pre_run


PRE_RUN, GANG = (1, 3, True), (4, 12, False)


def step(agent: SimulatedAgent, job_id: str, number: int, at: float | None = None, **fields: Any) -> None:
    """Report a job's first training step."""
    now = timestamp(time.time() if at is None else at)
    said: dict[str, Any] = {"step": 1, "step_time": now, "update_time": now} | fields
    progress = job_pb2.Progress(**said)
    agent.send(progress=[agent_pb2.ProgressReport(job_id=job_id, number=number, progress=progress)])


async def story(mesh: Mesh, job_id: str) -> list[str]:
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return [f"{kind_of(event)}: {event.detail}" for event in told.events]


async def test_the_gang_starts_after_the_pre_run_reports_a_step(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh)
    job = await runs(mesh, job_id, 1)
    assert held(job) == PRE_RUN
    told = agent.assignments[job_id, 1]
    assert (told.world_size, told.pre_run, [task.rank for task in told.allocation.tasks]) == (1, True, [0])
    step(agent, job_id, 1)
    job = await runs(mesh, job_id, 2)
    assert held(job) == GANG
    assert (agent.assignments[job_id, 2].world_size, agent.assignments[job_id, 2].pre_run) == (2, False)
    (past,) = job.past_attempts
    assert (past.pre_run, past.stop_reason) == (True, job_pb2.STOP_REASON_SUPERSEDED)
    assert (job.failures, job.preemptions, job.migrations) == (0, 0, 0)
    assert job.run_time.ToNanoseconds() > 0
    assert "pre_run_passed: it reported step 1" in await story(mesh, job_id)


async def test_a_silent_pre_run_passes_when_its_time_is_over(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await submit(mesh, pre_run=duration(1))
    assert held(await runs(mesh, job_id, 1)) == PRE_RUN
    assert held(await runs(mesh, job_id, 2)) == GANG
    assert "pre_run_passed: it still ran after 1 s" in await story(mesh, job_id)


async def test_a_pre_run_that_exits_with_0_passes_and_its_job_has_not_succeeded(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    agent.finish((job_id, 1))
    assert held(await runs(mesh, job_id, 2)) == GANG
    agent.finish((job_id, 2))
    job = await mesh.reach(job_id, "SUCCEEDED")
    assert job.attempt.number == 2


async def test_a_user_failure_in_the_pre_run_fails_the_job(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh, retries_max=5)
    await runs(mesh, job_id, 1)
    agent.fail((job_id, 1), IMPORT)
    job = await mesh.reach(job_id, "FAILED")
    assert (job.attempt.number, job.failures) == (1, 1)
    assert job.attempt.failure.failure_class == "import_error"
    assert job.phase_reason.startswith("in its pre-run; ")
    assert [key for key in agent.assignments if key[0] == job_id] == [(job_id, 1)]


async def test_a_transient_failure_is_retried_as_a_pre_run(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh, retries_max=1)
    for number in (1, 2):
        assert held(await runs(mesh, job_id, number)) == PRE_RUN
        agent.fail((job_id, number), "giving up\n")
    assert (await mesh.reach(job_id, "FAILED")).failures == 2


async def test_a_gang_that_fails_later_needs_no_second_pre_run(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh, retries_max=1)
    await runs(mesh, job_id, 1)
    agent.finish((job_id, 1))
    await runs(mesh, job_id, 2)
    agent.fail((job_id, 2), "giving up\n")
    assert held(await runs(mesh, job_id, 3)) == GANG


async def test_a_pre_run_takes_one_free_gpu_while_the_gang_waits(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=4)
    other = await mesh.submit(gpus=3, cores=3)
    await mesh.reach(other, "RUNNING")
    job_id = await submit(mesh)
    assert held(await runs(mesh, job_id, 1)) == PRE_RUN
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    assert "a pre-run on one GPU, for 10 min at most, before its gang is assembled" in told.summary
    step(agent, job_id, 1)
    job = await mesh.reach(job_id, "QUEUED")
    assert job.phase_reason == "its pre-run passed; the whole gang is next"
    agent.finish((other, 1))
    assert held(await runs(mesh, job_id, 2)) == GANG


@pytest.mark.parametrize(
    ("back_seconds", "fields"),
    [(3600.0, {}), (0.0, {"phase": "validation", "phase_step": 3}), (0.0, {"step": 0})],
    ids=["of an hour ago", "of validation", "none yet"],
)
async def test_steps_that_do_not_pass_a_pre_run(mesh: Mesh, back_seconds: float, fields: dict[str, Any]) -> None:
    agent = await mesh.agent("n1")
    job_id, other = await submit(mesh), await submit(mesh, replicas=1)
    await runs(mesh, job_id, 1)
    await runs(mesh, other, 1)
    step(agent, job_id, 1, at=time.time() - back_seconds, **fields)
    step(agent, other, 1)
    await runs(mesh, other, 2)  # its step was reported later
    job = await mesh.job(job_id)
    assert (held(job), job.HasField("progress")) == (PRE_RUN, False)
    assert not any(line.startswith("pre_run_passed") for line in await story(mesh, job_id))


async def test_a_refused_gang_does_not_block_jobs_that_need_one_gpu(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=4)
    await mesh.reach(await mesh.submit(gpus=2, cores=3), "RUNNING")
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    step(agent, job_id, 1)
    await mesh.reach(job_id, "QUEUED")
    small = await mesh.submit(gpus=1, cores=3)
    await mesh.reach(small, "RUNNING")
    records = mesh.parts["queue"].service.state.records
    assert records[job_id].equivalence_key is not records[small].equivalence_key  # which would share refusals


async def test_a_cancel_or_suspend_overrides_the_pre_run(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    agent.refuses_to_stop = True
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    await mesh.reach(job_id, "STOPPING")
    agent.end((job_id, 1), job_pb2.ATTEMPT_STATE_SUCCEEDED)
    await mesh.reach(job_id, "CANCELLED")


async def test_a_job_suspended_in_its_pre_run_resumes_with_a_pre_run(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=job_id))
    await mesh.reach(job_id, "SUSPENDED")
    await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=job_id))
    assert held(await runs(mesh, job_id, 2)) == PRE_RUN


async def test_a_pre_run_counts_as_one_gpu_against_the_tenants_limit(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    limits = tenant_service_pb2.Tenant(id="small", limit_gpu_milli=3000)
    await mesh.tenants.CreateTenant(tenant_service_pb2.CreateTenantRequest(tenant=limits))
    job_id = await submit(mesh, tenant="small")
    assert held(await runs(mesh, job_id, 1)) == PRE_RUN
    await mesh.reach(await mesh.submit(tenant="small", gpus=2), "RUNNING")
    step(agent, job_id, 1)
    await mesh.refused(job_id, "QUOTA")


async def test_what_if_mentions_the_pre_run(mesh: Mesh) -> None:
    await mesh.agent("n1")
    asked = await mesh.submit(gpus=8, cores=8)
    await mesh.reach(asked, "RUNNING")
    wanted = (await mesh.job(asked)).spec
    wanted.pre_run.CopyFrom(LONG)
    told = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=wanted))
    assert "preceded by a pre-run on one GPU, for 10 min at most" in told.outlook
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=asked))
    await mesh.reach(asked, "CANCELLED")
    told = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=wanted))
    assert told.starts_now
    assert told.outlook.startswith("starts now with a pre-run on one GPU, for 10 min at most")
    assert sum(len(task.gpus) for part in told.allocations for task in part.tasks) == 1


@pytest.mark.parametrize("services", [("queue",), ("placement",), ("queue", "placement")], ids="+".join)
async def test_a_pre_run_survives_restarts(mesh: Mesh, services: tuple[str, ...]) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    await mesh.restart(*services)
    assert held(await runs(mesh, job_id, 1)) == PRE_RUN

    async def passed() -> bool:
        step(agent, job_id, 1)  # repeatedly, as jobs do: reports are lost while a service is down
        return (await mesh.job(job_id)).attempt.number == 2

    await eventually(passed)
    assert held(await runs(mesh, job_id, 2)) == GANG


async def test_pre_run_time_passes_while_the_queue_is_down(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await submit(mesh, pre_run=duration(1))
    started = (await runs(mesh, job_id, 1)).attempt.start_time.ToNanoseconds() / 1e9
    await mesh.kill("queue")
    await until(lambda: time.time() > started + 1)
    await mesh.start("queue")
    assert held(await runs(mesh, job_id, 2)) == GANG


async def test_the_queue_may_die_between_commit_and_stop_of_a_passed_pre_run(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await mesh.agent("n1")
    job_id = await submit(mesh)
    await runs(mesh, job_id, 1)
    asked = asyncio.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(mesh.parts["queue"].service.attempt_watcher.pre_runs, "_stop", never)
    step(agent, job_id, 1)
    await asked.wait()
    assert not agent.stops
    await mesh.restart("queue")
    assert held(await runs(mesh, job_id, 2)) == GANG
    assert sum(line.startswith("pre_run_passed") for line in await story(mesh, job_id)) == 1


async def test_placement_may_be_down_when_a_pre_run_is_to_be_stopped(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pre_runs, "STOP_AGAIN_SECONDS", 0.02)
    await mesh.agent("n1")
    job_id = await submit(mesh, pre_run=duration(1))
    await runs(mesh, job_id, 1)
    await mesh.kill("placement")
    record = mesh.parts["queue"].service.state.records[job_id]
    await until(lambda: record.stored.pre_run_passed)
    await mesh.start("placement")
    assert held(await runs(mesh, job_id, 2)) == GANG


@pytest.mark.parametrize("seed", range(3))
async def test_under_random_crashes_each_job_runs_its_pre_run_then_its_gang(seed: int) -> None:
    rng = Random(seed)
    async with running(queue_config=replace(BACKFILL, retrying=AT_ONCE)) as mesh:
        agent = await mesh.agent("n1", run_seconds=0.15)
        job_ids = [await submit(mesh) for _ in range(4)]
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            await mesh.restart(*rng.choice([("queue",), ("placement",), ("queue", "placement")]))
        for job_id in job_ids:
            job = await mesh.reach(job_id, "SUCCEEDED")
            assert held(job) == GANG
            assert job.attempt.number >= 2
            kinds = [agent.assignments[key].pre_run for key in sorted(agent.assignments) if key[0] == job_id]
            assert kinds == sorted(kinds, reverse=True)  # never a pre-run after one has passed
