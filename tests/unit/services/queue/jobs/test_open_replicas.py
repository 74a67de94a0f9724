"""Services with an open number of replicas, over the real mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import Phase
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.services.predictor.api import server as predictor
from cotenant.v1 import job_pb2, predictor_service_pb2
from cotenant.v1 import job_service_pb2 as pb

PROMISE = {"latency_seconds": 0.03, "latency_percentile": 99.0, "arrivals_per_second": 900.0}


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(predictor_config=predictor.Config(predictors=("history", "latency"))) as mesh:
        await mesh.agent("n1", gpus=8, cores=16)
        yield mesh


def service(least: int = 0, most: int = 0, **promise: float) -> dict[str, Any]:
    message = spec(cores=1)
    message.roles[0].replicas = 0
    message.roles[0].open.CopyFrom(job_pb2.OpenReplicas(min=least, max=most))
    return {
        "kind": job_pb2.JOB_KIND_INFERENCE,
        "model": "bert",
        "roles": list(message.roles),
        "qos": job_pb2.Qos(**(PROMISE | promise)),
    }


async def show(mesh: Mesh, job: job_pb2.Job) -> None:
    """Observe batch times of a job's service: 10 ms, and 1 ms for each request."""
    stub: Any = observation_service_pb2_grpc.ObservationServiceStub(mesh.channel("predictor"))
    seen = [
        observation_pb2.Observation(
            job_id=job.id,
            spec=job.spec,
            submitter=job.submitter,
            number=job.attempt.number,
            allocation=predictor_service_pb2.CandidateAllocation(cores=1, gpu_milli=1000, nodes=1),
            time=Timestamp(seconds=1000 + at),
            batch_size=size,
            batch_time=Duration(nanos=(10 + size) * 1_000_000),
        )
        for at, size in enumerate((1, 4, 16, 64, 2, 8, 1, 4, 16, 64))
    ]
    response = await stub.Observe(observation_pb2.ObserveRequest(observations=seen))
    assert response.accepted == len(seen)


async def known(mesh: Mesh) -> job_pb2.Job:
    """Run a service without an estimate, and observe it."""
    first = await mesh.reach(await mesh.submit(**service()), "RUNNING")
    await show(mesh, first)
    return first


def tasks(job: job_pb2.Job) -> int:
    return sum(len(part.tasks) for part in job.attempt.allocations)


async def test_a_service_starts_with_one_replica_and_scales_once_estimated(mesh: Mesh) -> None:
    first = await known(mesh)
    assert tasks(first) == 1
    assert "nothing is known" in first.attempt.sizing or (await explained(mesh, first.id)).sizing
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=first.id))
    second = await mesh.reach(await mesh.submit(**service()), "RUNNING")
    assert (tasks(second), second.spec.roles[0].replicas) == (5, 5)
    assert "5 replicas, the fewest that answer 99 %" in (await explained(mesh, second.id)).sizing


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    response: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return response


async def update(mesh: Mesh, job_id: str, arrivals: float) -> None:
    job = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(qos=job_pb2.Qos(arrivals_per_second=arrivals)))
    mask = FieldMask(paths=["spec.qos.arrivals_per_second"])
    await mesh.jobs.UpdateJob(pb.UpdateJobRequest(job=job, update_mask=mask))


async def test_a_restarted_service_gets_the_replicas_it_needs_then(mesh: Mesh) -> None:
    first = await known(mesh)
    await update(mesh, first.id, 500.0)
    assert tasks(await mesh.job(first.id)) == 1
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=first.id))
    await mesh.reach(first.id, Phase.SUSPENDED.name)
    await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=first.id))
    again = await mesh.reach(first.id, "RUNNING")
    assert tasks(again) == 3


async def test_a_waiting_service_is_resized_with_its_request_rate(mesh: Mesh) -> None:
    first = await known(mesh)
    crowd = await mesh.reach(await mesh.submit(gpus=4), "RUNNING")
    waits = await mesh.submit(**service())
    refused = await mesh.refused(waits, "CAPACITY")
    assert refused.spec.roles[0].replicas == 5
    await update(mesh, waits, 500.0)
    started = await mesh.reach(waits, "RUNNING")
    assert tasks(started) == 3
    for job_id in (first.id, crowd.id):
        assert (await mesh.job(job_id)).phase == job_pb2.JOB_PHASE_RUNNING


async def test_a_replica_limit_that_is_too_low_is_the_refusal_also_in_what_if(mesh: Mesh) -> None:
    await known(mesh)
    refused = await mesh.refused(await mesh.submit(**service(most=4)), "NEVER_FITS")
    assert "it takes 5 replicas" in refused.refusal.detail
    assert "replicas_max is 5 or more" in refused.refusal.remedy
    asked = spec(cores=1)
    asked.MergeFrom(job_pb2.JobSpec(kind=job_pb2.JOB_KIND_INFERENCE, model="bert", qos=job_pb2.Qos(**PROMISE)))
    asked.roles[0].open.max = 4
    told = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=asked))
    assert (told.refusal.code, told.outlook) == ("NEVER_FITS", "never starts on this cluster")
    asked.roles[0].open.max = 6
    told = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=asked))
    assert told.starts_now
    assert sum(len(part.tasks) for part in told.allocations) == 5


async def test_running_replicas_are_counted_after_a_queue_restart(mesh: Mesh) -> None:
    first = await known(mesh)
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=first.id))
    second = await mesh.reach(await mesh.submit(**service()), "RUNNING")
    await mesh.restart("queue", "placement")
    again = await mesh.reach(second.id, "RUNNING")
    assert (tasks(again), again.spec.roles[0].replicas) == (5, 5)


async def test_every_invalid_replica_field_is_named(mesh: Mesh) -> None:
    wrong = service(least=9, most=3, arrivals_per_second=0.0) | {"kind": job_pb2.JOB_KIND_TRAINING}
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await mesh.submit(**wrong)
    assert {one.field for one in from_error(failure.value).violations} == {
        "spec.roles[0].open.max",
        "spec.roles[0].open",
        "spec.qos.arrivals_per_second",
    }


async def test_a_fixed_service_keeps_its_latency_as_predicted_from_its_batches(mesh: Mesh) -> None:
    """Five replicas keep the target, four do not; the outcome stays with the ended job."""
    await known(mesh)
    enough, few = (
        spec(cores=1, replicas=count, kind=job_pb2.JOB_KIND_INFERENCE, model="bert", qos=job_pb2.Qos(**PROMISE))
        for count in (5, 4)
    )
    few.objective_check = enough.objective_check = job_pb2.OBJECTIVE_CHECK_REQUIRE
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=few))
    problem = from_error(refused.value)
    assert problem.reason == "OBJECTIVE_UNREACHABLE"
    assert "its target is 0.03 s for 99 %" in problem.message
    assert problem.metadata["remedy"].startswith("more replicas")
    job = (await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=enough))).job
    assert [one.state for one in job.submitted_objectives] == [job_pb2.OBJECTIVE_STATE_MET]
    [status] = (await mesh.reach(job.id, "RUNNING")).objectives
    assert (status.state, status.final) == (job_pb2.OBJECTIVE_STATE_MET, False)
    assert 0 < status.margin < 0.03
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job.id))
    await mesh.reach(job.id, "CANCELLED")
    await mesh.restart("queue")
    [ended] = (await mesh.job(job.id)).objectives
    assert (ended.state, ended.final) == (job_pb2.OBJECTIVE_STATE_MET, True)
    assert ended.value == pytest.approx(status.value)
