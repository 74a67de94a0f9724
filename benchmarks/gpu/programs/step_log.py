"""The log of a training program: how many steps it had done when, and on how many cores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Entry:
    """The steps done at a time in unix seconds, and the cores that the program may use then."""

    time: float
    steps: int
    cores: int


class StepLog:
    """Writes entries to a file, at most one in `INTERVAL_SECONDS`."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w", buffering=1)
        self._steps = 0
        self._next = 0.0

    def step(self) -> None:
        """Record a step."""
        self._steps += 1
        now = time.time()
        if now >= self._next:
            self._next = now + INTERVAL_SECONDS
            self._stream.write(f"{now:.6f} {self._steps} {len(os.sched_getaffinity(0))}\n")


def read(path: Path) -> list[Entry]:
    """Return the entries of a log; none if there is no log yet. A line that is still being written is left out."""
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Entry(float(time), int(steps), int(cores)) for time, steps, cores in lines]


def rate(entries: Sequence[Entry], begin: float, end: float) -> float:
    """Return the steps per second between two times; 0 with fewer than two entries between them.

    >>> rate([Entry(0.0, 1, 2), Entry(1.0, 5, 2), Entry(3.0, 13, 2), Entry(9.0, 14, 2)], 0.5, 5.0)
    4.0
    """
    within = [entry for entry in entries if begin <= entry.time <= end]
    if len(within) < 2:
        return 0.0
    first, last = within[0], within[-1]
    return (last.steps - first.steps) / (last.time - first.time)
