"""How a command ends: its exit code, and the one error that a user is shown."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TextIO

DEBUG_VARIABLE = "COTENANT_DEBUG"


class ExitCode(IntEnum):
    """What a script can tell from a command's end."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130  # as shells have it for Ctrl-C


class CommandError(Exception):
    """Ends the command: what is wrong, each detail on a line of its own, and what can be done about it."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        details: Sequence[str] = (),
        code: ExitCode = ExitCode.FAILED,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = tuple(details)
        self.code = code


def usage(message: str, *, hint: str = "", details: Sequence[str] = ()) -> CommandError:
    """Bad usage or input."""
    return CommandError(message, hint=hint, details=details, code=ExitCode.USAGE)


def harmless(text: str) -> str:
    r"""Make a text from elsewhere safe for a terminal, on one line.

    >>> harmless("a\x1b[31mb\nc")
    'a?[31mb c'
    """
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def is_text(text: str) -> bool:
    r"""Whether a text can be written in UTF-8, which a file's or an argument's odd bytes cannot.

    >>> is_text("ü"), is_text("\udcff")
    (True, False)
    """
    return not any("\ud800" <= char <= "\udfff" for char in text)


def show_error(error: CommandError, stream: TextIO | None = None) -> None:
    """Print an error on stderr."""
    out = stream or sys.stderr
    print(f"{_coloured('error:', '31', out)} {harmless(error.message)}", file=out)
    for detail in error.details:
        print(f"  {harmless(detail)}", file=out)
    if error.hint:
        print(f"{_coloured('hint:', '36', out)} {harmless(error.hint)}", file=out)


def note(text: str) -> None:
    """Tell something beside the result: on stderr, so that stdout stays the result's own."""
    print(harmless(text), file=sys.stderr, flush=True)


def surprise(error: Exception, env: Mapping[str, str] = os.environ) -> CommandError:
    """Put what nobody expected into words; a traceback is shown only to who asks for it."""
    if env.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    told = str(error) or "no more is known"
    return CommandError(
        f"something went wrong inside: {type(error).__name__}: {told}",
        hint=f"{DEBUG_VARIABLE}=1 shows where; please report it",
    )


def _coloured(word: str, colour: str, stream: TextIO) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return word
    return f"\x1b[1;{colour}m{word}\x1b[0m"
