"""Submission: accepted jobs, refusals that name every invalid field, and idempotency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.services.mesh import Mesh, again, reason, running, spec

from cotenant.codec.errors import Problem, from_error
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def refusal(mesh: Mesh, request: pb.CreateJobRequest) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.CreateJob(request)
    return from_error(refused.value)


async def test_a_job_is_returned_as_submitted(mesh: Mesh) -> None:
    response = await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=spec(name="first", labels={"team": "a"})))
    job = response.job
    assert job == await mesh.job(job.id)
    assert (job.spec.tenant, job.spec.queue, job.spec.warning_signal) == ("default", "default", "SIGTERM")
    assert job.phase == job_pb2.JOB_PHASE_QUEUED
    assert job.refusal.code == "NOT_YET_CONSIDERED"
    assert job.etag


async def test_a_repeated_create_makes_no_second_job(mesh: Mesh) -> None:
    request = pb.CreateJobRequest(spec=spec(), request_id="once")
    jobs = await asyncio.gather(*(mesh.jobs.CreateJob(request) for _ in range(20)))
    assert len({response.job.id for response in jobs}) == 1
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 1


async def test_a_repeated_create_succeeds_although_the_job_would_be_refused_now(mesh: Mesh) -> None:
    request = pb.CreateJobRequest(spec=spec(gpus=64), request_id="once")
    first = await mesh.jobs.CreateJob(request)  # no node has registered yet, so it may fit later
    await mesh.agent("n1", gpus=2)
    await mesh.refused(first.job.id, "NEVER_FITS")
    assert (await mesh.jobs.CreateJob(request)).job.id == first.job.id


async def test_a_request_id_names_one_call_only(mesh: Mesh) -> None:
    await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=spec(), request_id="once"))
    assert (
        await refusal(mesh, pb.CreateJobRequest(spec=spec(gpus=2), request_id="once"))
    ).reason == "REQUEST_ID_REUSED"
    job_id = await mesh.submit()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id, request_id="once"))
    assert reason(refused.value) == "REQUEST_ID_REUSED"


@pytest.mark.parametrize("request_id", ["a/b", "a\nb", "x" * 129])
async def test_invalid_request_ids_are_refused(mesh: Mesh, request_id: str) -> None:
    problem = await refusal(mesh, pb.CreateJobRequest(spec=spec(), request_id=request_id))
    assert [violation.field for violation in problem.violations] == ["request_id"]


async def test_validate_only_creates_nothing(mesh: Mesh) -> None:
    response = await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=spec(), validate_only=True, request_id="once"))
    assert response.job.spec.tenant == "default"
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 0
    assert await mesh.records_left("queue/") == []


async def test_every_invalid_field_is_named_at_once(mesh: Mesh) -> None:
    bad = spec(gpus=1.5, cores=0, replicas=5000, name="a/b", tenant="A!", retries_max=-1)
    problem = await refusal(mesh, pb.CreateJobRequest(spec=bad))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert {violation.field for violation in problem.violations} == {
        "spec.name",
        "spec.tenant",
        "spec.roles[0].replicas",
        "spec.roles",
        "spec.roles[0].resources.gpu_milli",
        "spec.roles[0].resources.cores",
        "spec.retries_max",
    }


async def test_an_unknown_queue_is_an_invalid_field(mesh: Mesh) -> None:
    problem = await refusal(mesh, pb.CreateJobRequest(spec=spec(queue="defualt")))
    assert [violation.field for violation in problem.violations] == ["spec.queue"]
    assert "default" in problem.message


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\0b", "\x1b[31m", "..", "x" * 254, "‮evil", "a\nb"])
async def test_hostile_names_are_refused(mesh: Mesh, name: str) -> None:
    problem = await refusal(mesh, pb.CreateJobRequest(spec=spec(name=name)))
    assert [violation.field for violation in problem.violations] == ["spec.name"]


async def test_a_huge_spec_is_refused_and_not_stored(mesh: Mesh) -> None:
    huge = spec(environment={f"V{n}": "x" * 2048 for n in range(140)})
    problem = await refusal(mesh, pb.CreateJobRequest(spec=huge))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 262144 are allowed" in problem.message
    assert await mesh.records_left("queue/") == []


async def test_a_job_that_never_fits_is_refused_with_the_largest_node(mesh: Mesh) -> None:
    await mesh.agent("small", gpus=2, cores=8)
    await mesh.agent("large", gpus=4, cores=32)
    await mesh.submit(gpus=1)
    waiting = await mesh.submit(gpus=4, cores=32)
    await mesh.reach(waiting, "RUNNING")
    problem = await refusal(mesh, pb.CreateJobRequest(spec=spec(gpus=8)))
    assert problem.reason == "NEVER_FITS"
    assert problem.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "4 GPUs" in problem.message or "4 × " in problem.message


async def test_an_unknown_job_is_not_found_and_a_similar_id_suggested(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.job(job_id[:-1] + ("0" if job_id[-1] != "0" else "1"))
    assert reason(refused.value) == "JOB_NOT_FOUND"
    assert job_id in (refused.value.details() or "")


async def test_a_repeat_after_a_lost_answer_finds_the_job(mesh: Mesh) -> None:
    mesh.parts["queue"].store.lose_answer = True
    request = pb.CreateJobRequest(spec=spec(), request_id="once")
    response = await again(lambda: mesh.jobs.CreateJob(request))
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 1
    await mesh.agent("n1")
    await mesh.reach(response.job.id, "RUNNING")


async def test_a_cancelled_create_leaves_no_unknown_job(mesh: Mesh) -> None:
    queue = mesh.parts["queue"]
    queue.store.held_back = asyncio.Event()
    call = mesh.jobs.CreateJob(pb.CreateJobRequest(spec=spec()), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    queue.store.held_back.set()
    queue.store.held_back = None
    await mesh.agent("n1")
    known = (await mesh.jobs.ListJobs(pb.ListJobsRequest())).jobs
    assert [f"queue/jobs/{job.id}" for job in known] == await mesh.records_left("queue/jobs/")
