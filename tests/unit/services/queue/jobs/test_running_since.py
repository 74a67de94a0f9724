"""Since when a job counts as running, where the clocks of other machines are wrong."""

from __future__ import annotations

import time

import pytest

from cotenant.core.model.job import JobSpec, Role
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import new_record
from cotenant.v1 import job_pb2

HOUR = 3600.0


def running_for(phase: job_pb2.JobPhase.ValueType, assigned_ago: float) -> float:
    """Return for how long a job has run by the table, if placement's clock says that it began so long ago."""
    state = State()
    record = new_record("a", JobSpec(tenant="default", roles=(Role(replicas=1),)), "ann", "")
    state.add(record)
    now = time.time()
    record.job.phase = phase
    record.job.attempt.number = 1
    record.job.attempt.assign_time.FromNanoseconds(int((now - assigned_ago) * 1e9))
    state.sync(record)
    jobs = state.table.jobs(now)
    return time.time() - float(jobs.running_since[0])


@pytest.mark.parametrize("assigned_ago", [HOUR, 24 * HOUR])
def test_what_starts_now_has_not_run_for_as_long_as_a_slow_clock_says(assigned_ago: float) -> None:
    assert running_for(job_pb2.JOB_PHASE_STARTING, assigned_ago) <= 1.0


def test_what_runs_already_has_run_for_as_long_as_is_said() -> None:
    assert running_for(job_pb2.JOB_PHASE_RUNNING, HOUR) == pytest.approx(HOUR, abs=1.0)


@pytest.mark.parametrize("phase", [job_pb2.JOB_PHASE_STARTING, job_pb2.JOB_PHASE_RUNNING])
def test_nothing_has_begun_in_the_future(phase: job_pb2.JobPhase.ValueType) -> None:
    assert 0.0 <= running_for(phase, -HOUR) <= 1.0
