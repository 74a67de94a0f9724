"""Schedules the tests of one pytest run on several processes, by recorded durations.

A unit is the tests of a file, or of an `xdist_group`. The longest units start first, so that no long one is left at
the end. As many processes as there are cores run units that compute; the others run units that mostly wait, so that
waiting costs no time. Tests marked `calm` are one unit, which starts when all others have ended.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from tests.support.durations import Duration, Durations
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

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


def unit_of(nodeid: str) -> str:
    """Return the unit of a test: its group, which pytest-xdist appends to its id, or its file.

    >>> unit_of("tests/test_a.py::test_b[c@d]"), unit_of("tests/test_a.py::test_b@calm")
    ('tests/test_a.py', 'calm')
    """
    if nodeid.rfind("@") > max(nodeid.rfind("]"), nodeid.rfind("::")):
        return nodeid.rpartition("@")[2]
    return nodeid.partition("::")[0]


def next_unit(waiting: Mapping[str, Duration], running: Iterable[Duration], cores: int) -> str:
    """Return the unit to start next: the longest of those that use what the running units leave idle.

    >>> waiting = {"long": Duration(9, 9), "idle": Duration(5, 1), "short": Duration(2, 2)}
    >>> next_unit(waiting, [], cores=1), next_unit(waiting, [Duration(8, 8)], cores=1)
    ('long', 'idle')
    """
    idle_cores = cores - sum(not duration.waits for duration in running)
    fitting = [unit for unit, duration in waiting.items() if duration.waits == (idle_cores <= 0)]
    return max(fitting or waiting, key=lambda unit: waiting[unit].seconds)


class DurationScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist ships no types
    """Gives each process another unit when only one test of the unit before is left.

    A process begins a test when it knows the next, or that there is none: until then it holds its last test.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self.collection: list[str] | None = None
        self._durations = Durations.read()
        self._indices: dict[str, int] = {}

    def schedule(self) -> None:
        """Assign units to all processes, once all have collected the same tests, and to each that replaces another."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            self._indices = {nodeid: index for index, nodeid in enumerate(self.collection)}
            for nodeid in self.collection:
                self.workqueue.setdefault(unit_of(nodeid), {})[nodeid] = False
        for node in self.nodes:
            self._reschedule(node)
        self._start_calm()

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note that a process has run a test, and start what waited for that."""
        super().mark_test_complete(node, item_index, duration)
        self._start_calm()

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which a process crashed, or None; others run the rest of its units."""
        units = self.assigned_work.pop(node)
        left = [(unit, nodeid) for unit, tests in units.items() for nodeid, ended in tests.items() if not ended]
        for unit, nodeid in left[1:]:
            self.workqueue.setdefault(unit, {})[nodeid] = False
        if left:
            for other in self.nodes:
                self._reschedule(other)
        self._start_calm()
        return left[0][1] if left else None

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Assign units to a process until two tests are pending; end it if there are none."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 1:
            if self.workqueue.keys() - {CALM}:
                self._assign_work_unit(node)
            elif not self.workqueue or self._assignable() != [node]:
                node.shutdown()
            else:
                return  # it will run the calm tests

    def _start_calm(self) -> None:
        """Assign the unit of calm tests if one process is left and all others have run their tests."""
        assignable = self._assignable()
        if self.workqueue.keys() != {CALM} or len(assignable) != 1:
            return
        if not any(self._pending_of(units) for node, units in self.assigned_work.items() if node is not assignable[0]):
            self._assign_work_unit(assignable[0])

    def _assignable(self) -> list[WorkerController]:
        return [node for node in self.nodes if not node.shutting_down]

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [units for other, units in self.assigned_work.items() if other is not node]
        running = [self._duration(tests) for units in others for tests in units.values() if not all(tests.values())]
        waiting = {unit: self._duration(tests) for unit, tests in self.workqueue.items() if unit != CALM}
        unit = next_unit(waiting, running, cores()) if waiting else CALM
        tests = self.workqueue.pop(unit)
        self.assigned_work[node].setdefault(unit, {}).update(tests)
        node.send_runtest_some([self._indices[nodeid] for nodeid in tests])

    def _duration(self, tests: Iterable[str]) -> Duration:
        """Return the recorded duration of a unit, whose tests may be those of several files."""
        counts = Counter(nodeid.partition("::")[0] for nodeid in tests)
        files = [self._durations.of(file, count) for file, count in counts.items()]
        return Duration(sum(it.seconds for it in files), sum(it.cpu_seconds for it in files))
