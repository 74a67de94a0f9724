"""`cotenant wait`: exit codes, timeouts, interruptions."""

from __future__ import annotations

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec


@pytest.fixture
def jobs(standin: Standin, spec: JobSpec) -> list[str]:
    """Three running jobs."""
    made = [str(standin.call(standin.jobs.add, spec).id) for _ in range(3)]
    for job in made:
        standin.call(standin.jobs.run, job)
    return made


def test_jobs_that_have_ended_are_not_waited_for(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    standin.call(standin.jobs.finish, jobs[0])
    standin.call(standin.jobs.finish, jobs[1], 3)
    ended = shell("wait", jobs[0])
    assert (ended.code, ended.out.split()[:2]) == (ExitCode.DONE, [jobs[0], "succeeded"])
    ended = shell("wait", jobs[0], jobs[1])
    assert (ended.code, len(ended.out.splitlines())) == (ExitCode.FAILED, 2)
    assert ended.err.startswith(f"error: {jobs[1]} failed")


@pytest.mark.parametrize("cuts", [0, 1])
def test_waiting_lasts_until_the_last_job_has_ended(shell: Shell, standin: Standin, jobs: list[str], cuts: int) -> None:
    async def end_all() -> None:
        for job in jobs:
            standin.jobs.finish(job)

    standin.jobs.cut_streams = cuts  # the connection is lost once
    standin.jobs.before_watch = end_all
    ended = shell("wait", *jobs)
    assert (ended.code, len(ended.out.splitlines())) == (ExitCode.DONE, 3)


def test_any_is_decided_by_the_first_that_ended(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    standin.call(standin.jobs.finish, jobs[1], 3)
    assert shell("wait", "--any", *jobs).code == ExitCode.FAILED
    standin.call(standin.jobs.finish, jobs[0])
    ended = shell("wait", "--any", jobs[0], jobs[2], "--json")
    assert (ended.code, [job["phase"] for job in ended.json]) == (ExitCode.DONE, ["succeeded", "running"])


def test_a_timeout_has_its_own_exit_code_and_names_what_is_left(
    shell: Shell, standin: Standin, jobs: list[str]
) -> None:
    standin.call(standin.jobs.finish, jobs[0])
    ended = shell("wait", *jobs, "--timeout", "100ms")
    assert ended.code == ExitCode.TIMED_OUT
    assert "error: 2 jobs have not ended after 100ms" in ended.err.splitlines()
    assert all(job in ended.err for job in jobs[1:])
    assert shell("wait", jobs[1], "--timeout", "soon").code == ExitCode.USAGE


def test_a_job_that_was_archived_meanwhile_is_read_again(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    async def archive() -> None:
        standin.jobs.finish(jobs[0])
        standin.jobs.unwatched.add(jobs[0])

    standin.jobs.before_watch = archive
    ended = shell("wait", jobs[0])
    assert (ended.code, ended.out.split()[:2]) == (ExitCode.DONE, [jobs[0], "succeeded"])
