"""Acknowledged requests are checked against the committed records and the recorded starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.verification.chaos.acknowledgements import Acknowledgements

from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.history.events import AttemptPut, Began, Change, Commit, JobGone, JobPut, NodePut


def attempt(job_id: str, number: int = 1, node_id: str = "n") -> AttemptPut:
    return AttemptPut(job_id, number, 0, AttemptState.ASSIGNED, {}, frozenset({node_id}), (0,), 1)


def judged(changes: list[Change], *answers: dict[str, Any], began: tuple[float, ...] = ()) -> list[str]:
    acknowledgements = Acknowledgements()
    for answer in answers:
        acknowledgements.take_answer(answer)
    acknowledgements.take_commits(Commit(revision, (change,)) for revision, change in enumerate(changes, 1))
    return acknowledgements.judge([(at, Began("n", "a", 1, 2)) for at in began])


def queued(job_id: str, priority: int = 0) -> JobPut:
    return JobPut(job_id, Phase.QUEUED, priority=priority)


def ended(job_id: str, phase: Phase = Phase.SUCCEEDED, priority: int = 0) -> JobPut:
    return JobPut(job_id, phase, priority=priority)


def test_an_acknowledged_update_stays_and_an_unanswered_one_may() -> None:
    asked, acknowledged = {"asked": "a", "priority": 3}, {"updated": "a", "priority": 3}
    later = {"asked": "a", "priority": 4}
    assert judged([ended("a", priority=3)], asked, acknowledged) == []
    assert judged([ended("a", priority=4)], asked, acknowledged, later) == []
    assert judged([ended("a", priority=0)], asked) == []
    assert judged([ended("a", priority=0)], asked, acknowledged) == ["a was given priority [3], and has 0"]


def test_an_attempt_that_begins_during_a_suspension_is_stopped() -> None:
    answer = {"suspended": "a", "begin": 5.0, "end": 8.0}
    assert judged([ended("a")], answer, began=(4.0, 9.0)) == []
    assert judged([ended("a")], answer, began=(6.0,)) == ["a/1 began on n while suspended, and was not stopped"]
    stopped = replace(attempt("a"), state=AttemptState.STOPPED)
    assert judged([attempt("a"), stopped, ended("a")], answer, began=(6.0,)) == []


@pytest.mark.parametrize("condition", ["after", "after_ok"])
def test_a_job_begins_after_its_dependencies(condition: str) -> None:
    answer = {"job": "b", "after": {"a": condition}}
    assert judged([queued("a"), ended("a"), attempt("b")], answer) == []
    assert judged([queued("a"), attempt("b"), ended("a")], answer) == ["b began at 2, and a before it ended at 3"]
    assert judged([queued("a"), attempt("b")], answer)[0] == "b began at 2, and a before it ended at None"
    failed = judged([queued("a"), ended("a", Phase.CANCELLED), attempt("b")], answer)
    assert len(failed) == (condition == "after_ok")


def test_only_a_job_whose_dependency_failed_is_cancelled() -> None:
    acknowledgements = Acknowledgements()
    acknowledgements.take_answer({"job": "b", "after": {"a": "after_ok"}})
    acknowledgements.take_answer({"job": "c", "after": {"a": "after"}})
    acknowledgements.take_commits([Commit(1, (ended("a", Phase.CANCELLED),))])
    assert (acknowledgements.why_cancelled("b"), acknowledgements.why_cancelled("c")) == (True, False)


def test_a_drained_node_gets_no_work_until_it_is_uncordoned() -> None:
    answer = {"drained": "n", "since": "since"}
    closed, opened = NodePut("n", takes_work=False), NodePut("n", takes_work=True)
    late: list[Change] = [closed, attempt("a"), queued("since")]  # decided before the drain, and stopped by it
    assert judged([*late, attempt("b", node_id="m"), opened, attempt("c")], answer) == []
    assert judged([*late, attempt("a", 2), opened], answer) == [
        "a/2 was placed on n at 4, which accepted no work since before 3"
    ]


def test_a_cordoned_node_gets_no_work() -> None:
    changes: list[Change] = [NodePut("n", takes_work=False), queued("since"), attempt("a")]
    assert len(judged(changes, {"cordoned": "n", "since": "since"})) == 1


def test_a_migrated_job_does_not_return_to_its_node() -> None:
    answer = {"moved": "a", "number": 1}
    assert judged([attempt("a"), attempt("a", 2, "m"), ended("a")], answer) == []
    assert judged([attempt("a"), attempt("a", 2), ended("a")], answer) == [
        "a/2 was placed on n, which attempt 1 had left"
    ]
    gang = replace(attempt("a", 2), nodes=frozenset({"n", "m"}))  # no other nodes fit
    assert judged([attempt("a"), gang, ended("a")], answer) == []


def test_a_removed_job_keeps_its_final_phase() -> None:
    acknowledgements = Acknowledgements()
    changes: list[Change] = [ended("a"), queued("b"), JobGone("a"), JobGone("b")]
    acknowledgements.take_commits(Commit(revision, (change,)) for revision, change in enumerate(changes, 1))
    assert acknowledgements.forgotten == {"a": Phase.SUCCEEDED}


def test_a_service_ends_only_when_cancelled() -> None:
    answer = {"job": "a", "service": True}
    assert judged([ended("a", Phase.CANCELLED)], answer) == []
    assert judged([ended("a")], answer) == ["a, a service, ended without being cancelled"]
