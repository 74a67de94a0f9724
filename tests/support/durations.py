"""Recorded durations of test files: `make durations` records them, and the scheduler of tests plans with them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("durations.json")
SHORTEST_SECONDS = 0.5  # shorter files are not recorded: their order does not matter
TEST_SECONDS = 0.1  # of a test in a file that is not recorded
CPU_SECONDS = "cpu_seconds"
STARTED = pytest.StashKey[float]()


@dataclass(frozen=True, slots=True)
class Duration:
    """How long the tests of a file take, and how much CPU time they use, with their child processes."""

    seconds: float
    cpu_seconds: float

    @property
    def waits(self) -> bool:
        """Return whether the tests use less than half a core: they wait for processes, timers or the network.

        >>> Duration(10, 4).waits, Duration(10, 9).waits
        (True, False)
        """
        return self.cpu_seconds < self.seconds / 2


@dataclass(slots=True)
class Durations:
    """The recorded durations of all test files, by path from the root of the repository."""

    files: dict[str, Duration] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORDED) -> Durations:
        """Return the recorded durations; none if there is no such file."""
        if not path.exists():
            return cls()
        return cls({file: Duration(*figures) for file, figures in json.loads(path.read_text()).items()})

    def of(self, file: str, tests: int) -> Duration:
        """Return the duration of a file with a number of tests; an unknown one keeps a core busy for a while.

        >>> Durations({"a": Duration(2, 1)}).of("a", 30), Durations().of("b", 30)
        (Duration(seconds=2, cpu_seconds=1), Duration(seconds=3.0, cpu_seconds=3.0))
        """
        return self.files.get(file) or Duration(TEST_SECONDS * tests, TEST_SECONDS * tests)

    def write(self, path: Path = RECORDED) -> None:
        """Write the durations of files that take long enough to matter, one a line."""
        long = {file: it for file, it in self.files.items() if it.seconds >= SHORTEST_SECONDS}
        lines = (f"{json.dumps(file)}: [{it.seconds:.1f}, {it.cpu_seconds:.1f}]" for file, it in sorted(long.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Recorder:
    """A pytest plug-in that measures tests in the processes that run them, and writes the sums in the first process."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Remember the CPU time at the beginning of a test."""
        item.stash[STARTED] = cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Put the CPU time of a test into its last report."""
        if call.when == "teardown" and STARTED in item.stash:
            item.user_properties.append((CPU_SECONDS, cpu_seconds() - item.stash[STARTED]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the reports of all processes."""
        file = report.nodeid.split("::", 1)[0]
        self._seconds[file] += report.duration
        if report.when == "teardown":
            self._cpu_seconds[file] += sum(float(str(it)) for name, it in report.user_properties if name == CPU_SECONDS)

    def pytest_sessionfinish(self) -> None:
        """Replace the durations of the files that ran."""
        ran = {file: Duration(seconds, self._cpu_seconds[file]) for file, seconds in self._seconds.items()}
        Durations(merged(Durations.read().files, ran)).write()


def merged(before: Mapping[str, Duration], ran: Mapping[str, Duration]) -> dict[str, Duration]:
    """Return the durations of all files that still exist, those that ran as they were measured now."""
    root = RECORDED.parents[2]
    return {file: it for file, it in {**before, **ran}.items() if (root / file).exists()}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
