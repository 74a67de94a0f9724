from __future__ import annotations

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode


def test_a_rerun_keeps_all_but_what_belonged_to_that_submission(shell: Shell, standin: Standin) -> None:
    words = ("--name", "a", "--gpus", "2", "--label", "x=y", "--env", "A=1", "--begin", "2999-01-01", "--hold")
    earlier = shell("submit", *words, "--tenant", "vision", "--deadline", "2999-01-02", "--", "python3", "-c", "1")
    before = standin.jobs.jobs[earlier.out.strip()]
    before.spec.notify.append("https://hooks.example.org/…")
    again = shell("rerun", before.id)
    made = standin.jobs.jobs[again.out.strip()]
    assert made.id != before.id
    assert f"{before.id}: its begin time is not repeated" in again.err
    assert f"{before.id}: its hold is not repeated" in again.err
    expected = before.spec
    expected.ClearField("begin_time")
    expected.ClearField("hold")
    asked = standin.jobs.asked[-1]
    assert (asked.spec, asked.like) == (expected, before.id)


def test_options_override_the_earlier_job(shell: Shell, standin: Standin) -> None:
    before = standin.jobs.jobs[shell("submit", "--gpus", "1", "--label", "x=y", "--", "true").out.strip()]
    before.spec.notify.append("mailto:…@example.org")
    words = ("--gpus", "2", "--time", "1h", "--notify", "mailto:a@b.org", "--", "false")
    told = shell("submit", "--like", before.id, *words)
    assert told.code == ExitCode.DONE, told.err
    made = standin.jobs.jobs[told.out.strip()]
    assert (made.spec.roles[0].resources.gpu_milli, made.spec.time_limit.seconds) == (2000, 3600)
    assert (list(made.spec.command), dict(made.spec.labels)) == (["false"], {"x": "y"})
    assert list(made.spec.notify) == ["mailto:a@b.org"]
    assert made.spec.submit_directory == before.spec.submit_directory
    plain = standin.jobs.jobs[shell("submit", "--like", before.id, "--no-notify", "--empty-workdir").out.strip()]
    assert (list(plain.spec.notify), plain.spec.HasField("submit_directory")) == ([], False)


def test_a_notification_that_is_no_longer_known_is_dropped_with_a_word(shell: Shell, standin: Standin) -> None:
    before = standin.jobs.jobs[shell("submit", "--", "true").out.strip()]
    before.spec.notify.append("https://forgotten.example.org/…")
    told = shell("rerun", before.id)
    assert "its notification to https://forgotten.example.org/… is not repeated" in told.err
    assert list(standin.jobs.jobs[told.out.strip()].spec.notify) == []


def test_a_task_of_an_array_becomes_an_array_of_its_index(shell: Shell, standin: Standin) -> None:
    before = standin.jobs.jobs[shell("submit", "--", "true").out.strip()]
    before.spec.array_task.array_id, before.spec.array_task.index, before.spec.array_task.count = "a", 7, 9
    told = shell("rerun", before.id, "--dry-run", "--json")
    assert told.json[0]["array"] == "7"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("rerun", "nothing"), "not found"),
        (("submit", "--like", "nothing"), "not found"),
        (("submit", "--like", "x", "job.yaml"), "--like takes neither job files nor --git"),
    ],
)
def test_mistakes_are_one_clear_error(shell: Shell, standin: Standin, words: tuple[str, ...], error: str) -> None:
    told = shell(*words)
    assert told.code in (ExitCode.USAGE, ExitCode.FAILED)
    assert error in told.err
