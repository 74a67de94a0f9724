"""Time slices for long work, so that it never holds the event loop for long."""

from __future__ import annotations

import asyncio
import time

SLICE_SECONDS = 0.005  # several may run at the same time, and each gets a slice before other work


class Slices:
    """Decides after which steps of some work to yield to the event loop.

    That is after `SLICE_SECONDS`, or after `most` steps if there is such a limit.

    >>> slices = Slices(seconds=60, most=2)
    >>> [slices.due() for _ in range(4)]
    [False, True, False, True]
    """

    def __init__(self, *, seconds: float = SLICE_SECONDS, most: int = 0) -> None:
        self._seconds, self._most = seconds, most
        self._begin()

    def _begin(self) -> None:
        self._until, self._steps = time.perf_counter() + self._seconds, 0

    def due(self) -> bool:
        """Count a step; return True if it is time to yield, and begin the next slice."""
        self._steps += 1
        if self._steps == self._most or time.perf_counter() >= self._until:
            self._begin()
            return True
        return False

    async def step(self) -> None:
        """Count a step, and yield to the event loop if it is time."""
        if self.due():
            await asyncio.sleep(0)
            self._begin()
