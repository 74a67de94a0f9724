"""Runs the command line in this process."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from cotenant.cli.main import run


@dataclass(frozen=True)
class Told:
    exit_code: int
    stdout: str
    stderr: str


def cotenant(*arguments: object) -> Told:
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        code = run([str(argument) for argument in arguments])
    return Told(code, stdout.getvalue(), stderr.getvalue())
