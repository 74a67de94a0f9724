"""Logs of whole arrays: every task's lines, with its index."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.cli.conftest import COTENANT, Shell
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.cli.jobs import array_logs
from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import read_array

Run = Callable[[int, bytes], None]


@pytest.fixture
def array(standin: Standin, spec: JobSpec) -> str:
    return str(standin.call(standin.arrays.add, replace(spec, name="sweep", array=read_array("0-4"))))


@pytest.fixture
def run(standin: Standin, array: str) -> Run:
    def ran(index: int, said: bytes) -> None:
        standin.call(standin.jobs.run, f"{array}_{index}")
        standin.call(standin.jobs.say, f"{array}_{index}", said)

    return ran


def test_the_output_of_all_tasks_is_printed_by_index(shell: Shell, array: str, run: Run) -> None:
    run(3, b"three\nno end")
    run(1, b"one\n")
    told = shell("logs", array)
    assert (told.code, told.out, told.err) == (ExitCode.DONE, "[1] one\n[3] three\n[3] no end\n", "")


def test_tasks_are_followed_until_all_have_ended_few_at_a_time(
    shell: Shell, standin: Standin, array: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_logs, "STREAMS_MAX", 1)
    for index in range(5):
        run(index, b"line of %d\n" % index)
    for index in range(5):
        standin.call(standin.jobs.finish, f"{array}_{index}")
    told = shell("logs", "-f", array)
    assert told.code == ExitCode.DONE
    assert sorted(told.out.splitlines()) == [f"[{index}] line of {index}" for index in range(5)]


def test_tasks_that_start_later_are_followed_as_well(standin: Standin, array: str, run: Run) -> None:
    run(0, b"zero\n")
    with subprocess.Popen(
        [*COTENANT, "logs", "-f", array, *_access(standin)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"[0] zero\n"
        run(4, b"four\n")
        assert process.stdout.readline() == b"[4] four\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == ExitCode.INTERRUPTED


def _access(standin: Standin) -> list[str]:
    return ["--endpoint", standin.address, "--token", TOKEN]


def test_an_array_without_output_and_an_attempt_of_one_are_clear_errors(shell: Shell, array: str, run: Run) -> None:
    assert f"{array} has no output yet" in shell("logs", array).err
    assert "--attempt is for one job" in shell("logs", array, "--attempt", "1").err
