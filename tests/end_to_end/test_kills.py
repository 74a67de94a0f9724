"""A few random kills of everything, and tests of the judge itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kill_mesh import KillMesh, find_violations, journal_violations, wait_until_done
from benchmarks.kills import run
from tests.end_to_end import remains
from tests.end_to_end.waiting import until
from tests.unit.node_agent.conditions import need_groups

KILLS = 10


@pytest.mark.deep
@pytest.mark.root
def test_nothing_is_lost_owned_twice_or_left_when_anything_may_be_killed(tmp_path: Path) -> None:
    need_groups("cpuset")
    mesh, submitter, wrong = run(KILLS, "a few", tmp_path / "mesh", unfinished=4)
    assert wrong == []
    assert mesh.kills.total() >= KILLS
    assert mesh.history.revisions > KILLS
    assert len(submitter.acknowledged) >= 4


@pytest.mark.deep
@pytest.mark.root
def test_an_agent_that_leaves_orphans_is_caught(tmp_path: Path) -> None:
    """After its supervisor is killed, a job's daemon survives and still holds the job's core."""
    need_groups("cpuset")
    mesh = KillMesh(tmp_path / "mesh", {"n1": "0"}, broken="leaves orphans")
    for part in mesh.parts:
        mesh.start(part)
    job_id = mesh.submit(1, 1, seconds=6.0, daemon=True)  # long enough to be found on a busy machine
    until(lambda: "sleep 600" in str(remains.processes_of(mesh.directory)), "a job that left a daemon")
    until(mesh.kill_supervisors, "a supervisor that could be killed")
    wait_until_done(mesh, {job_id: 1}, 20)
    mesh.stop()
    wrong = find_violations(mesh, {job_id: 1})
    assert any(line.startswith("twice:core-0 when") for line in wrong)
    assert any("was left: sleep 600" in line for line in wrong)


def test_a_journal_with_violations_is_rejected() -> None:
    reported = [["start", "a", "1", "0"], ["end", "a", "1", "0"], ["start", "b", "1", "0"], ["end", "b", "1", "0"]]
    assert journal_violations(reported, {"a": 1, "b": 1}) == []
    assert journal_violations(reported, {"a": 1, "b": 2}) == ["b never ran to its end"]
    assert journal_violations(reported, {"a": 1, "b": 1, "c": 1}) == ["c never ran to its end"]
    assert journal_violations(reported, {"a": 1}) == ["b ran, but was never submitted"]
    assert journal_violations([*reported, ["start", "a", "1", "0"]], {"a": 1, "b": 1}) == ["a/1/0 was started 2 times"]
    twice = [*reported, ["twice:GPU-0", "a", "2", "0"]]
    assert journal_violations(twice, {"a": 1, "b": 1}) == ["twice:GPU-0 when a/2/0 started"]
