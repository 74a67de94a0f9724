"""A job that failed waits as long as it was to wait, whatever is done to clocks meanwhile."""

from __future__ import annotations

import time

import pytest

from cotenant.core.model.job import JobSpec
from cotenant.services.queue.jobs import transitions
from cotenant.services.queue.jobs.job_record import Record
from cotenant.services.queue.jobs.retry_backoff import BackOffs
from cotenant.v1 import records_pb2

WAIT_SECONDS, HOUR = 10.0, 3600.0


class Clocks:
    """A clock that is set, and one that is not."""

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
    transitions.note(stored, "requeued")
    return Record(stored, JobSpec())


def test_the_wait_ends_after_its_time(clocks: Clocks, failed: Record) -> None:
    waits = BackOffs()
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS)
    clocks.passed = 4.0
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS - 4)
    clocks.passed = WAIT_SECONDS + 0.1
    assert waits.left_seconds(failed) == 0


@pytest.mark.parametrize("set_by", [HOUR, -HOUR])
def test_a_clock_that_is_set_meanwhile_changes_nothing(clocks: Clocks, failed: Record, set_by: float) -> None:
    waits = BackOffs()
    waits.left_seconds(failed)
    clocks.passed, clocks.set_by = 4.0, set_by
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS - 4)


def test_another_process_whose_clock_is_late_waits_no_longer_than_was_meant(clocks: Clocks, failed: Record) -> None:
    clocks.set_by = -HOUR
    waits = BackOffs()
    assert waits.left_seconds(failed) == pytest.approx(WAIT_SECONDS)
    clocks.passed = WAIT_SECONDS + 0.1
    assert waits.left_seconds(failed) == 0


def test_a_second_failure_is_a_wait_of_its_own(clocks: Clocks, failed: Record) -> None:
    waits = BackOffs()
    waits.left_seconds(failed)
    clocks.passed = 100.0
    failed.stored.not_before_time.FromNanoseconds(int((clocks.wall() + 2 * WAIT_SECONDS) * 1e9))
    transitions.note(failed.stored, "requeued")
    assert waits.left_seconds(failed) == pytest.approx(2 * WAIT_SECONDS)


def test_a_job_that_never_failed_waits_for_nothing(clocks: Clocks) -> None:
    assert BackOffs().left_seconds(Record(records_pb2.StoredJob(), JobSpec())) == 0
