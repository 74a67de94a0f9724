"""Rates of a training program by cores: measured by hand, by changing the cores of a program that runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.gpu.programs import step_log
from benchmarks.local_mesh import ROOT

START_SECONDS_MAX = 90.0
SETTLE_SECONDS = 1.5  # after a change: batches made before are used up
POLL_SECONDS = 0.1


class ProgramFailed(Exception):
    """A training program ended, or did not start; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A training program outside of the mesh, and its log of steps."""

    process: subprocess.Popen[bytes]
    steps: Path
    output: Path

    def entries(self) -> list[step_log.Entry]:
        """Return the steps so far.

        Raises:
            ProgramFailed: it has ended.
        """
        if self.process.poll() is not None:
            raise ProgramFailed(self.output.read_text(errors="replace")[-2000:])
        return step_log.read(self.steps)

    def set_cores(self, cores: Sequence[int]) -> None:
        """Pin all threads of all its processes; what they start later inherits it."""
        for process in (psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, cores)

    def rate(self, seconds: float) -> float:
        """Return its steps per second over the next seconds."""
        begin = time.time()
        time.sleep(seconds)
        return step_log.rate(self.entries(), begin, time.time())


@contextmanager
def running(command: Sequence[str], steps: Path) -> Iterator[RunningProgram]:
    """Run a program until it has done a few steps, then yield it, and end it with its workers."""
    output = steps.with_suffix(".log")
    with output.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)
    program = RunningProgram(process, steps, output)
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while len(program.entries()) < 2:
            if time.monotonic() > deadline:
                raise ProgramFailed(f"no steps within {START_SECONDS_MAX:g} s: {output.read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)
        yield program
    finally:
        with suppress(psutil.NoSuchProcess):
            for below in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    below.kill()
        process.kill()
        process.wait()


def counts(cores: int) -> list[int]:
    """Return the numbers of cores at which rates are measured.

    >>> counts(16), counts(2)
    ([1, 2, 3, 4, 6, 8, 12, 16], [1, 2])
    """
    return [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= cores]


def curve(
    program: RunningProgram, numbers: Sequence[int], seconds: float, enough: Callable[[], bool] = lambda: False
) -> dict[int, float]:
    """Return the rate at each number of cores, fewest first, so that batches made on more cores do not help.

    It stops early, with what it has, once `enough()`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    rates: dict[int, float] = {}
    for number in sorted(numbers):
        if enough():
            break
        program.set_cores(allowed[:number])
        time.sleep(SETTLE_SECONDS if rates else 2 * SETTLE_SECONDS)
        rates[number] = program.rate(seconds)
    program.set_cores(allowed)
    return rates


def useful(rates: Mapping[int, float], share: float = 0.98) -> int:
    """Return the fewest cores that reach this share of the best rate.

    >>> useful({1: 10.0, 2: 19.0, 4: 30.0, 8: 30.4})
    4
    """
    best = max(rates.values())
    return min(number for number, rate in rates.items() if rate >= share * best)


def rate_at(rates: Mapping[int, float], cores: float) -> float:
    """Return the rate at a number of cores, interpolated linearly between measured ones.

    >>> rate_at({1: 10.0, 2: 20.0, 4: 30.0}, 3), rate_at({1: 10.0, 2: 20.0}, 8)
    (25.0, 20.0)
    """
    known = sorted(rates)
    lower = max((number for number in known if number <= cores), default=known[0])
    upper = min((number for number in known if number >= cores), default=known[-1])
    if lower == upper:
        return rates[lower]
    part = (cores - lower) / (upper - lower)
    return rates[lower] + part * (rates[upper] - rates[lower])
