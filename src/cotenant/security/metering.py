"""Measures what a call costs the event loop: CPU time for its caller's budget, and its longest step.

A coroutine runs in steps, from one suspending await to the next; during a step nothing else runs on the loop. The meter
drives a call's coroutine itself and measures each step with two clocks: CPU time of the loop's thread, which is charged
to the caller, and elapsed time, for which all other calls waited. A step of `BLOCKED_SECONDS` or more is logged with
the method's name. Tasks that a call starts are not measured; work in a thread is charged with `charge`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from types import coroutine
from typing import Any, TypeVar

from cotenant import telemetry
from cotenant.telemetry.plain_structlog import structlog

T = TypeVar("T")

log = structlog.get_logger()

BLOCKED_SECONDS = 0.1  # no call may hold the loop for longer

BLOCKED = telemetry.counter(
    "cotenant.loop.blocked", "{step}", "Steps of calls that held the event loop for 100 ms or more, by method."
)


class LongestStep:
    """The longest step of any call since the last `take`: what held the loop when it was late."""

    def __init__(self) -> None:
        self.method, self.seconds = "", 0.0

    def note(self, method: str, seconds: float) -> None:
        """Record a step."""
        if seconds > self.seconds:
            self.method, self.seconds = method, seconds

    def take(self) -> tuple[str, float]:
        """Return the longest step and reset."""
        taken = self.method, self.seconds
        self.method, self.seconds = "", 0.0
        return taken


LONGEST = LongestStep()


class Meter:
    """What one call has cost so far: `seconds` of CPU time, its `longest` step in elapsed seconds."""

    __slots__ = ("_taken", "longest", "method", "seconds")

    def __init__(self, method: str) -> None:
        self.method = method
        self.seconds = self.longest = self._taken = 0.0

    def take(self) -> float:
        """Return the CPU time since the last `take`."""
        taken, self._taken = self.seconds - self._taken, self.seconds
        return taken

    @contextmanager
    def step(self) -> Generator[None]:
        """Measure one step."""
        cpu, begun = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(time.thread_time() - cpu, time.perf_counter() - begun)

    def add(self, cpu_seconds: float, seconds: float) -> None:
        """Count one step."""
        self.seconds += cpu_seconds
        if seconds > self.longest:
            self.longest = seconds
            LONGEST.note(self.method, seconds)
            if seconds >= BLOCKED_SECONDS:
                BLOCKED.add(method=self.method.rpartition("/")[2])
                log.warning(
                    "loop_blocked", method=self.method, seconds=round(seconds, 3), cpu_seconds=round(cpu_seconds, 3)
                )

    @coroutine
    def run(self, served: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await a coroutine, step by step."""
        value: Any = None
        error: BaseException | None = None
        while True:
            cpu, begun = time.thread_time(), time.perf_counter()
            try:
                awaited = served.send(value) if error is None else served.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self.add(time.thread_time() - cpu, time.perf_counter() - begun)
            try:
                value, error = (yield awaited), None
            except GeneratorExit:
                served.close()
                raise
            except BaseException as raised:
                value, error = None, raised

    async def each(self, served: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield what a stream yields, measuring its steps."""
        async with aclosing(served):
            while True:
                try:
                    message = await self.run(_next(served))
                except StopAsyncIteration:
                    return
                yield message


async def _next(served: AsyncIterator[T]) -> T:
    return await anext(served)


_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)


def begin(meter: Meter) -> None:
    """Set the meter of the current call; each call has its own context."""
    _meter.set(meter)


def charge(cpu_seconds: float) -> None:
    """Charge the current call for CPU time spent elsewhere: in a thread, or by another service."""
    meter = _meter.get()
    if meter is not None:
        meter.seconds += max(0.0, cpu_seconds)
