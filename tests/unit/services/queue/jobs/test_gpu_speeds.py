"""What a live job's GPU type is worth to it, in the order and in words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.services.queue.jobs.gpu_speeds import gpu_worth, type_in_words
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

SHAPES = [NodeShape(2, 16, "T4"), NodeShape(2, 16, "A100")]
RATES = {"T4": 2.0, "A100": 5.0}


def running(on: str, rates: Mapping[str, float] = RATES, gpus: int = 1, remaining: float | None = None) -> Record:
    spec = JobSpec(roles=(Role(request=Request(1000 * gpus, 4)),), command=("train",))
    job = job_pb2.Job(id="j1", spec=specs.spec_to_wire(spec), phase=job_pb2.JOB_PHASE_RUNNING)
    job.attempt.start_time.FromSeconds(1000)
    task = job.attempt.allocations.add(node_id="n1", gpu_type=on).tasks.add(core_ids=range(4))
    task.gpus.add(uuid="g", milli=1000)
    record = Record(records_pb2.StoredJob(job=job), spec)
    record.estimate = predictor_pb2.Estimate(predictable=remaining is not None, confidence=0.9)
    if remaining is not None:
        record.estimate.remaining.FromNanoseconds(int(remaining * 1e9))
    for kind, rate in rates.items():
        allocation = predictor_pb2.CandidateAllocation(cores=4, gpu_milli=1000, nodes=1, gpu_type=kind)
        record.estimate.candidates.add(rate_per_second=rate, allocation=allocation)
    return record


def words(record: Record, *others: Record) -> str:
    return type_in_words(record, [record, *others], SHAPES, 1000.0)


def test_a_job_on_a_slow_type_is_told_its_speed_and_until_when_the_fast_one_is_taken() -> None:
    slow = running("T4")
    assert words(slow) == "runs on T4: 0.4 of its speed on A100"
    assert words(slow, running("A100", gpus=2)) == "runs on T4: 0.4 of its speed on A100; all A100 are taken"
    told = words(slow, running("A100", remaining=600), running("A100", remaining=7200))
    assert told.startswith("runs on T4: 0.4 of its speed on A100; all A100 are taken until about ")
    assert told[-5:-3].isdigit()


def test_a_job_on_its_fastest_type_is_told_what_that_gives() -> None:
    assert words(running("A100")) == "runs on A100: 2.5 times its speed on T4"


@pytest.mark.parametrize("rates", [{}, {"T4": 2.0}, {"A100": 5.0, "V100": 3.0}])
def test_nothing_is_told_without_rates_to_compare(rates: Mapping[str, float]) -> None:
    assert words(running("T4", rates)) == ""


def test_gpus_are_worth_the_mean_over_the_run_time_of_attempts() -> None:
    record = running("T4")
    here = record.job.attempt
    assert gpu_worth(record, SHAPES, [here]) == pytest.approx(2 / 3.5)
    past = [job_pb2.Attempt(), job_pb2.Attempt()]
    for attempt, kind, seconds in zip(past, RATES, (30, 10), strict=True):
        attempt.allocations.add(gpu_type=kind)
        attempt.start_time.FromSeconds(0)
        attempt.end_time.FromSeconds(seconds)
    assert gpu_worth(record, SHAPES, past) == pytest.approx((30 * 2 + 10 * 5) / 40 / 3.5)
    assert gpu_worth(record, SHAPES[:1], past) == gpu_worth(record, SHAPES, []) == 1.0
