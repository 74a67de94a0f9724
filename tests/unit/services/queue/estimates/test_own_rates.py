"""The remaining time of a job in its first run, from its own rate: in explanations, the order and start forecasts."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from tests.unit.services.mesh import Mesh, eventually, running

from cotenant.codec.specs import seconds, timestamp
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.predictor_service_pb2 import Estimate

BEGIN = 1_000_000.0  # by the node's clock


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        await mesh.agent("n1", gpus=1)
        yield mesh


async def running_job(mesh: Mesh, **fields: Any) -> Record:
    job_id = await mesh.submit(**fields)
    await mesh.reach(job_id, "RUNNING")
    record: Record = mesh.parts["queue"].service.state.records[job_id]
    return record


def report(mesh: Mesh, record: Record, step: int, second: float) -> None:
    at = timestamp(BEGIN + second)
    record.job.progress.CopyFrom(job_pb2.Progress(step=step, step_time=at, update_time=at))
    mesh.parts["queue"].service.observations.progressed(record)


async def estimated(mesh: Mesh, record: Record, holds: Callable[[Estimate], bool]) -> pb.ExplainJobResponse:
    """Return the explanation once the estimate holds."""
    told = pb.ExplainJobResponse()

    async def found() -> bool:
        told.CopyFrom(await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=record.id)))
        return holds(told.estimate)

    await eventually(found)
    return told


def by_its_rate(estimate: Estimate) -> bool:
    return estimate.predictable and estimate.source.startswith("progress: ")


async def test_a_first_run_has_a_remaining_time_with_an_interval_in_explanations_order_and_forecasts(
    mesh: Mesh,
) -> None:
    record = await running_job(mesh, steps_total=100_000)
    for second in range(60):
        report(mesh, record, 10 * second, second)
    estimate = (await estimated(mesh, record, by_its_rate)).estimate
    low, middle, high = map(seconds, (estimate.remaining_p10, estimate.remaining, estimate.remaining_p90))
    assert 5_000 < low < middle < high < 20_000
    assert middle == pytest.approx(9_940, rel=0.05)
    state = mesh.parts["queue"].service.state
    jobs = state.table.jobs(time.time())
    assert jobs.remaining_seconds[state.table.ids.index(record.id)] == pytest.approx(middle, rel=0.01)

    waits = await mesh.submit()
    await mesh.refused(waits, "CAPACITY")
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=waits))
    assert seconds(told.forecast.start) == pytest.approx(middle, rel=0.1)
    assert told.outlook.startswith("starts in about 2.")


async def test_a_total_that_changes_changes_the_remaining_time(mesh: Mesh) -> None:
    record = await running_job(mesh, steps_total=1_000)
    for second in range(60):
        report(mesh, record, 10 * second, second)
    await estimated(mesh, record, by_its_rate)
    more = job_pb2.Job(id=record.id, spec=job_pb2.JobSpec(steps_total=100_000))
    await mesh.jobs.UpdateJob(pb.UpdateJobRequest(job=more, update_mask=FieldMask(paths=["spec.steps_total"])))
    await estimated(mesh, record, lambda estimate: seconds(estimate.remaining) > 5_000)


async def test_a_step_beyond_the_total_counts_as_the_last(mesh: Mesh) -> None:
    record = await running_job(mesh, steps_total=400)
    for second in range(60):
        report(mesh, record, 10 * second, second)
    told = await estimated(mesh, record, lambda estimate: "beyond its total of 400" in estimate.source)
    assert (told.estimate.predictable, seconds(told.estimate.remaining)) == (True, 0)


async def test_a_job_that_stops_reporting_becomes_unknown_in_the_order_too(mesh: Mesh) -> None:
    record = await running_job(mesh, steps_total=100_000)
    for second in range(60):
        report(mesh, record, 10 * second, second)
    await estimated(mesh, record, by_its_rate)
    assert record.rate_track
    record.rate_track._reported_at -= 200
    refresh = mesh.parts["queue"].service.estimate_refresh
    refresh.request_silent(time.time())
    aged = (await estimated(mesh, record, lambda estimate: "no step for" in estimate.source)).estimate
    assert seconds(aged.remaining_p90) > seconds(aged.remaining) + 1_000
    record.rate_track._reported_at -= 600
    refresh.request_silent(time.time())
    unknown = (await estimated(mesh, record, lambda estimate: not estimate.predictable)).estimate
    assert unknown.source.startswith("progress: its last step, 590 of 100000, was ")
    assert not unknown.HasField("remaining")
    state = mesh.parts["queue"].service.state
    assert math.isnan(state.table.jobs(time.time()).predicted_seconds[state.table.ids.index(record.id)])
