"""Records events of a process in the file named by COTENANT_HISTORY; does nothing without it.

Each event is a line of JSON with the time of a clock that all processes of a machine share and that is never set
(CLOCK_TAI), written at once and in one piece, so that a killed process has recorded everything that it did. Several
processes may write into one file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import get_args

from cotenant.history.events import Commit, Event, Holds, Resource

VARIABLE = "COTENANT_HISTORY"
KINDS = {kind.__name__: kind for kind in get_args(Event) if kind is not Commit}


def clock() -> float:
    """Return the recorded time, in seconds."""
    return time.clock_gettime(time.CLOCK_TAI)


@cache
def _file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def record(event: Event) -> None:
    """Record an event; errors are ignored, because the process matters more than its history."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):
            os.write(_file(path), written(event, clock()).encode())


def written(event: Event, at_seconds: float) -> str:
    """Return an event as a line for `read`."""
    told: dict[str, object] = {"at": at_seconds, "kind": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        told[field.name] = [[*thing, milli] for thing, milli in value.items()] if field.name == "holds" else value
    return json.dumps(told) + "\n"


def read(lines: Iterable[str]) -> list[tuple[float, Event]]:
    """Return recorded events and their times.

    >>> from cotenant.history.events import Began
    >>> began = Began("n", "a", 1, 2, {("n", "core 0"): 1000})
    >>> read([written(began, 3.0)]) == [(3.0, began)]
    True

    Raises:
        ValueError: a line was not written by `record`.
    """
    found = []
    for line in lines:
        try:
            told = json.loads(line)
            at_seconds, kind = float(told.pop("at")), KINDS[told.pop("kind")]
            if "holds" in told:
                told["holds"] = _holds(told["holds"])
            found.append((at_seconds, kind(**told)))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{line.strip()!r} is not an event: {error}") from None
    return found


def _holds(told: Iterable[tuple[str, str, int]]) -> Holds:
    holds: dict[Resource, int] = {}
    for node_id, thing, milli in told:
        holds[node_id, thing] = milli
    return holds
