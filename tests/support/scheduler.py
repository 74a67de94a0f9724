"""Schedules the tests of one pytest run on several processes, by recorded durations.

A unit is the tests of a file, or of a `group`. The longest units start first, so that no long one is left at the end.
As many processes as there are cores run units that compute; the others run units that mostly wait, so that waiting
costs no time. Tests marked `calm` are one unit, which starts when all other processes have ended.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.support.durations import Duration, Durations

CALM = "calm"
WAITING_PER_CORE, WAITING_MAX = 1.5, 8  # processes in addition to one per core


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processes(cores: int) -> int:
    """Return how many processes run tests.

    >>> [processes(cores) for cores in (1, 2, 16)]
    [2, 5, 24]
    """
    return cores + min(int(WAITING_PER_CORE * cores), WAITING_MAX)


def next_unit(waiting: Mapping[str, Duration], running: Iterable[Duration], cores: int) -> str:
    """Return the unit to start next: the longest of those that use what the running units leave idle.

    >>> waiting = {"long": Duration(9, 9), "idle": Duration(5, 1), "short": Duration(2, 2)}
    >>> next_unit(waiting, [], cores=1), next_unit(waiting, [Duration(8, 8)], cores=1)
    ('long', 'idle')
    """
    idle_cores = cores - sum(not duration.waits for duration in running)
    fitting = [unit for unit, duration in waiting.items() if duration.waits == (idle_cores <= 0)]
    return max(fitting or waiting, key=lambda unit: waiting[unit].seconds)


class Schedule:
    """Gives units of tests to processes, which ask for the next one before they begin the last test of the one before.

    A process needs to know the next test when it begins one, so that fixtures of modules end in time. `units` has the
    unit of each test, by the test's number.
    """

    def __init__(self, units: Sequence[str], files: Sequence[str], durations: Durations, cores: int) -> None:
        self._units, self._files, self._durations, self._cores = units, files, durations, cores
        self._waiting: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            self._waiting.setdefault(unit, []).append(number)
        self._left: dict[int, list[int]] = {}  # by process: its tests that have not ended, in their order
        self._ending: set[int] = set()  # processes that end after the tests they have

    @property
    def is_empty(self) -> bool:
        """Whether no unit waits."""
        return not self._waiting

    def start(self, worker: int) -> None:
        """Add a process."""
        self._left[worker] = []

    def next(self, worker: int) -> list[int] | None:
        """Return the tests that a process runs next: none if it may end, None if it is to ask again after an end."""
        if unit := self._next_unit(worker):
            tests = self._waiting.pop(unit)
            self._left[worker] += tests
            return tests
        if self._waiting and self._left.keys() - self._ending == {worker}:
            return None
        self._ending.add(worker)
        return []

    def _next_unit(self, worker: int) -> str:
        others = [left for other, left in self._left.items() if other != worker]
        if waiting := {unit: self._duration(tests) for unit, tests in self._waiting.items() if unit != CALM}:
            return next_unit(waiting, map(self._duration, filter(None, others)), self._cores)
        return CALM if CALM in self._waiting and not others else ""

    def ended(self, worker: int, test: int) -> None:
        """Note that a test has ended."""
        self._left[worker].remove(test)

    def remove(self, worker: int) -> int | None:
        """Remove a process that has ended, and return the test in which it crashed, or None; others run its others."""
        left = self._left.pop(worker)
        self._ending.discard(worker)
        for number in left[1:]:
            self._waiting.setdefault(self._units[number], []).append(number)
        return left[0] if left else None

    def _duration(self, tests: Iterable[int]) -> Duration:
        """Return the recorded duration of tests, which may be those of several files."""
        counts = Counter(self._files[number] for number in tests)
        files = [self._durations.of(file, count) for file, count in counts.items()]
        return Duration(sum(it.seconds for it in files), sum(it.cpu_seconds for it in files))
