from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job_table import JobRow, JobTable


@dataclass
class SlowJob:
    """A job kept the slow way: as itself."""

    row: JobRow
    attained: float = 0.0
    waiting_since: float = 0.0
    running_since: float | None = None
    remaining: float = float("nan")

    def attained_at(self, now: float) -> float:
        return self.attained + (now - self.running_since if self.running_since is not None else 0.0)


VERBS = ["add", "add", "return", "remove", "start", "stop", "attain", "update", "look"]
steps = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5), st.floats(0, 50), st.integers(0, 3)), max_size=60)


def do(table: JobTable, slow: dict[str, SlowJob], verb: str, job_id: str, now: float, gpus: int) -> None:
    job = slow.get(job_id)
    if verb in ("add", "return") and job is None:
        arrived = now if verb == "add" else now / 2  # one that comes back arrived before others
        sequence = 1 + max((one.row.sequence for one in slow.values()), default=0)
        row = JobRow(job_id, arrived, sequence, gpu_milli=gpus * 1000, cores=gpus, replicas=gpus + 1, priority=-gpus)
        table.add(row)
        slow[job_id] = SlowJob(row, waiting_since=arrived)
    elif verb == "look":
        table.jobs(now)
    elif job is None:
        return
    elif verb == "remove":
        table.remove(job_id)
        del slow[job_id]
    elif verb == "start" and job.running_since is None:
        table.start(job_id, now)
        job.running_since = now
    elif verb == "stop" and job.running_since is not None:
        table.stop(job_id, now)
        job.attained = job.attained_at(now)
        job.running_since, job.waiting_since = None, now
    elif verb == "attain":
        table.attain(job_id, 5.0)
        job.attained += 5.0
    elif verb == "update":
        table.update(job_id, remaining_seconds=now, confidence=0.5)
        job.remaining = now


@given(steps, st.integers(0, 3))
def test_the_table_agrees_with_a_dict_of_jobs(steps: list[tuple[str, int, float, int]], capacity: int) -> None:
    table, slow, now = JobTable(capacity), dict[str, SlowJob](), 0.0
    for verb, number, passed, gpus in steps:
        now += passed
        do(table, slow, verb, f"job{number}", now, gpus)
        assert sorted(table.ids) == sorted(slow)
    jobs = table.jobs(now)
    assert len(jobs) == len(table) == len(slow)
    assert table.waits() == any(job.running_since is None for job in slow.values())
    assert jobs.by_arrival is not None
    in_turn = sorted(slow.values(), key=lambda job: (job.row.arrival_seconds, job.row.sequence))
    assert [table.ids[row] for row in jobs.by_arrival] == [job.row.id for job in in_turn]
    for job_id, job in slow.items():
        assert job_id in table
        row = table.row(job_id)
        assert table.ids[row] == job_id
        assert jobs.sequence[row] == job.row.sequence
        assert jobs.arrival_seconds[row] == job.row.arrival_seconds
        assert jobs.gpu_milli[row] == job.row.gpu_milli
        assert jobs.replicas[row] == job.row.replicas
        assert jobs.priority[row] == job.row.priority
        assert jobs.running[row] == (job.running_since is not None)
        assert jobs.waiting_since[row] == job.waiting_since
        assert jobs.attained_seconds[row] == pytest.approx(job.attained_at(now))
        assert jobs.attained_gpu_seconds[row] == pytest.approx(job.attained_at(now) * job.row.gpu_milli / 1000)
        assert np.isnan(jobs.running_since[row]) == (job.running_since is None)
        np.testing.assert_equal(jobs.remaining_seconds[row], job.remaining)


def test_a_job_keeps_its_name_when_another_one_leaves() -> None:
    table = JobTable()
    for number, job_id in enumerate("abc"):
        table.add(JobRow(job_id, 0.0, number))
    table.remove("a")
    assert table.jobs(0.0).sequence[[table.row("b"), table.row("c")]].tolist() == [1, 2]


def test_asking_twice_gives_the_same_and_changes_nothing() -> None:
    table = JobTable()
    table.add(JobRow("a", 0.0, 0, gpu_milli=1000))
    table.start("a", now=10.0)
    assert table.jobs(20.0).attained_seconds.tolist() == table.jobs(20.0).attained_seconds.tolist() == [10.0]
    assert table.jobs(12.0).attained_seconds.tolist() == [2.0]


def test_a_clock_that_goes_back_takes_no_service_away() -> None:
    table = JobTable()
    table.add(JobRow("a", 0.0, 0, gpu_milli=1000))
    table.start("a", now=10.0)
    assert table.jobs(5.0).attained_seconds.tolist() == [0.0]
    table.stop("a", now=5.0)
    assert table.jobs(5.0).attained_seconds.tolist() == [0.0]


def test_a_job_is_not_taken_in_twice() -> None:
    table = JobTable()
    table.add(JobRow("a", 0.0, 0))
    with pytest.raises(ValueError, match="in the table already"):
        table.add(JobRow("a", 1.0, 1))


@pytest.mark.parametrize(
    "ask", [lambda table: table.row("b"), lambda table: table.remove("b"), lambda table: table.start("b", 0.0)]
)
def test_an_unknown_job_is_an_error(ask: Callable[[JobTable], Any]) -> None:
    table = JobTable()
    table.add(JobRow("a", 0.0, 0))
    with pytest.raises(KeyError):
        ask(table)
    assert table.ids == ["a"]


def test_remaining_time_follows_from_the_predicted_total() -> None:
    table = JobTable()
    table.add(JobRow("a", 0.0, 0))
    table.attain("a", 100.0)
    table.update("a", predicted_seconds=150.0)
    assert table.jobs(10.0).remaining_seconds.tolist() == [50.0]
    table.start("a", 10.0)
    assert table.jobs(40.0).remaining_seconds.tolist() == [20.0]
    assert table.jobs(90.0).remaining_seconds.tolist() == [0.0]
    assert table.jobs(90.0).predicted_seconds.tolist() == [150.0]
