"""What was held at a moment of the last day, and that little is kept of it."""

from __future__ import annotations

import pytest

from cotenant.v1.job_pb2 import Attempt, AttemptState, Job, JobSpec
from cotenant.v1.resources_pb2 import NodeAllocation, TaskAllocation
from cotenant.web import occupancy
from cotenant.web.occupancy import DAY_SECONDS, Occupancy

NOW = 1_000_000.0
RUNNING, DONE = AttemptState.ATTEMPT_STATE_RUNNING, AttemptState.ATTEMPT_STATE_SUCCEEDED


def job(name: str, begin: float, end: float | None = None, *, number: int = 1, node: str = "n") -> Job:
    """Return a job whose last attempt held a core of a node."""
    part = NodeAllocation(node_id=node, tasks=[TaskAllocation(core_ids=[3])])
    attempt = Attempt(number=number, state=RUNNING if end is None else DONE, allocations=[part])
    attempt.assign_time.FromSeconds(int(begin))
    if end is not None:
        attempt.end_time.FromSeconds(int(end))
    return Job(id=name, spec=JobSpec(name=f"name-{name}"), attempt=attempt)


def held(kept: Occupancy, moment: float) -> set[tuple[str, str]]:
    return {(node, one["id"]) for node, parts in kept.at(moment).items() for one in parts}


def test_what_was_held_is_known_of_jobs_that_ended_before_anybody_looked() -> None:
    kept = Occupancy(lambda: NOW)
    kept.put(job("a", NOW - 500, NOW - 100))
    kept.put(job("b", NOW - 300))
    kept.put(Job(id="waits"))
    assert held(kept, NOW - 600) == set()
    assert held(kept, NOW - 200) == {("n", "a"), ("n", "b")}
    assert held(kept, NOW - 50) == {("n", "b")}
    assert kept.at(NOW)["n"] == [{"id": "b", "name": "name-b", "cores": [3], "gpus": []}]


def test_an_earlier_attempt_stays_known_when_the_job_runs_elsewhere_or_is_deleted() -> None:
    clock = [NOW]
    kept = Occupancy(lambda: clock[0])
    kept.put(job("a", NOW - 10, node="first"))
    clock[0] = NOW + 20
    kept.put(job("a", NOW + 20, number=2, node="second"))
    clock[0] = NOW + 40
    kept.remove("a")
    kept.remove("a")
    assert (held(kept, NOW), held(kept, NOW + 30), held(kept, NOW + 41)) == ({("first", "a")}, {("second", "a")}, set())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "SPANS_MAX", 10)
    monkeypatch.setattr(occupancy, "SLACK", 5)
    kept = Occupancy(lambda: NOW)
    kept.put(job("old", NOW - 2 * DAY_SECONDS, NOW - DAY_SECONDS - 1))
    assert len(kept) == 0
    for number in range(100):
        kept.put(job(f"j{number}", NOW - 1000 + number, NOW - 900 + number))
    assert len(kept) <= 15
    assert held(kept, NOW - 801.5) == {("n", "j99")}, "those that ended last are kept"
