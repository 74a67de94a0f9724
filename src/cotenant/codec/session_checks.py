"""Validation of the first message of a session."""

from __future__ import annotations

from collections.abc import Iterator

from cotenant.codec.errors import Violation
from cotenant.core.model.limits import COMMAND_WORDS_MAX
from cotenant.core.model.session import TERMINAL_SIZE_MAX
from cotenant.v1.session_pb2 import SessionStart, TerminalSize

PORT_MAX = 65_535


def start_violations(start: SessionStart) -> list[Violation]:
    """Return every field with which a session cannot be opened.

    >>> [one.field for one in start_violations(SessionStart(rank=-1))]
    ['start.id', 'start.rank', 'start.kind']
    """
    return list(_violations(start))


def _violations(start: SessionStart) -> Iterator[Violation]:
    if not start.id:
        yield Violation("start.id", "is missing")
    if start.rank < 0:
        yield Violation("start.rank", f"is {start.rank}; ranks begin at 0")
    kind = start.WhichOneof("kind")
    if kind is None:
        yield Violation("start.kind", "is missing: what is the session to do?")
    elif kind == "forward" and not 1 <= start.forward.port <= PORT_MAX:
        yield Violation("start.forward.port", f"is {start.forward.port}; ports are from 1 to {PORT_MAX}")
    elif kind == "exec":
        words = start.exec.command
        if len(words) > COMMAND_WORDS_MAX:
            yield Violation("start.exec.command", f"has {len(words)} words; {COMMAND_WORDS_MAX} are allowed at most")
        if any("\0" in word for word in words) or "\0" in start.exec.terminal_type:
            yield Violation("start.exec.command", "has a NUL character")
        if words and not words[0]:
            yield Violation("start.exec.command", "begins with an empty word")
        if start.exec.HasField("terminal") and not is_size(start.exec.terminal):
            yield Violation("start.exec.terminal", f"has a size that is not from 0 to {TERMINAL_SIZE_MAX}")


def is_size(size: TerminalSize) -> bool:
    """Return whether a terminal can have this size."""
    return 0 <= size.rows <= TERMINAL_SIZE_MAX and 0 <= size.columns <= TERMINAL_SIZE_MAX
