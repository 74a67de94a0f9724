"""Exit codes, and the one error that a failed command prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TextIO

from cotenant.exhaustion import MESSAGES, REMEDIES, exhausted_resource

DEBUG_VARIABLE = "COTENANT_DEBUG"


class ExitCode(IntEnum):
    """Exit codes of commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMED_OUT = 124  # as of timeout(1)
    INTERRUPTED = 130  # the shell convention for Ctrl-C


class Exit(Exception):
    """The end of a command that has already printed everything; its code may be that of a command in a job."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class OutputClosed(Exception):
    """The reader of the output, such as `head`, has closed it."""


class CommandError(Exception):
    """A failed command: the message, details on a line each, and a hint what to do."""

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


def usage_error(message: str, *, hint: str = "", details: Sequence[str] = ()) -> CommandError:
    """Return an error for bad usage or input."""
    return CommandError(message, hint=hint, details=details, code=ExitCode.USAGE)


def sanitize(text: str) -> str:
    r"""Return a text made safe for a terminal, on one line.

    >>> sanitize("a\x1b[31mb\nc")
    'a?[31mb c'
    """
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def is_text(text: str) -> bool:
    r"""Return whether a text can be encoded in UTF-8; undecodable bytes of files and arguments cannot.

    >>> is_text("ü"), is_text("\udcff")
    (True, False)
    """
    return not any("\ud800" <= char <= "\udfff" for char in text)


def show_error(error: CommandError, stream: TextIO | None = None) -> None:
    """Print an error on stderr."""
    out = stream or sys.stderr
    print(f"{_colored('error:', '31', out)} {sanitize(error.message)}", file=out)
    for detail in error.details:
        print(f"  {sanitize(detail)}", file=out)
    if error.hint:
        print(f"{_colored('hint:', '36', out)} {sanitize(error.hint)}", file=out)


def print_version() -> None:
    """Print the version of this package."""
    from importlib import metadata  # slow to import, and rarely needed

    print(f"cotenant {metadata.version('cotenant')}")


def note(text: str) -> None:
    """Print a message on stderr; stdout is reserved for the result."""
    print(sanitize(text), file=sys.stderr, flush=True)


def unexpected_error(error: Exception, env: Mapping[str, str] = os.environ) -> CommandError:
    """Return an internal error as a CommandError; print its traceback only if COTENANT_DEBUG is set.

    That this process lacks descriptors, memory or processes is no such error.
    """
    if env.get(DEBUG_VARIABLE):
        import traceback

        traceback.print_exception(error)
    message = str(error) or "no message"
    if resource := exhausted_resource(error):
        return CommandError(f"{MESSAGES[resource]}: {message}", hint=REMEDIES[resource])
    return CommandError(
        f"internal error: {type(error).__name__}: {message}",
        hint=f"set {DEBUG_VARIABLE}=1 for a traceback, and please report it",
    )


def _colored(word: str, color: str, stream: TextIO) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return word
    return f"\x1b[1;{color}m{word}\x1b[0m"
