"""The command of an interactive job: the holder and its program. `show` imports this module, so it needs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PYTHON = ("python3", "-I", "-S", "-c")  # on the nodes: 3.8 or newer
HOLD, ATTACH = "hold", "attach"
NOTEBOOK = '"""Starts JupyterLab in a job'  # how the source of notebook_server begins


def source(module: str) -> str:
    """Return the source of a module of this package that runs on nodes."""
    from importlib.resources import files  # slow to import, and `show` needs none

    return files("cotenant.cli.sessions").joinpath(f"{module}.py").read_text(encoding="utf-8")


def held(program: Sequence[str], idle_seconds: float, *, terminal: bool, with_input: bool) -> tuple[str, ...]:
    """Return the command of a job that holds a program."""
    flags = f"{'i' * with_input}{'t' * terminal}" or "-"
    return (*PYTHON, source("holder"), HOLD, flags, f"{idle_seconds:g}", *program)


class Held(NamedTuple):
    """What a job holds, read from its command."""

    terminal: bool
    with_input: bool
    program: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Held | None:
        """Return what a job with this command holds; None if it is not an interactive one.

        >>> Held.of(held(["sh"], 60, terminal=True, with_input=True))
        Held(terminal=True, with_input=True, program=('sh',))
        >>> Held.of(["sh", "-c", "true"])
        """
        at = len(PYTHON)
        if tuple(command[:at]) != PYTHON or len(command) < at + 5 or command[at + 1] != HOLD:
            return None
        flags = command[at + 2]
        return cls("t" in flags, "i" in flags, tuple(command[at + 4 :]))


def shown_command(command: Sequence[str]) -> list[str]:
    """Return a job's command as users typed it.

    >>> shown_command(held(["python3", "a b.py"], 60, terminal=False, with_input=True))
    ['cotenant', 'run', '-i', '--', 'python3', 'a b.py']
    >>> shown_command(["sh", "-c", "true"])
    ['sh', '-c', 'true']
    """
    what = Held.of(command)
    if what is None:
        return list(command)
    at, program = len(PYTHON), what.program
    if program[:at] == PYTHON and len(program) > at and program[at].startswith(NOTEBOOK):
        arguments = program[at + 1 :]
        return ["cotenant", "notebook", *(["--", *arguments] if arguments else [])]
    flags = f"-{'i' * what.with_input}{'t' * what.terminal}"
    return ["cotenant", "run", *([flags] if len(flags) > 1 else []), "--", *program]
