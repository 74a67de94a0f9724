"""Whom to notify: options, job files, the user's defaults, and the bell."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.bell import BELL, LONG_SECONDS, Bell
from cotenant.cli.jobs.job_file import BadJobs, read_jobs
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import TRIGGERS
from cotenant.core.model.notification import Trigger

MAIL, HOOK = "mailto:ada@example.org", "https://hooks.example.org/s3cret"


def configure(home: Path, text: str) -> Path:
    path = home / "config" / "cotenant" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_a_job_file_is_read_as_it_is_written() -> None:
    text = f"cpus: 1\nnotify: [{MAIL}, '{HOOK}']\nnotify_on: [failed, started]\ncommand: [run]"
    [draft] = read_jobs(text, "job.yaml", now=0.0)
    assert draft.spec.notify == (MAIL, HOOK)
    assert draft.spec.notify_on == (Trigger.FAILED, Trigger.STARTED)
    assert [one.spec for one in read_jobs(write_jobs([draft.spec]), "job.yaml", now=0.0)] == [draft.spec]


def test_every_mistake_is_named_without_the_secret() -> None:
    with pytest.raises(BadJobs) as error:
        read_jobs("notify: ['ftp://x/s3cret', 7, []]\nnotify_on: [failed, ended]\ncpus: 1\ncommand: [a]", "j.yaml", 0.0)
    found = "\n".join(error.value.details)
    assert "notify[0]: must begin with https://" in found
    assert "notify[2]: must be a single value" in found
    assert "notify_on: must be one of succeeded, failed, cancelled, started, not 'ended'" in found
    assert "s3cret" not in found


def test_options_are_sent(shell: Shell, standin: Standin) -> None:
    done = shell(
        "submit", "--cpus", "1", "--notify", MAIL, "--notify", HOOK, "--notify-on", "failed,started", "--", "a"
    )
    assert done.code == ExitCode.DONE, done.err
    [spec] = [one.spec for one in standin.jobs.asked]
    assert list(spec.notify) == [MAIL, HOOK]
    assert [TRIGGERS.from_wire(one) for one in spec.notify_on] == [Trigger.FAILED, Trigger.STARTED]


def test_defaults_of_the_user_are_for_jobs_that_name_nobody(shell: Shell, standin: Standin, home: Path) -> None:
    configure(home, f'notify = ["{MAIL}"]\nnotify_on = ["failed"]\n')
    assert shell("submit", "--cpus", "1", "--", "a").code == ExitCode.DONE
    assert shell("submit", "--cpus", "1", "--notify", HOOK, "--", "a").code == ExitCode.DONE
    assert shell("submit", "--cpus", "1", "--no-notify", "--", "a").code == ExitCode.DONE
    assert [list(one.spec.notify) for one in standin.jobs.asked] == [[MAIL], [HOOK], []]
    assert [len(one.spec.notify_on) for one in standin.jobs.asked] == [1, 0, 0]


def test_bad_defaults_are_named_with_their_file(shell: Shell, standin: Standin, home: Path) -> None:
    path = configure(home, 'notify = ["ftp://x"]\nnotify_on = ["soon"]\n')
    ended = shell("submit", "--cpus", "1", "--", "a")
    assert ended.code == ExitCode.USAGE
    assert str(path) in ended.err
    assert "notify[0]: must begin with" in ended.err
    assert "notify_on: must be of" in ended.err
    path.write_text("notify = 7\nbell = 'no'\n")
    assert "notify: must be a list of texts" in shell("submit", "--cpus", "1", "--", "a").err
    assert standin.jobs.asked == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("wanted", "seconds", "output", "rung"),
    [
        (True, LONG_SECONDS, Terminal(), True),
        (True, LONG_SECONDS - 0.1, Terminal(), False),
        (False, 60.0, Terminal(), False),
        (True, 60.0, io.StringIO(), False),
    ],
    ids=["long", "short", "unwanted", "no terminal"],
)
def test_the_bell_rings_on_a_terminal_after_a_long_wait(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, seconds: float, output: io.StringIO, rung: bool
) -> None:
    times = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(sys, "stdout", output)
    Bell(wanted=wanted, clock=lambda: next(times)).ring()
    assert output.getvalue() == (BELL if rung else "")
