from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.cli.conftest import COTENANT, Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.follow import Output
from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec, Request, Role


@pytest.fixture
def job(standin: Standin, spec: JobSpec) -> str:
    """A job with output."""
    made = str(standin.call(standin.jobs.add, spec).id)
    standin.call(standin.jobs.run, made)
    standin.call(standin.jobs.say, made, b"one\ntw")
    standin.call(standin.jobs.say, made, "o\nü\n".encode())
    return made


def test_output_is_printed_as_it_was_written(shell: Shell, job: str) -> None:
    ended = shell("logs", job)
    assert (ended.code, ended.out, ended.err) == (ExitCode.DONE, "one\ntwo\nü\n", "")


def test_binary_output_is_passed_through() -> None:
    stream = io.BytesIO()
    Output(stream, marked=False).write(0, b"\xff\x00 no end")
    assert stream.getvalue() == b"\xff\x00 no end"


def test_a_terminal_gets_no_control_characters_but_colours() -> None:
    stream = io.BytesIO()
    output = Output(stream, marked=True, neutral=True)
    output.write(0, b"\x1b[31mred\x1b[0m \x1b]0;title\x07\r\n\xc2")
    output.write(1, b"other\n")
    output.write(0, b"\x9b2J \xe2\x80\xaeabc \xff")
    output.finish()
    written = stream.getvalue().decode()
    assert written == "[0] \x1b[31mred\x1b[0m ^[]0;title^G\r\n[1] other\n[0] <U+009B>2J <U+202E>abc \ufffd\n"


@pytest.mark.parametrize(
    ("arguments", "terminal", "neutral"), [((), True, True), (("--raw",), True, False), ((), False, False)]
)
def test_output_is_neutral_on_a_terminal_unless_raw(
    shell: Shell,
    standin: Standin,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    terminal: bool,
    neutral: bool,
) -> None:
    standin.call(standin.jobs.say, job, b"\x1b[2J")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert shell("logs", *arguments, job).out == "one\ntwo\nü\n" + ("^[[2J" if neutral else "\x1b[2J")


def test_tail_prints_only_the_end(shell: Shell, standin: Standin, job: str) -> None:
    shell("logs", "--tail", "4KiB", job)
    assert standin.jobs.asked[-1].tail_bytes == 4096
    assert shell("logs", "--tail", "much", job).code == ExitCode.USAGE


def test_lines_of_a_gang_have_their_rank(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    gang = replace(spec, roles=(Role(replicas=2, request=Request(gpu_milli=1000)),))
    job = standin.call(standin.jobs.add, gang).id
    standin.call(standin.jobs.run, job)
    for rank, data in ((0, b"a\nb"), (1, b"c\n"), (0, b"b\n"), (1, b"no end")):
        standin.call(standin.jobs.say, job, data, rank)
    assert shell("logs", job).out == "[0] a\n[1] c\n[0] bb\n[1] no end\n"
    assert shell("logs", "--rank", "1", job).out == "c\nno end"


def test_a_job_that_never_ran_has_no_output_yet(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    job = standin.call(standin.jobs.add, spec).id
    ended = shell("logs", job)
    assert ended.code == ExitCode.FAILED
    assert "has no output yet: queued: CAPACITY" in ended.err


def test_following_continues_with_the_next_attempt(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    job = standin.call(standin.jobs.add, replace(spec, command=("echo", "second"))).id
    standin.call(standin.jobs.run, job)
    standin.call(standin.jobs.say, job, b"first\n")
    standin.jobs.after_piece = lambda: standin.jobs.drive(standin.jobs.jobs[job])
    ended = shell("logs", "-f", job)
    assert (ended.code, ended.out) == (ExitCode.DONE, "first\nsecond\n")


def test_an_interrupted_stream_resumes_where_it_was_cut(
    shell: Shell, standin: Standin, job: str, quick_pauses: Callable[[], None]
) -> None:
    quick_pauses()
    standin.call(standin.jobs.finish, job)
    standin.jobs.cut_streams = 3
    ended = shell("logs", "--attempt", "1", "-f", job)
    assert (ended.code, ended.out) == (ExitCode.DONE, "one\ntwo\nü\n")
    assert "retrying" in ended.err


def test_a_closed_output_ends_following(standin: Standin, job: str) -> None:
    script = f"{shlex.join([*COTENANT, 'logs', '-f', job])} | head -n 1"
    following = subprocess.Popen(["bash", "-o", "pipefail", "-c", script], stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline() == "one\n"
    deadline = time.monotonic() + 20
    while following.poll() is None and time.monotonic() < deadline:  # head may take a moment to close its end
        standin.call(standin.jobs.say, job, b"more\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            following.wait(timeout=0.1)
    assert following.poll() == ExitCode.DONE


def test_a_long_line_of_a_gang_is_not_buffered_forever() -> None:
    stream = io.BytesIO()
    output = Output(stream, marked=True)
    output.write(3, b"x" * 100_000)
    assert stream.getvalue().startswith(b"[3] xxx")
