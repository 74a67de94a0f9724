"""Jobs that become due later, each once and in the order of their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.unit.services.mesh import until

from cotenant.rpc.slices import SLICE_SECONDS
from cotenant.services.queue.jobs.delays import Delays

SOON_SECONDS, HOUR_SECONDS = 0.01, 3600.0


@asynccontextmanager
async def running(delays: Delays) -> AsyncIterator[None]:
    task = asyncio.create_task(delays.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def reached(called: list[str], count: int) -> list[str]:
    await until(lambda: len(called) >= count)
    return called


async def test_jobs_are_called_in_the_order_of_their_times() -> None:
    called: list[str] = []
    delays = Delays(called.append)
    delays.add("late", 5 * SOON_SECONDS)
    delays.add("never", HOUR_SECONDS)
    async with running(delays):
        await asyncio.sleep(0)  # it waits for the late one now
        delays.add("soon", SOON_SECONDS)
        delays.add("now", -1.0)
        assert await reached(called, 3) == ["now", "soon", "late"]


async def test_the_earlier_of_two_times_counts_and_a_job_is_called_once() -> None:
    called: list[str] = []
    delays = Delays(called.append)
    async with running(delays):
        delays.add("a", HOUR_SECONDS)
        delays.add("a", SOON_SECONDS)
        delays.add("a", HOUR_SECONDS)
        await reached(called, 1)
        delays.add("b", 2 * SOON_SECONDS)
        assert await reached(called, 2) == ["a", "b"]
        delays.add("a", 0.0)
        assert await reached(called, 3) == ["a", "b", "a"]


async def test_many_that_are_due_together_leave_room_for_other_work() -> None:
    called: list[str] = []

    def costly(job_id: str) -> None:
        until = time.perf_counter() + SLICE_SECONDS
        while time.perf_counter() < until:
            pass
        called.append(job_id)

    delays, turns = Delays(costly), 0
    for number in range(20):
        delays.add(str(number), 0.0)
    async with running(delays):
        while len(called) < 20:
            turns += bool(called)
            await asyncio.sleep(0)
    assert turns >= 19
