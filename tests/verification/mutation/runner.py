"""Runs the related tests of mutants, each in a process of its own with limited CPU time, memory and time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from tests.verification.mutation import mutated_module
from tests.verification.mutation.code_mutants import Mutant
from tests.verification.mutation.mutated_module import NOT_REPLACED, Orders
from tests.verification.mutation.related_tests import Related, Repository, imported_from, module_at

CPU_SECONDS_MIN = 30  # imports, and machines slower than the one on which durations were recorded
CPU_FACTOR = 4
TICK_SECONDS = 5.0
TYPES = "mypy"  # as what killed a mutant
SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",  # one core for each process
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the order of sets decides which examples are drawn
}
WALL_FACTOR = 12  # a busy machine gives a process little CPU time
COMMAND = (
    *(sys.executable, "-m", "pytest", "-q", "-x", "--tb", "no", "--no-header", "--timeout", "0"),
    *("-p", mutated_module.__name__, "-p", "no:cacheprovider", "--hypothesis-profile", "mutation"),
)


class Verdict(StrEnum):
    """What the tests made of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMEOUT = "timeout"


class TestsBroken(Exception):
    """The tests could not run, or fail without a mutant as well."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Result:
    """A mutant's verdict, and what killed it: the id of a test, an exit status of pytest, or `TYPES`."""

    mutant: Mutant
    verdict: Verdict
    killer: str = ""


def judge_all(repository: Repository, mutants: Sequence[Mutant], jobs: int) -> Generator[Result | None]:
    """Yield the results of mutants as they come, and None after each while without any.

    Raises:
        TestsBroken: the tests cannot be run.
    """
    judges = Judges(repository)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        waiting = {pool.submit(judges.judge, mutant) for mutant in mutants}
        try:
            while waiting:
                done, waiting = wait(waiting, TICK_SECONDS, FIRST_COMPLETED)
                yield from (one.result() for one in done)
                if not done:
                    yield None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            judges.stop()


class Judges:
    """Runs tests for mutants, and knows which processes do."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._running: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        """Kill all tests."""
        for tests in tuple(self._running):
            _kill_group(tests)

    def judge(self, mutant: Mutant) -> Result:
        """Run the related tests of a mutant until one fails, and then check types."""
        source = mutant.apply((self._repository.root / mutant.path).read_text())
        compile(source, mutant.path, "exec")  # otherwise a mutator's error would count as killed
        related = self._repository.related(module_at(mutant.path))
        code, failed = self._run(mutant.path, source, related)
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            well_typed = _is_well_typed(self._repository.root, mutant.path, source)
            return Result(mutant, Verdict.SURVIVED) if well_typed else Result(mutant, Verdict.KILLED, TYPES)
        if code in (None, -signal.SIGXCPU):
            return Result(mutant, Verdict.TIMEOUT)
        if code == NOT_REPLACED:
            raise TestsBroken(f"the tests of {mutant.path} ran without the mutant")
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR) and not failed:
            plain = (self._repository.root / mutant.path).read_text()  # a mutant may not even be importable
            if self._run(mutant.path, plain, related)[0] == code:
                raise TestsBroken(f"pytest cannot run {' '.join(related.files)}")
        return Result(mutant, Verdict.KILLED, failed[0] if failed else f"exit status {code}")

    def _run(self, path: str, source: str, related: Related) -> tuple[int | None, list[str]]:
        """Return the exit status of pytest, None if it took too long, and the ids of what failed."""
        cpu_seconds = CPU_SECONDS_MIN + round(CPU_FACTOR * related.cpu_seconds)
        root, module = self._repository.root, module_at(path)
        with tempfile.TemporaryDirectory(prefix="cotenant-mutant-") as directory:
            orders, report = Path(directory) / "orders.json", Path(directory) / "failed"
            there = str(root / imported_from(path))
            Orders(module, there, source, cpu_seconds, str(report), related.contracts, related.policies).write(orders)
            tests = subprocess.Popen(
                [*COMMAND, *related.files, *related.contracts],
                cwd=root,
                env=os.environ | SETTINGS | {mutated_module.VARIABLE: str(orders), "TMPDIR": directory},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._running.add(tests)
            try:
                code: int | None = tests.wait(WALL_FACTOR * cpu_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._running.discard(tests)
                _kill_group(tests)
            return code, report.read_text().splitlines() if report.exists() else []


def _is_well_typed(root: Path, path: str, source: str) -> bool:
    """Return whether mypy, which is part of the checks, finds nothing in a module with another text."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        there = imported_from(path)
        shadow = ("--shadow-file", there, file.name, "--cache-dir", os.devnull)  # a cache would know the plain text
        command = [sys.executable, "-m", "mypy", *shadow, there]
        done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode == 0


def _kill_group(tests: subprocess.Popen[bytes]) -> None:
    """Kill what tests leave behind."""
    with suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)
    tests.wait()


def failing_without_mutants(root: Path, tests: Sequence[str]) -> list[str]:
    """Return the tests, of some that killed mutants, that fail without any mutant: they have not killed it."""
    own = sorted({test for test in tests if "::" in test or test.endswith(".py")})
    if not own:
        return []
    command = [one for one in COMMAND if one != "-x"]
    done = subprocess.run(
        [*command, "-r", "fE", *own], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == pytest.ExitCode.OK:
        return []
    lines = (line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    failed = {test for _, rest in lines for test in own if rest.startswith(test)}
    if not failed:
        raise TestsBroken(f"pytest exited with {done.returncode}: {done.stdout[-500:]}")
    return sorted(failed)
