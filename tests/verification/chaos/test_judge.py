"""Records of users and jobs are accepted only if they are consistent."""

from __future__ import annotations

import json
from pathlib import Path

from tests.verification.chaos.judge import (
    Absence,
    Judge,
    UserRecords,
    archived_in,
    judge_archive,
    judge_failures,
    judge_journal,
    with_absences,
)

from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.history.events import AttemptPut, Began, Came, Commit, JobPut, Left, Over
from cotenant.history.recording import written
from cotenant.services.queue.jobs.archive import Archive
from cotenant.v1 import job_pb2

NODE, LOST_AFTER_SECONDS = "node-of-m", 5.0
HELD = {(NODE, "core 0"): 1000}
FIRST = AttemptPut("a", 1, 2, AttemptState.ASSIGNED, HELD, frozenset({NODE}), (0,), 1)
DONE = AttemptPut("a", 1, 2, AttemptState.SUCCEEDED, HELD, frozenset({NODE}), (0,), 1)
COMMITS = [
    Commit(1, (JobPut("a", Phase.QUEUED, ("r",)),), 1.0),
    Commit(2, (FIRST,), 2.0),
    Commit(3, (DONE,), 4.0),
    Commit(4, (JobPut("a", Phase.SUCCEEDED, ("r",), 1),), 4.1),
]
ANSWER = json.dumps({"request": "r", "job": "a", "replicas": 1, "alone": False})
BEGAN, OVER = written(Began(NODE, "a", 1, 2, HELD), 2.5), written(Over(NODE, "a", 1), 3.5)
START, END = ["start", "a", "1", "0", "m"], ["end", "a", "1", "0", "m"]


def judged(commits: list[Commit], answers: list[str], edges: list[str], journal: list[list[str]]) -> list[str]:
    judge = Judge({"m": NODE}, LOST_AFTER_SECONDS)
    judge.take(commits, answers, edges, journal, [])
    return judge.wrong


def test_a_correct_run_has_no_errors() -> None:
    assert judged(COMMITS, [ANSWER], [BEGAN, OVER], [START, END]) == []


def test_commits_answers_edges_and_journals_are_checked() -> None:
    assert "never kept" in judged([], [ANSWER], [], [])[0]
    assert "never began on" in judged(COMMITS, [ANSWER], [BEGAN, OVER], [])[0]  # nothing ran
    assert "has not ended" in judged(COMMITS[:1], [ANSWER], [], [])[0]
    assert "never submitted" in judged(COMMITS, [], [BEGAN, OVER], [START, END])[-1]
    again = written(Began(NODE, "a", 1, 2, HELD), 2.6)
    twice = judged(COMMITS, [ANSWER], [BEGAN, again, OVER], [START, START, END])
    assert [("began twice" in one, "2 times" in one) for one in twice] == [(True, False), (False, True)]
    assert (
        judged(COMMITS, [ANSWER], [BEGAN, again, OVER], [START, END]) == []
    )  # the agent was killed before the first ran


def test_a_journal_is_compared_with_how_jobs_ended() -> None:
    users = UserRecords()
    gang = {"request": "s", "job": "b", "replicas": 2, "alone": False}
    users.take([ANSWER, json.dumps(gang), json.dumps({"cancel": ["b"]})])
    done = {"a": Phase.SUCCEEDED, "b": Phase.CANCELLED}
    assert judge_journal([START, END], users, done, set()) == []
    assert judge_journal([START], users, done, set()) == ["a succeeded, but never ran to its end"]
    assert judge_journal([START, END], users, {**done, "a": Phase.FAILED}, set()) == ["a failed without a reason"]
    half = [START, END, ["start", "b", "1", "0", "m"], ["end", "b", "1", "0", "m"]]
    assert judge_journal(half, users, {**done, "b": Phase.SUCCEEDED}, set()) == [
        "b succeeded, but never ran to its end"
    ]
    users.cancelled.clear()
    assert judge_journal([START, END], users, done, set()) == ["b cancelled without a reason"]


def test_a_lost_attempt_may_overlap_the_next_but_not_use_others_resources() -> None:
    users = UserRecords()
    users.take([ANSWER])
    twice = [["twice:job-a-0", "a", "2", "0", "m"], ["twice:m-core-0", "a", "2", "0", "m"], START, END]
    assert len(judge_journal(twice, users, {"a": Phase.SUCCEEDED}, set())) == 2
    assert judge_journal(twice, users, {"a": Phase.SUCCEEDED}, {"a"}) == ["twice:m-core-0 when a/2/0 started"]
    users.alone.add("a")  # a request to stop it came first
    assert len(judge_journal(twice, users, {"a": Phase.SUCCEEDED}, {"a"})) == 2


def test_a_node_is_absent_from_a_fault_until_it_connects_after_its_end() -> None:
    came = [(1.0, Came("n")), (3.0, Came("n")), (5.0, Came("n")), (3.0, Came("o"))]
    found = with_absences(came, [Absence(frozenset({"n"}), 2.0, 4.0)], ["n", "o"])
    assert found[0] == (2.0, Left("n", 2.0))
    assert [pair for pair in found if pair[1] == Came("n")][:2] == [(1.0, Came("n")), (5.0, Came("n"))]
    assert (3.0, Came("o")) in found


def test_an_attempt_fails_only_if_it_was_killed_or_its_disk_was_full() -> None:
    failed = {("a", 1): "its supervisor died", ("b", 1): "cannot write: No space left on device", ("c", 2): "died"}
    assert judge_failures(failed, {("a", 1)}) == ["c/2 failed, and none of its processes was killed: died"]


def test_only_a_forgotten_node_loses_its_running_attempts() -> None:
    lost = AttemptPut("a", 1, 2, AttemptState.LOST, HELD, frozenset({NODE}), (0,), 1)
    commits = [*COMMITS[:2], Commit(3, (lost,), 4.0)]
    asked = [json.dumps({"forgetting": NODE, "at": 3.0}), json.dumps({"forgot": NODE, "done": True, "at": 3.5})]
    given_up = [ANSWER, *asked]
    assert any("was given up, and runs" in what for what in judged(commits, [ANSWER], [BEGAN], [START]))
    assert not any("was given up, and runs" in what for what in judged(commits, given_up, [BEGAN], [START]))
    late = [*COMMITS[:2], Commit(3, (lost,), 60.0)]
    assert any("was given up, and runs" in what for what in judged(late, given_up, [BEGAN], [START]))


async def test_a_removed_job_must_be_in_an_archive(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "other", tmp_path / "none"]
    spec = job_pb2.JobSpec(kind=job_pb2.JOB_KIND_CPU)
    for job_id, file in zip("ab", files[:2], strict=True):
        await Archive(file).add([job_pb2.Job(id=job_id, phase=job_pb2.JOB_PHASE_SUCCEEDED, spec=spec)])
    archived = archived_in(files)
    assert archived == {"a": "succeeded", "b": "succeeded"}
    assert judge_archive(dict.fromkeys("ab", Phase.SUCCEEDED), archived) == []
    assert judge_archive({"a": Phase.FAILED, "c": Phase.CANCELLED}, archived) == [
        "a failed was removed, and is succeeded in the archives",
        "c cancelled was removed, and is nowhere in the archives",
    ]
