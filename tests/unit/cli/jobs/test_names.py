"""Names and `@last` where a job's id is expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import read_array


class Jobs:
    """Adds named jobs to the stand-in mesh; the caller's name there is `operator`."""

    def __init__(self, standin: Standin, spec: JobSpec) -> None:
        self._standin, self._spec = standin, spec

    def __call__(self, name: str, submitter: str = "operator") -> str:
        job = self._standin.call(self._standin.jobs.add, replace(self._spec, name=name), submitter=submitter)
        return str(job.id)

    def array(self, name: str, indices: str) -> str:
        spec = replace(self._spec, name=name, array=read_array(indices))
        return str(self._standin.call(self._standin.arrays.add, spec))


@pytest.fixture
def add(standin: Standin, spec: JobSpec) -> Jobs:
    return Jobs(standin, spec)


def shown(shell: Shell, text: str) -> str:
    return str(shell("show", text, "--json").json["id"])


def test_a_name_is_the_callers_newest_job_with_it(shell: Shell, add: Jobs) -> None:
    add("resnet")
    newest = add("resnet")
    add("resnet", "ann")
    add("bert")
    assert shown(shell, "resnet") == newest
    cancelled = shell("cancel", "resnet")
    assert (cancelled.code, cancelled.out.split()[0]) == (ExitCode.DONE, newest)


def test_last_is_the_callers_newest_submission(shell: Shell, add: Jobs) -> None:
    ended = shell("show", "@last")
    assert (ended.code, ended.err.splitlines()[0]) == (
        ExitCode.USAGE,
        "error: @last: you have submitted no job that is still listed",
    )
    add("bert")
    mine = add("resnet")
    add("gpt", "ann")
    assert shown(shell, "@last") == mine


def test_the_only_job_of_others_with_a_name_is_found_and_several_are_listed(shell: Shell, add: Jobs) -> None:
    hers = add("resnet", "ann")
    assert shown(shell, "resnet") == hers
    his = add("resnet", "bob")
    ended = shell("show", "resnet")
    assert ended.code == ExitCode.USAGE
    assert ended.err.splitlines()[0] == "error: 'resnet' is the name of 2 jobs, none of them yours"
    assert all(one in ended.err for one in (f"{hers}  queued  of ann", f"{his}  queued  of bob"))


def test_a_name_may_be_that_of_an_array_and_of_one_of_its_jobs(shell: Shell, add: Jobs) -> None:
    array = add.array("sweep", "0-3")
    assert shown(shell, "sweep") == array
    assert shown(shell, "@last") == array
    assert shown(shell, "sweep_2") == f"{array}_2"
    assert shell("cancel", "sweep").out.startswith(f"{array} ")
    assert shell("explain", "sweep").err.startswith(f"error: {array} is an array of 4 jobs")


def test_an_id_goes_before_a_name(shell: Shell, add: Jobs) -> None:
    first = add("one")
    add(first)
    assert shown(shell, first) == first


def test_only_own_jobs_are_listed_with_me(shell: Shell, add: Jobs) -> None:
    mine, hers = add("mine"), add("hers", "ann")
    assert [job["id"] for job in shell("jobs", "--me", "--json").json] == [mine]
    assert [job["id"] for job in shell("jobs", "--json").json] == [hers, mine]
