"""What the queue tells the predictor of a job's progress."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from cotenant.core.jobs import JobSpec, Request, Role
from cotenant.rpc import translate
from cotenant.services.queue.observations import Observations
from cotenant.services.queue.records import Record
from cotenant.v1 import job_pb2, records_pb2
from cotenant.v1 import predictor_service_pb2 as pb

SPEC = JobSpec(roles=(Role(request=Request(gpu_milli=1000, cores=4)),), command=("true",), model="bert")


class Predictor:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[pb.Observation] = []

    async def Observe(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        self.told += request.observations
        return pb.ObserveResponse(accepted=len(request.observations))


def progressed(**progress: Any) -> list[pb.Observation]:
    """Tell of one job's progress, and look at what waits to be sent."""
    observations = Observations(Predictor())  # type: ignore[arg-type]  # as much of a stub as is called
    job = job_pb2.Job(id="j1", spec=translate.spec_to_wire(SPEC), progress=job_pb2.Progress(**progress))
    observations.progressed(Record(records_pb2.StoredJob(job=job), SPEC))
    return observations._waiting


def test_step_and_loss_go_with_the_rate() -> None:
    (seen,) = progressed(step=120, rate_per_second=2.0, loss=0.5)
    assert (seen.step, seen.rate_per_second, seen.loss, seen.window.seconds) == (120, 2.0, 0.5, 10)


def test_a_loss_is_told_where_the_rate_is_not_known_yet() -> None:
    (seen,) = progressed(step=1, loss=0.5)
    assert (seen.step, seen.rate_per_second, seen.loss, seen.HasField("window")) == (1, 0.0, 0.5, False)


def test_a_loss_that_is_no_number_is_told_as_it_is() -> None:
    (seen,) = progressed(step=1, rate_per_second=1.0, loss=math.nan)
    assert math.isnan(seen.loss)


def test_the_time_of_a_batch_goes_with_its_size() -> None:
    (seen,) = progressed(batch_size=8, batch_time=Duration(nanos=20_000_000))
    assert (seen.batch_size, seen.batch_time.nanos, seen.rate_per_second) == (8, 20_000_000, 0.0)


@pytest.mark.parametrize("progress", [{}, {"step": 5}])
def test_a_job_that_tells_neither_a_rate_nor_a_loss_is_not_told_of(progress: dict[str, Any]) -> None:
    assert progressed(**progress) == []
