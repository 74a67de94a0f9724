"""Waiting for conditions that other processes bring about, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
POLL_SECONDS, POLL_SECONDS_MAX = 0.02, 0.1
LATE_SHARE = 0.05  # of the time waited: what it may be noticed later, so that long waits cost little CPU time


def until(condition: Callable[[], T], what: str, *, seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first true value of a condition; after a timeout, fail and name what did not happen."""
    start = began = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        assert now < start + seconds, f"timed out after {seconds:g} s waiting for: {what}; last value: {value!r}"
        rest = min(POLL_SECONDS_MAX, LATE_SHARE * (now - start))
        time.sleep(max(POLL_SECONDS, rest, now - began))  # a command that is run again and again takes half of the time
        began = time.monotonic()
    return value


def lines_of(path: Path) -> list[str]:
    """Return the complete lines of a file that another process writes; none if it does not exist yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()
