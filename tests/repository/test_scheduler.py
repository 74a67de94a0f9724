"""The scheduler of tests runs each test once, the calm ones alone, whatever ends in between."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from tests.conftest import QUARANTINE
from tests.support.durations import Duration, Durations, merged
from tests.support.paths import ROOT

scheduler = pytest.importorskip("tests.support.scheduler", reason="pytest-xdist is not installed")

QUARANTINED_MAX = 5
TESTS = [
    *(f"tests/test_{file}.py::test_{number}[a@b]" for file in "abcdefgh" for number in range(1 + ord(file) % 4)),
    *(f"tests/test_{file}.py::test_{number}@calm" for file in "yz" for number in range(3)),
    *(f"tests/test_{file}.py::test_group@net" for file in "ab"),
]


@dataclass(eq=False)
class Process:
    """A process that runs tests, and begins each when it knows the next, as those of pytest-xdist do."""

    name: str
    queue: list[int] = field(default_factory=list)
    shutting_down: bool = False

    @property
    def gateway(self) -> SimpleNamespace:
        return SimpleNamespace(id=self.name)

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def running(self) -> str | None:
        return TESTS[self.queue[0]] if self.queue and (len(self.queue) > 1 or self.shutting_down) else None


class Run:
    """A run of the tests in several processes, whose order is drawn by chance."""

    def __init__(self, config: pytest.Config, processes: int, seed: int) -> None:
        self.chance = Random(seed)
        self.scheduling = scheduler.DurationScheduling(config)
        self.scheduling.numnodes = processes
        self.processes: list[Process] = []
        self.ran: list[str] = []
        self.crashed: list[str] = []
        for _ in range(processes):
            self.start()

    def start(self) -> None:
        process = Process(f"gw{len(self.processes) + len(self.crashed)}")
        self.processes.append(process)
        self.scheduling.add_node(process)
        self.scheduling.add_node_collection(process, TESTS)
        if self.scheduling.collection_is_completed:
            self.scheduling.schedule()

    def steps(self) -> Iterator[list[str]]:
        """Let one running test end after the other; yield those that run."""
        while running := [process for process in self.processes if process.running]:
            yield [str(process.running) for process in running]
            ending = self.chance.choice([process for process in self.processes if process.running])
            self.ran.append(str(ending.running))
            self.scheduling.mark_test_complete(ending, ending.queue.pop(0))
            self.remove_ended()

    def crash(self) -> None:
        process = self.chance.choice([process for process in self.processes if process.running])
        self.processes.remove(process)
        crashed = self.scheduling.remove_node(process)
        assert crashed == process.running
        self.crashed.append(crashed)
        self.start()

    def remove_ended(self) -> None:
        for process in [it for it in self.processes if it.shutting_down and not it.queue]:
            self.processes.remove(process)
            assert self.scheduling.remove_node(process) is None


@pytest.fixture
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.Config:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda _: [])
    return request.config


@pytest.mark.parametrize("crashes", [0, 1, 3])
@pytest.mark.parametrize("processes", [1, 2, 5, 40])
def test_each_test_runs_once_and_calm_ones_alone_at_the_end(
    config: pytest.Config, processes: int, crashes: int
) -> None:
    for seed in range(20):
        run = Run(config, processes, seed)
        for step, running in enumerate(run.steps()):
            calm = [test for test in running if test.endswith("@calm")]
            assert not calm or len(running) == 1
            if crashes and step % 7 == 3 and len(run.crashed) < crashes:
                run.crash()
        assert sorted(run.ran + run.crashed) == sorted(TESTS)
        were_calm = [test.endswith("@calm") for test in run.ran]
        assert were_calm == sorted(were_calm)
        assert run.scheduling.tests_finished


def test_a_group_runs_in_one_process(config: pytest.Config) -> None:
    run = Run(config, 5, 1)
    for running in run.steps():
        assert sum(test.endswith("@net") for test in running) <= 1


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
def test_installed_versions_put_a_tests_group_into_its_id(tmp_path: Path) -> None:
    """Otherwise calm tests would run beside all others, and nothing would say so."""
    file = tmp_path / "test_calm.py"
    file.write_text("import pytest\n\n@pytest.mark.xdist_group('calm')\ndef test_it():\n    pass\n")
    options = ("-n", "1", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "test_calm.py::test_it@calm" in done.stdout


@pytest.mark.parametrize(("options", "count"), [((), 0), (("--deep",), 2), (("--hypothesis-profile", "deep"), 2)])
def test_deep_tests_are_left_out_unless_they_are_asked_for(options: tuple[str, ...], count: int) -> None:
    file = "tests/unit/reproduction/test_coda.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.count("::test_") == count, done.stdout + done.stderr
