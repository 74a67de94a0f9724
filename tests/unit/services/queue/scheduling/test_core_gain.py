"""What a running job is told about its cores."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.scheduling.core_gain import ENOUGH, GAIN_MIN, better, core_gain
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

RUNNING = job_pb2.JOB_PHASE_RUNNING


def told(
    rates: Mapping[int, float],
    *,
    rate: float = 9.7,
    cores: int = 1,
    asked: int | None = None,
    useful: int = 0,
    nodes: int = 1,
    phase: job_pb2.JobPhase.ValueType = RUNNING,
) -> str:
    spec = JobSpec(roles=(Role(request=Request(1000, asked)),), command=("train",))
    job = job_pb2.Job(id="j1", spec=specs.spec_to_wire(spec), phase=phase)
    job.progress.rate_per_second = rate
    task = job.attempt.allocations.add(node_id="n1").tasks.add(core_ids=range(cores))
    task.gpus.add(uuid="g", milli=1000)
    record = Record(records_pb2.StoredJob(job=job), spec)
    record.estimate = predictor_pb2.Estimate(cores_useful=useful)
    for count, predicted in rates.items():
        allocation = predictor_pb2.CandidateAllocation(cores=count, gpu_milli=1000, nodes=nodes)
        record.estimate.candidates.add(rate_per_second=predicted, allocation=allocation)
    return core_gain(record, now=0.0)


@pytest.mark.parametrize(
    ("rates", "more"),
    [
        ({1: 10.0, 2: 19.6}, "; 2 cores would give about 19/s"),
        ({1: 10.0, 2: 19.6, 4: 19.7, 8: 19.0}, "; 2 cores would give about 19/s"),
        ({1: 10.0, 2: 10.2}, ""),
        ({}, "; each further core would add at most 9.7/s, which is not measured yet"),
        ({2: 19.0}, ""),
    ],
)
def test_a_running_job_is_told_what_more_cores_would_give(rates: Mapping[int, float], more: str) -> None:
    assert told(rates) == f"1 core; measured 9.7/s{more}"


def test_a_job_with_its_own_cores_or_known_needs_is_told_no_guess() -> None:
    assert told({}, cores=2, asked=2) == told({}, cores=2, useful=2) == "2 cores; measured 9.7/s"


def test_rates_on_other_nodes_do_not_count() -> None:
    assert "about" not in told({1: 10.0, 2: 19.6}, nodes=2)


def test_nothing_is_told_of_a_job_that_has_no_rate_or_does_not_run() -> None:
    assert told({}, rate=0.0) == told({}, phase=job_pb2.JOB_PHASE_QUEUED) == ""


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 1e6), max_size=8), st.integers(1, 64))
def test_the_fewest_cores_that_nearly_reach_the_best_rate_are_named(rates: Mapping[int, float], cores: int) -> None:
    more = better(rates, cores)
    others = {count: rate for count, rate in rates.items() if count > cores}
    if more is None:
        assert cores not in rates or all(rate < GAIN_MIN * rates[cores] for rate in others.values())
    else:
        assert all(rate < ENOUGH * max(others.values()) for count, rate in others.items() if count < more)
        assert others[more] >= ENOUGH * max(others.values())
