"""The back-off of a failed job is independent of changes of the wall clock."""

from __future__ import annotations

import time

import pytest

from cotenant.codec.job_events import EventKind
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs import transitions
from cotenant.services.queue.jobs.job_record import Record
from cotenant.services.queue.jobs.retry_backoff import RetryBackoff
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

WAIT_SECONDS, HOUR = 10.0, 3600.0


class Clocks:
    """A wall clock that may be set, and a monotonic one."""

    def __init__(self) -> None:
        self.passed, self.set_by = 0.0, 0.0

    def wall(self) -> float:
        return 1e9 + self.passed + self.set_by


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(time, "time", made.wall)
    monkeypatch.setattr(time, "time_ns", lambda: int(made.wall() * 1e9))
    monkeypatch.setattr(time, "monotonic", lambda: 5.0 + made.passed)
    return made


@pytest.fixture
def failed(clocks: Clocks) -> Record:
    stored = records_pb2.StoredJob()
    stored.job.id = "a"
    stored.not_before_time.FromNanoseconds(int((clocks.wall() + WAIT_SECONDS) * 1e9))
    transitions.add_event(stored, EventKind.REQUEUED)
    return Record(stored, JobSpec())


def test_a_back_off_ends_after_its_time(clocks: Clocks, failed: Record) -> None:
    waits = RetryBackoff()
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS)
    clocks.passed = 4.0
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS - 4)
    clocks.passed = WAIT_SECONDS + 0.1
    assert waits.left_seconds(failed) == 0


@pytest.mark.parametrize("set_by", [HOUR, -HOUR])
def test_setting_the_clock_does_not_change_a_back_off(clocks: Clocks, failed: Record, set_by: float) -> None:
    waits = RetryBackoff()
    waits.left_seconds(failed)
    clocks.passed, clocks.set_by = 4.0, set_by
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS - 4)


def test_a_slow_clock_does_not_lengthen_a_back_off(clocks: Clocks, failed: Record) -> None:
    clocks.set_by = -HOUR
    waits = RetryBackoff()
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS)
    clocks.passed = WAIT_SECONDS + 0.1
    assert waits.left_seconds(failed) == 0


def test_a_second_failure_has_its_own_back_off(clocks: Clocks, failed: Record) -> None:
    waits = RetryBackoff()
    waits.left_seconds(failed)
    clocks.passed = 100.0
    failed.stored.not_before_time.FromNanoseconds(int((clocks.wall() + 2 * WAIT_SECONDS) * 1e9))
    transitions.add_event(failed.stored, EventKind.REQUEUED)
    assert waits.left_seconds(failed) == pytest.approx(2 * WAIT_SECONDS)


def test_the_back_off_before_an_attempt_is_over_after_it(clocks: Clocks, failed: Record) -> None:
    """As when the attempt is preempted under a leader whose clock is an hour slow."""
    attempt = job_pb2.Attempt(job_id="a", number=1, state=job_pb2.ATTEMPT_STATE_ASSIGNED)
    failed.stored.job.phase = job_pb2.JOB_PHASE_QUEUED
    assert transitions.apply_attempt(failed.stored, attempt)
    clocks.passed, clocks.set_by = 30.0, -HOUR
    attempt.state, attempt.stop_reason = job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.STOP_REASON_PREEMPTED
    assert transitions.apply_attempt(failed.stored, attempt)
    assert failed.phase is Phase.QUEUED
    assert RetryBackoff().left_seconds(failed) == 0


def test_a_job_without_failures_has_no_back_off(clocks: Clocks) -> None:
    assert RetryBackoff().left_seconds(Record(records_pb2.StoredJob(), JobSpec())) == 0
