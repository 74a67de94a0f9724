"""Waiting for what other processes bring about: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.02


def until(condition: Callable[[], T], what: str, *, seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first true value of a condition; fail, saying what did not come, when patience is over."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"within {seconds:g} s there was no {what}; last seen: {value!r}"
        time.sleep(POLL_SECONDS)
    return value


def lines_of(path: Path) -> list[str]:
    """The whole lines of a file that another process writes; none where it is not there yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()
