"""Observations that the queue sends of a job's progress."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs
from tests.unit.services.mesh import until

from cotenant.codec import specs
from cotenant.codec.specs import timestamp
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.prediction.chain import Chain
from cotenant.internal.v1 import observation_service_pb2 as pb
from cotenant.policies.history import History
from cotenant.services.predictor.codec import query_of
from cotenant.services.queue.estimates import observation_sink as module
from cotenant.services.queue.estimates.observation_sink import ObservationSink
from cotenant.services.queue.jobs.queue_events import QueueEvents
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2, resources_pb2

SPEC = JobSpec(roles=(Role(request=Request(gpu_milli=1000, cores=4)),), command=("true",), model="bert")


class Predictor:
    """Records observations, after raising all of its predefined errors."""

    def __init__(self, *refusals: grpc.StatusCode) -> None:
        self.told: list[pb.Observation] = []
        self.refusals = list(refusals)

    async def Observe(self, request: pb.ObserveRequest, **call: float | None) -> pb.ObserveResponse:
        if self.refusals:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(self.refusals.pop(0), nothing, nothing, "away")
        self.told += request.observations
        return pb.ObserveResponse(accepted=len(request.observations))


def progressed(*told: dict[str, Any]) -> list[pb.Observation]:
    """Report a job's progress step by step; return the observations to be sent."""
    observations = ObservationSink(Predictor(), QueueEvents(), window_seconds=10.0)  # type: ignore[arg-type]  # as much of it as is called
    record = Record(records_pb2.StoredJob(job=job_pb2.Job(id="j1", spec=specs.spec_to_wire(SPEC))), SPEC)
    record.job.attempt.CopyFrom(attempt())
    for progress in told:
        record.job.progress.CopyFrom(job_pb2.Progress(**progress))
        observations.progressed(record)
    return observations._waiting


def attempt(cores: int = 4, epoch: int = 7) -> job_pb2.Attempt:
    task = resources_pb2.TaskAllocation(
        role="worker", core_ids=range(cores), gpus=[resources_pb2.GpuShare(uuid="G", milli=1000)]
    )
    part = resources_pb2.NodeAllocation(node_id="n1", tasks=[task], gpu_type="A100")
    return job_pb2.Attempt(job_id="j1", number=1, epoch=epoch, allocations=[part])


def at(seconds: float, step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "step_time": timestamp(seconds), "update_time": timestamp(seconds), **more}


SETTLED = (at(100, 1), at(106, 10))


def test_a_rate_window_is_sent_with_step_loss_and_allocation() -> None:
    (seen,) = progressed(*SETTLED, at(116, 30, loss=0.5))
    assert (seen.step, seen.rate_per_second, seen.loss, seen.window.seconds) == (30, 2.0, 0.5, 10)
    held = seen.allocation
    assert (held.cores, held.gpu_milli, held.nodes, held.gpu_type) == (4, 1000, 1, "A100")


def record_after(*told: dict[str, Any], steps_total: int = 100) -> Record:
    """Return the record of a running job after its reports."""
    spec = replace(SPEC, steps_total=steps_total)
    sink = ObservationSink(Predictor(), QueueEvents(), window_seconds=10.0)  # type: ignore[arg-type]  # as much of it as is called
    phase = job_pb2.JOB_PHASE_RUNNING
    record = Record(records_pb2.StoredJob(job=job_pb2.Job(id="j1", spec=specs.spec_to_wire(spec), phase=phase)), spec)
    record.job.attempt.CopyFrom(attempt())
    for progress in told:
        record.job.progress.CopyFrom(job_pb2.Progress(**progress))
        sink.progressed(record)
    return record


def test_the_rate_that_a_job_has_shown_is_in_its_progress_and_in_queries() -> None:
    record = record_after(*SETTLED, at(116, 30))
    assert (record.job.progress.own_rate.rate_per_second, record.job.progress.own_rate.windows) == (2.0, 1)
    query = query_of(module.query_of(record, (), time.time()))
    assert (query.step, query.steps_total) == (30, 100)
    assert query.own_rate
    assert (query.own_rate.rate_per_second, query.own_rate.windows, query.own_rate.gap_seconds) == (2.0, 1, 10.0)
    assert 0 <= query.own_rate.silent_seconds < 60
    (estimate,) = Chain([History()]).estimate_many([query])
    assert estimate.remaining_seconds == pytest.approx(35, abs=1)
    assert module.query_of(record, (), time.time() + 100).progress.own_rate.silence.ToSeconds() >= 100


