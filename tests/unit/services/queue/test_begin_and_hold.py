"""Begin times, and jobs that are held from their submission."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec.specs import duration, timestamp
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

LONG_SECONDS = 5000.0


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def test_a_job_does_not_start_before_its_begin_time_also_after_a_restart(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    begin = time.time() + LONG_SECONDS
    later = await mesh.submit(begin_time=timestamp(begin))
    assert (await mesh.job(later)).refusal.code == "BEGIN_TIME"
    first = await mesh.submit()
    await mesh.reach(first, "RUNNING")
    await mesh.restart("queue")
    await mesh.reach(first, "RUNNING")
    agent.finish((first, 1))
    await mesh.reach(first, "SUCCEEDED")
    job = await mesh.job(later)
    assert job.phase == job_pb2.JOB_PHASE_QUEUED
    assert job.refusal.detail.startswith("begins at 2")
    assert job.refusal.numbers["begin_seconds"] == pytest.approx(begin)
    explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=later))
    assert explained.summary.startswith("waits for its begin time: BEGIN_TIME: begins at ")
    assert explained.outlook == "starts in 83 min at the earliest, at its begin time"


async def test_a_job_starts_once_its_begin_time_has_come(mesh: Mesh) -> None:
    await mesh.agent("n1")
    begin = time.time() + 1.0
    job = await mesh.reach(await mesh.submit(begin_time=timestamp(begin)), "RUNNING")
    assert job.attempt.assign_time.ToNanoseconds() >= begin * 1e9
    past = await mesh.submit(begin_time=timestamp(begin - LONG_SECONDS))
    await mesh.reach(past, "RUNNING")


async def test_a_job_with_a_begin_time_is_cancelled_with_its_dependency(mesh: Mesh) -> None:
    first = await mesh.submit()
    need = job_pb2.Dependency(id=first, condition=job_pb2.DEPENDENCY_CONDITION_AFTER_OK)
    later = await mesh.submit(begin_time=timestamp(time.time() + LONG_SECONDS), dependencies=[need])
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=first))
    assert (await mesh.reach(later, "CANCELLED")).phase_reason.startswith(f"depends on the success of {first}")


async def test_a_held_job_waits_until_it_is_resumed(mesh: Mesh) -> None:
    await mesh.agent("n1")
    held = await mesh.submit(hold=True)
    assert (await mesh.job(held)).phase == job_pb2.JOB_PHASE_SUSPENDED
    await mesh.reach(await mesh.submit(), "RUNNING")
    await mesh.restart("queue")
    assert (await mesh.job(held)).phase == job_pb2.JOB_PHASE_SUSPENDED
    events = (await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=held))).events
    assert [one.detail for one in events][-1] == "held at submission"
    await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=held))
    await mesh.reach(held, "RUNNING")


async def test_a_held_array_waits_until_it_is_resumed(mesh: Mesh) -> None:
    await mesh.agent("n1")
    tasks = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=2)], running_max=1)
    array = await mesh.submit_array(hold=True, array=tasks)
    assert (await mesh.job(f"{array}_1")).phase == job_pb2.JOB_PHASE_SUSPENDED
    await mesh.arrays.ResumeArray(array_pb.ResumeArrayRequest(id=array))
    await mesh.reach(f"{array}_0", "RUNNING")


async def test_a_forecast_before_submission_heeds_the_begin_time(mesh: Mesh) -> None:
    await mesh.agent("n1")
    begin = time.time() + LONG_SECONDS
    later = spec(begin_time=timestamp(begin), expected_duration=duration(60.0), deadline=timestamp(begin + 30.0))
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=later))
    assert (answer.starts_now, answer.refusal.code) == (False, "BEGIN_TIME")
    assert answer.outlook == "starts in 83 min at the earliest, at its begin time"
    assert not answer.allocations
    (objective,) = answer.objectives
    assert objective.state in (job_pb2.OBJECTIVE_STATE_AT_RISK, job_pb2.OBJECTIVE_STATE_MISSED)
    assert objective.value >= begin
    later.objective_check = job_pb2.OBJECTIVE_CHECK_REQUIRE
    with pytest.raises(grpc.aio.AioRpcError, match="a required objective is not expected to be kept"):
        await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=later))
    later.deadline.CopyFrom(timestamp(begin + LONG_SECONDS))
    assert (await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=later))).job.id
