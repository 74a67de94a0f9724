from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import COTENANT
from tests.unit.cli.standin import Standin, node

from cotenant.cli.jobs import list_jobs
from cotenant.cli.mesh import policies
from cotenant.cli.nodes import nodes, top
from cotenant.cli.outcome import CommandError, ExitCode, sanitize, show_error
from cotenant.cli.render import Column, plain_lines, styled
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.resources import AMOUNT_KINDS

ID = "01a2b3c4d5e6"


FULL = {
    "jobs": (
        list_jobs.COLUMNS,
        f"{ID}|a-rather-long-name-of-a-job|suspended|0.125|auto|23h59m|99d23h|n1,n2,n3,n4,n5,n6",
    ),
    "nodes": (
        nodes.columns(AMOUNT_KINDS[:1]),
        "gpu-node-17|cordoned|0.5/8|96/128|1.5TiB/2TiB|A100-SXM4-80GB (declared)|12|new fan",
    ),
    "policies": (policies.COLUMNS, f"contention_policies|coda-eliminator|my-extras|0.1.0.dev1|yes|*|{'x' * 99}"),
    "top, nodes": (top.NODE_COLUMNS, "gpu-node-17|cordoned|0.5/8|96/128|127.9|100|100|1.5TiB/2TiB|12"),
    "top, jobs": (top.JOB_COLUMNS, f"{ID}|resnet50-imagenet|0.125|100|128|127.9|1.23e+03/s|99d23h|gpu-1,gpu-2"),
}


@pytest.mark.parametrize("name", FULL)
def test_tables_fit_80_columns_and_keep_ids_and_numbers_whole(name: str) -> None:
    columns, text = FULL[name]
    row = text.split("|")
    lines = plain_lines(columns, [row], width_max=80)
    assert max(map(len, lines)) <= 80
    for cell, column in zip(row, columns, strict=True):
        assert column.elastic or cell in lines[1].split()


def test_narrow_terminals_keep_a_part_of_each_name() -> None:
    assert plain_lines((Column("NAME", elastic=True), Column("ID")), [["abcdefgh", "x" * 9]], width_max=5) == [
        "NAME    ID",
        "abcde…  xxxxxxxxx",
    ]


def test_wide_characters_count_with_their_width() -> None:
    columns = (Column("NAME", elastic=True), Column("GPUS", right=True))
    assert plain_lines(columns, [["漢字漢字漢字漢字", "8"]], width_max=16)[1] == "漢字漢字…      8"


def test_names_are_never_interpreted_as_markup() -> None:
    assert styled((Column("NAME"),), [["[red]x[/red]"]], 80).plain == "NAME        \n[red]x[/red]"


def test_phases_are_colored_but_equal_names_are_not() -> None:
    text = styled((Column("NAME"), Column("PHASE", styled=True)), [["failed", "failed"]], 80)
    assert [text.plain[span.start : span.end].strip() for span in text.spans if "red" in str(span.style)] == ["failed"]
    assert [span.start for span in text.spans if "red" in str(span.style)] == [text.plain.rindex("failed")]


@given(st.text())
def test_foreign_text_cannot_move_the_cursor(text: str) -> None:
    assert sanitize(text).isprintable()


@given(st.lists(st.tuples(st.text("ab", max_size=9), st.text("cd", max_size=9)), max_size=5))
def test_plain_tables_are_aligned(rows: list[tuple[str, str]]) -> None:
    lines = plain_lines((Column("LEFT"), Column("RIGHT", right=True)), rows)
    width = max(4, *(len(row[0]) for row in rows)) if rows else 4
    for line, (left, right) in zip(lines[1:], rows, strict=True):
        assert line.startswith(left)
        assert line[width:].strip() == right


def test_details_and_hint_of_an_error_have_their_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(CommandError("bad\x1b[31m", hint="do this", details=["one", "two"]))
    assert capsys.readouterr().err == "error: bad?[31m\n  one\n  two\nhint: do this\n"


class Terminal:
    """A command on a terminal of 80 columns, as its user sees it."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        self.process = subprocess.Popen([*COTENANT, *arguments], stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.seen = ""

    def read_until(self, pattern: str) -> None:
        """Wait for a text on the terminal; the test's time limit applies."""
        while not re.search(pattern, self.seen):
            self.seen += os.read(self._ours, 4096).decode()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            while data := os.read(self._ours, 4096):
                self.seen += data.decode()
        except OSError:
            pass  # the terminal is gone with its last user
        os.close(self._ours)
        return self.process.wait(timeout=60)


def test_watching_on_a_terminal_shows_changes_in_place_until_ctrl_c(
    standin: Standin, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    job = standin.call(standin.jobs.add, spec)
    terminal = Terminal("jobs", "--watch")
    terminal.read_until("queued")
    standin.call(standin.jobs.move, job.id, Phase.CANCELLED)
    terminal.read_until("cancelled")
    assert terminal.interrupt() == ExitCode.DONE
    assert "\x1b[33mqueued" in terminal.seen
    assert "Traceback" not in terminal.seen


def test_top_on_a_terminal_refreshes_until_ctrl_c(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    standin.nodes.nodes = {"gpu-1": node("gpu-1")}
    terminal = Terminal("top", "--interval", "200ms")
    terminal.read_until("gpu-1")
    standin.nodes.nodes = {"gpu-2": node("gpu-2")}
    terminal.read_until("gpu-2")
    assert terminal.interrupt() == ExitCode.DONE
    assert "Traceback" not in terminal.seen


def test_a_table_on_a_terminal_is_colored(standin: Standin, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    standin.call(standin.jobs.add, spec)
    terminal = Terminal("jobs")
    terminal.read_until("CAPACITY")
    assert "\x1b[33mqueued" in terminal.seen
    terminal.process.wait(timeout=60)
