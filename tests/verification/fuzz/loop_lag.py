"""An oracle for event loops: no callback may take more CPU time than `STEP_SECONDS_MAX`, whatever the input.

Every asyncio callback is measured by the CPU time of its thread, not by elapsed time, so that a loaded machine gives no
false alarms. Neither does a slow machine: a fixed piece of work is timed in the same process, and the bound is scaled
by the ratio of its time to that on the reference machine. Garbage collection is excluded: its pauses depend on the rest
of the process, here a fuzzer, and services bound them by `cotenant.rpc.gc_tuning`. Targets without a loop, which
services run within theirs, must stay within the same bound as a whole.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

STEP_SECONDS_MAX = 0.1
REFERENCE_SECONDS = 0.010  # time of `_work` on the reference machine
WORK_ROUNDS = 20_000
CALIBRATIONS = 5


@dataclass(slots=True)
class Step:
    """The longest callback so far, and what it ran."""

    seconds: float = 0.0
    what: str = ""


class Collector:
    """CPU time that this thread has spent in garbage collection."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Handle the start or end of a collection."""
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._begun


class LoopLag:
    """Measures all callbacks of event loops while `watching`.

    >>> import asyncio
    >>> lag = LoopLag()
    >>> with lag.watching():
    ...     asyncio.run(asyncio.sleep(0))
    >>> lag.take().seconds < STEP_SECONDS_MAX
    True
    """

    def __init__(self) -> None:
        self._longest = Step()
        self._collector = Collector()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure within the context."""
        handle: Any = events.Handle
        run, collector = handle._run, self._collector

        def measured(one: Any) -> None:
            collected, begun = collector.seconds, time.thread_time()
            run(one)
            seconds = time.thread_time() - begun - (collector.seconds - collected)
            if seconds > self._longest.seconds:
                task = getattr(one._callback, "__self__", None)
                self._longest = Step(seconds, repr(task if isinstance(task, asyncio.Task) else one)[:160])

        gc.callbacks.append(collector)
        handle._run = measured
        try:
            yield
        finally:
            handle._run = run
            gc.callbacks.remove(collector)

    def take(self) -> Step:
        """Return the longest callback since the last call."""
        taken, self._longest = self._longest, Step()
        return taken

    def finding(self) -> str:
        """Return a finding if a callback took too long since the last call, else ""."""
        step = self.take()
        if step.seconds <= bound_seconds():
            return ""
        return f"held the loop: {step.seconds * 1000:.0f} ms of CPU time in one callback, {step.what}"


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call in this thread, without garbage collection."""
    collector = Collector()
    gc.callbacks.append(collector)
    begun = time.thread_time()
    try:
        run()
    finally:
        seconds = time.thread_time() - begun - collector.seconds
        gc.callbacks.remove(collector)
    return seconds


@cache
def bound_seconds() -> float:
    """Return the CPU time that one callback may take on this machine."""
    quickest = min(cpu_seconds(_work) for _ in range(CALIBRATIONS))
    return STEP_SECONDS_MAX * max(1.0, quickest / REFERENCE_SECONDS)


def _work() -> int:
    """Do what services do most: attributes, dictionaries, strings, small objects."""
    kept: dict[str, Step] = {}
    for number in range(WORK_ROUNDS):
        step = Step(number / 7, f"job-{number % 997}")
        kept[step.what] = step
    return len(sorted(kept, key=lambda what: kept[what].seconds))