@pytest.mark.parametrize("changed", [{"throttle": "limited to 2 of its cores: slows j2"}, {"step": 5}])
def test_a_throttle_and_a_restart_begin_the_rate_again(changed: dict[str, Any]) -> None:
    record = record_after(*SETTLED, at(116, 30), {**at(117, 32), **changed})
    assert (record.job.progress.own_rate.rate_per_second, record.job.progress.own_rate.windows) == (2.0, 0)


def test_a_waiting_job_is_not_silent_and_its_rate_is_that_of_before() -> None:
    record = record_after(*SETTLED, at(116, 30))
    record.job.phase = job_pb2.JOB_PHASE_QUEUED
    own = module.query_of(record, (), time.time() + 10_000).progress.own_rate
    assert (own.rate_per_second, own.windows, own.silence.ToSeconds()) == (2.0, 0, 0)


def test_a_node_does_not_set_the_rate() -> None:
    record = record_after({"step": 5, "own_rate": job_pb2.OwnRate(rate_per_second=7.0, windows=9)})
    assert not record.job.progress.HasField("own_rate")


def test_the_phase_is_sent_without_the_window_it_began_in() -> None:
    validating = [at(seconds, 10, phase_step=seconds, phase="validation") for seconds in (112, 118, 124, 128)]
    (seen,) = progressed(*SETTLED, *validating)
    assert (seen.phase, seen.rate_per_second, seen.step) == ("validation", 1.0, 10)


def test_a_loss_is_sent_before_the_rate_is_known() -> None:
    (seen,) = progressed({"step": 1, "loss": 0.5})
    assert (seen.step, seen.rate_per_second, seen.loss, seen.HasField("window")) == (1, 0.0, 0.5, False)


def test_a_nan_loss_is_sent_unchanged() -> None:
    (seen,) = progressed({"step": 1, "loss": math.nan})
    assert math.isnan(seen.loss)


def test_the_time_of_a_batch_goes_with_its_size() -> None:
    (seen,) = progressed({"batch_size": 8, "batch_time": Duration(nanos=20_000_000)})
    assert (seen.batch_size, seen.batch_time.nanos, seen.rate_per_second) == (8, 20_000_000, 0.0)


@pytest.mark.parametrize("progress", [{}, {"step": 5}, {"step": 5, "rate_per_second": 2.0}])
def test_a_job_without_an_ended_window_is_not_sent(progress: dict[str, Any]) -> None:
    assert progressed(progress) == []


@pytest.mark.parametrize(
    ("refusals", "taken", "told"),
    [
        ([grpc.StatusCode.UNAVAILABLE] * 3, [1, 2, 3, 4, 5], ["observations_delayed"]),
        ([grpc.StatusCode.INVALID_ARGUMENT], [3, 4, 5], ["observations_lost"]),
    ],
)
async def test_observations_are_kept_while_the_predictor_is_down_and_dropped_when_refused(
    refusals: list[grpc.StatusCode], taken: list[int], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(module, "BATCH_MAX", 2)
    monkeypatch.setattr(module, "WAITING_MAX", 5)
    predictor = Predictor(*refusals)
    observations = ObservationSink(predictor, QueueEvents())  # type: ignore[arg-type]  # as much of it as is called
    for number in range(1, 7):  # the last one exceeds the limit
        observations._add(pb.Observation(job_id="j", number=number))
    with capture_logs() as logs:
        running = asyncio.create_task(observations.run())
        await until(lambda: len(predictor.told) == len(taken))
        running.cancel()
    assert [seen.number for seen in predictor.told] == taken
    assert [entry["event"] for entry in logs] == told
    assert not observations._waiting


def test_a_query_tells_how_long_a_job_has_run_up_to_now() -> None:
    record = Record(records_pb2.StoredJob(job=job_pb2.Job(id="j1", spec=specs.spec_to_wire(SPEC))), SPEC)
    record.job.run_time.CopyFrom(specs.duration(20))
    record.job.phase = job_pb2.JOB_PHASE_QUEUED
    assert module.query_of(record, (), 1000.0).run_time == specs.duration(20)
    record.job.phase = job_pb2.JOB_PHASE_RUNNING
    record.job.attempt.CopyFrom(attempt())
    record.job.attempt.start_time.CopyFrom(timestamp(970))
    query = module.query_of(record, (), 1000.0)
    assert (specs.seconds(query.run_time), query.attained_gpu_seconds) == (50, 30)
