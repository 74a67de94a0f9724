"""The holder of interactive jobs, as a process of its own, and clients that attach to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.end_to_end.waiting import until

from cotenant.cli.sessions import holder
from cotenant.cli.sessions.held_command import ATTACH, Held, held, shown_command, source

SECONDS_MAX = 60
LONG_SECONDS = 600


class Holding:
    """A holder with its log."""

    def __init__(self, log: Path) -> None:
        self.environment = {**os.environ, "COTENANT_JOB_ID": uuid4().hex, "COTENANT_ATTEMPT": "1"}
        self.log = log
        self.started: list[subprocess.Popen[bytes]] = []

    def hold(self, *program: str, idle: float = LONG_SECONDS, with_input: bool = False) -> subprocess.Popen[bytes]:
        """Start the holder, as a job does."""
        words = held(program, idle, terminal=False, with_input=with_input)
        with self.log.open("wb") as log:
            return self._start([sys.executable, *words[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def attach(self) -> subprocess.Popen[bytes]:
        """Start a client, as a session does."""
        words = [sys.executable, "-I", "-S", "-c", source("holder"), ATTACH]
        return self._start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _start(self, words: list[str], **streams: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(words, env=self.environment, **streams)  # type: ignore[call-overload]  # streams
        self.started.append(process)
        return process


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Holding]:
    made = Holding(tmp_path / "log")
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("program", "code"),
    [(["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -KILL $$"], 137), (["no-such-program"], 127), (["/"], 126)],
)
def test_the_exit_code_is_that_of_the_program(holding: Holding, program: list[str], code: int) -> None:
    job = holding.hold(*program)
    client = holding.attach()
    client.communicate(timeout=SECONDS_MAX)
    assert (client.returncode, job.wait(SECONDS_MAX)) == (0, code)


def test_input_and_output_of_any_length_are_passed_on_and_logged(holding: Holding) -> None:
    sent = os.urandom(2_000_000)
    job = holding.hold("cat", with_input=True)
    said, _ = holding.attach().communicate(sent, timeout=SECONDS_MAX)
    assert said == sent
    assert job.wait(SECONDS_MAX) == 0
    assert holding.log.read_bytes() == sent


def test_what_is_printed_while_there_is_no_client_reaches_the_next(holding: Holding, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    job = holding.hold(
        "sh", "-c", f"echo first; until [ -e {gone} ]; do sleep 0.05; done; echo second; read _", with_input=True
    )
    client = holding.attach()
    assert client.stdout is not None
    assert client.stdout.readline() == b"first\n"
    client.kill()
    client.wait()
    gone.touch()
    until(lambda: b"second" in holding.log.read_bytes(), "the output")
    said, _ = holding.attach().communicate(b"\n", timeout=SECONDS_MAX)
    assert said == b"second\n"
    assert job.wait(SECONDS_MAX) == 0


def test_a_new_client_takes_the_place_of_the_one_before(holding: Holding) -> None:
    holding.hold("sh", "-c", "echo begun; read line; echo $line", with_input=True)
    first = holding.attach()
    assert first.stdout is not None
    assert first.stdout.readline() == b"begun\n"
    second = holding.attach()
    assert first.wait(SECONDS_MAX) == holder.EXIT_REPLACED
    said, _ = second.communicate(b"words\n", timeout=SECONDS_MAX)
    assert said == b"words\n"


def test_a_program_without_a_client_ends_after_the_idle_time(holding: Holding) -> None:
    job = holding.hold("sh", "-c", "echo begun; exec sleep 1000", idle=0)
    client = holding.attach()
    assert client.stdout is not None
    assert client.stdout.readline() == b"begun\n"
    client.kill()
    assert job.wait(SECONDS_MAX) == 143
    assert b"no client is attached" in holding.log.read_bytes()


def test_a_program_without_input_can_be_killed_by_its_client(holding: Holding) -> None:
    job = holding.hold("sh", "-c", "trap '' TERM; echo begun; while :; do sleep 1; done")
    client = holding.attach()
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == b"begun\n"
    job.terminate()  # is passed on, and ignored
    client.stdin.write(holder.KILL_NOW)
    client.stdin.flush()
    assert job.wait(SECONDS_MAX) == 137


def test_a_job_that_nobody_joined_can_be_cancelled(holding: Holding) -> None:
    job = holding.hold("true")
    until(lambda: holding.environment["COTENANT_JOB_ID"] in Path("/proc/net/unix").read_text(), "the socket")
    job.terminate()
    assert job.wait(SECONDS_MAX) == 143


def test_commands_are_shown_as_they_were_typed() -> None:
    notebook = held(
        ["python3", "-I", "-S", "-c", source("notebook_server"), "--debug"], 60, terminal=False, with_input=True
    )
    assert shown_command(notebook) == ["cotenant", "notebook", "--", "--debug"]
    assert Held.of(["python3", "-I", "-S", "-c", "print(1)"]) is None
