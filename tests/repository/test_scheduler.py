"""The scheduler of tests runs each test once, the calm ones alone, whatever ends in between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.conftest import QUARANTINE
from tests.support import scheduler
from tests.support.durations import Duration, Durations, merged
from tests.support.paths import ROOT

QUARANTINED_MAX = 5
UNITS = [
    *(f"tests/test_{file}.py" for file in "abcdefgh" for _ in range(1 + ord(file) % 4)),
    *("calm" for _ in range(6)),
    *("net" for _ in range(2)),
]
FILES = [unit if unit.endswith(".py") else f"tests/test_{unit}.py" for unit in UNITS]


class Run:
    """A run of the tests in several processes, whose order is drawn by chance.

    A process begins a test when it knows the next one, or that there is none, as those of `processes` do.
    """

    def __init__(self, processes: int, seed: int) -> None:
        self.chance = Random(seed)
        self.schedule = scheduler.Schedule(UNITS, FILES, Durations(), cores=2)
        self.queues: dict[int, list[int]] = {}
        self.asking: set[int] = set()
        self.ran: list[int] = []
        self.crashed: list[int] = []
        for number in range(processes):
            self.start(number)

    def start(self, number: int) -> None:
        self.queues[number] = []
        self.schedule.start(number)
        self.ask(number)

    def ask(self, number: int) -> None:
        tests = self.schedule.next(number)
        (self.asking.add if tests is None else self.asking.discard)(number)
        self.queues[number] += tests or ()
        if tests is not None and not self.queues[number]:
            self.remove(number)
        elif tests is not None and len(self.queues[number]) == 1 and tests:
            self.ask(number)

    def remove(self, number: int) -> None:
        del self.queues[number]
        crashed = self.schedule.remove(number)
        if crashed is not None:
            self.crashed.append(crashed)
            self.start(max(self.queues, default=number) + 1 + len(self.crashed))
        for other in sorted(self.asking & self.queues.keys()):
            self.ask(other)

    def running(self) -> list[int]:
        return [number for number, queue in self.queues.items() if queue and number not in self.asking]

    def steps(self) -> Iterator[list[str]]:
        """Let one running test end after the other; yield the units of those that run."""
        while running := self.running():
            yield [UNITS[self.queues[number][0]] for number in running]
            number = self.chance.choice(self.running())
            test = self.queues[number].pop(0)
            self.ran.append(test)
            self.schedule.ended(number, test)
            if not self.queues[number]:
                self.remove(number)
            elif len(self.queues[number]) == 1:
                self.ask(number)

    def crash(self) -> None:
        number = self.chance.choice(self.running())
        self.asking.discard(number)
        self.remove(number)


@pytest.mark.parametrize("crashes", [0, 1, 3])
@pytest.mark.parametrize("processes", [1, 2, 5, 40])
def test_each_test_runs_once_and_calm_ones_alone_at_the_end(processes: int, crashes: int) -> None:
    for seed in range(20):
        run = Run(processes, seed)
        for step, running in enumerate(run.steps()):
            assert "calm" not in running or len(running) == 1
            if crashes and step % 7 == 3 and len(run.crashed) < crashes:
                run.crash()
        assert sorted(run.ran + run.crashed) == list(range(len(UNITS)))
        were_calm = [UNITS[test] == "calm" for test in run.ran]
        assert were_calm == sorted(were_calm)
        assert run.schedule.is_empty


def test_a_group_runs_in_one_process() -> None:
    for running in Run(5, 1).steps():
        assert running.count("net") <= 1


def test_processes_report_as_one_run_and_a_crash_is_a_failure(tmp_path: Path) -> None:
    """Output, warnings and order of fixtures are those of a run in one process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, source in FILES_OF_A_RUN.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    options = ("--processes", "3", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", "/dev/null")
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 5 passed, 1 warning" in done.stdout
    assert "the process that ran this test ended with signal 9" in done.stdout
    assert "what it printed" in done.stdout
    assert "a doubtful thing" in done.stdout
    assert (tmp_path / "log").read_text().split() == ["begin", "one", "two", "end"]


def test_a_run_that_is_given_up_tears_its_fixtures_down(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_fixtures.py").write_text(FILES_OF_A_RUN["fixtures"].replace('note("two")', "time.sleep(100)"))
    options = ("--processes", "2", "-p", "no:cacheprovider", "-c", "/dev/null")
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        log = tmp_path / "log"
        while not (log.exists() and "one" in log.read_text()):
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=60)
    assert run.returncode == 2, out
    assert log.read_text().split() == ["begin", "one", "end"]


CONFTEST = """
from tests.conftest import pytest_addoption, pytest_runtestloop
def pytest_configure(config):
    config.addinivalue_line("markers", "group(name)")
    config.addinivalue_line("markers", "calm")
"""
FILES_OF_A_RUN = {
    "crashing": "import os, signal\ndef test_a(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_b(): pass\n",
    "failing": "def test_a():\n    print('what it printed')\n    assert False\n",
    "warning": "import warnings\ndef test_a(): warnings.warn('a doubtful thing')\n",
    "fixtures": """
import os, pathlib, pytest, time
LOG = pathlib.Path(__file__).with_name("log")
def note(word):
    with LOG.open("a") as log:
        print(word, file=log)
@pytest.fixture(scope="module")
def thing():
    note("begin")
    yield
    note("end")
def test_one(thing): note("one")
def test_two(thing): note("two")
""",
    "last": "import pytest\n@pytest.mark.calm\ndef test_a(): pass\n",
}


def test_unknown_files_take_as_long_as_they_have_tests() -> None:
    durations = Durations({"a": Duration(9.0, 1.0)})
    assert durations.of("a", 3) == Duration(9.0, 1.0)
    assert durations.of("b", 30).seconds > durations.of("c", 3).seconds > 0


def test_files_that_ran_replace_their_durations_and_short_ones_are_not_kept(tmp_path: Path) -> None:
    here, there = (path.relative_to(ROOT).as_posix() for path in (Path(__file__), ROOT / "tests" / "conftest.py"))
    before = {here: Duration(9.0, 9.0), there: Duration(7.0, 1.0), "tests/test_removed.py": Duration(5.0, 5.0)}
    Durations(merged(before, {here: Duration(3.21, 0.4)})).write(tmp_path / "durations.json")
    assert Durations.read(tmp_path / "durations.json").files == {here: Duration(3.2, 0.4), there: Duration(7.0, 1.0)}
    Durations(merged(before, {there: Duration(0.1, 0.1)})).write(tmp_path / "durations.json")
    assert Durations.read(tmp_path / "durations.json").files == {here: Duration(9.0, 9.0)}


def test_a_waiting_file_starts_beside_as_many_computing_ones_as_there_are_cores() -> None:
    computing, waiting = Duration(60.0, 60.0), Duration(5.0, 1.0)
    left = {"computing": computing, "waiting": waiting}
    assert scheduler.next_unit(left, [computing, waiting], cores=2) == "computing"
    assert scheduler.next_unit(left, [computing, computing], cores=2) == "waiting"
    assert scheduler.next_unit({"computing": computing}, [computing, computing], cores=2) == "computing"


def test_recorded_durations_are_those_of_existing_files() -> None:
    assert [file for file in Durations.read().files if not (ROOT / file).exists()] == []


def test_few_tests_are_in_quarantine_each_with_a_reason() -> None:
    assert len(QUARANTINE) <= QUARANTINED_MAX
    for name, reason in QUARANTINE.items():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
        assert len(reason) > 20


@pytest.mark.deep
@pytest.mark.parametrize(("options", "count"), [((), 0), (("--deep",), 2), (("--hypothesis-profile", "deep"), 2)])
def test_deep_tests_are_left_out_unless_they_are_asked_for(options: tuple[str, ...], count: int) -> None:
    file = "tests/unit/reproduction/test_coda.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.count("::test_") == count, done.stdout + done.stderr
