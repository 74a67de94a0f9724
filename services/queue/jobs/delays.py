"""Jobs that may start only later, and the one timer that waits for the next of them.

Ten thousand tasks of an array may have the same begin time: they become due together, and are handled in slices.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from contextlib import suppress

from cotenant.rpc.slices import Slices

LATE_SECONDS = 0.001  # a timer may fire a little early


class Delays:
    """Calls back with the id of each delayed job once its time has come."""

    def __init__(self, due: Callable[[str], None]) -> None:
        self._call = due
        self._heap: list[tuple[float, str]] = []  # by the monotonic clock; entries that are outdated stay
        self._due: dict[str, float] = {}
        self._earlier = asyncio.Event()

    def add(self, job_id: str, seconds: float) -> None:
        """Call back for a job in some seconds, unless it waits for an earlier time already."""
        due = time.monotonic() + max(0.0, seconds) + LATE_SECONDS
        if self._due.get(job_id, due + 1.0) <= due:
            return
        self._due[job_id] = due
        heapq.heappush(self._heap, (due, job_id))
        if self._heap[0][0] == due:
            self._earlier.set()

    async def run(self) -> None:
        """Call back for jobs as their time comes, forever."""
        slices = Slices()
        while True:
            self._earlier.clear()
            left = self._heap[0][0] - time.monotonic() if self._heap else None
            if left is None or left > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._earlier.wait()
                continue
            due, job_id = heapq.heappop(self._heap)
            if self._due.get(job_id) == due:
                del self._due[job_id]
                self._call(job_id)
            await slices.step()
