"""An oracle for event loops: no callback may take more CPU time than `STEP_SECONDS_MAX`, whatever the input.

Every asyncio callback is measured by the CPU time of its thread, not by elapsed time, so that a loaded machine gives no
false alarms. Neither does a slow machine: a fixed piece of work is timed in the same process, and the bound is scaled
by the ratio of its time to that on the reference machine; once more before something is a finding, because neighbors on
the same core slow it down now and then. Garbage collection is excluded: its pauses depend on the rest
of the process, here a fuzzer, and services bound them by `cotenant.rpc.gc_tuning`. Targets without a loop, which
services run within theirs, must stay within the same bound as a whole.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

STEP_SECONDS_MAX = 0.1
REFERENCE_SECONDS = 0.010  # time of `_work` on the reference machine
WORK_ROUNDS = 20_000
CALIBRATIONS = 5

T = TypeVar("T")
_not_counted: list[float] = []  # CPU time of slices that were not the longest


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
        if not is_too_long(step.seconds):
            return ""
        return f"held the loop: {step.seconds * 1000:.0f} ms of CPU time in one callback, {step.what}"


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call in this thread: of several slices the longest, and no garbage collection."""
    collector = Collector()
    gc.callbacks.append(collector)
    _not_counted.clear()
    begun = time.thread_time()
    try:
        run()
    finally:
        seconds = time.thread_time() - begun - collector.seconds - sum(_not_counted)
        gc.callbacks.remove(collector)
    return seconds


def run_in_slices(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that yields between slices of its work, and return its result.

    Each slice is a callback of its own in a service, so `cpu_seconds` counts only the longest.

    Raises:
        Exception: what the coroutine raises.
    """
    slices = [0.0]
    try:
        while True:
            begun = time.thread_time()
            try:
                steps.send(None)
            finally:
                slices.append(time.thread_time() - begun)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _not_counted.append(sum(slices) - max(slices))


def is_too_long(seconds: float) -> bool:
    """Return whether a callback held the loop for too long, on the machine as it is now."""
    return seconds > bound_seconds() and seconds > _bound_now()


@cache
def bound_seconds() -> float:
    """Return the CPU time that one callback may take on this machine."""
    return _bound_now()


def _bound_now() -> float:
    quickest = min(cpu_seconds(_work) for _ in range(CALIBRATIONS))
    return STEP_SECONDS_MAX * max(1.0, quickest / REFERENCE_SECONDS)


def _work() -> int:
    """Do what services do most: attributes, dictionaries, strings, small objects."""
    kept: dict[str, Step] = {}
    for number in range(WORK_ROUNDS):
        step = Step(number / 7, f"job-{number % 997}")
        kept[step.what] = step
    return len(sorted(kept, key=lambda what: kept[what].seconds))
