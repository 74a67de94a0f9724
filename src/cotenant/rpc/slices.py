"""Long work in slices: so that no piece of it holds the event loop for long, whatever a single step costs."""

from __future__ import annotations

import asyncio
import time

SLICE_SECONDS = 0.005  # several works may be under way at once, and each gets a slice before others get their turns


class Slices:
    """Tells after which steps of some work the event loop is due.

    That is after `SLICE_SECONDS`, or after `most` steps where there is such a limit.

    >>> slices = Slices(most=2)
    >>> [slices.due() for _ in range(4)]
    [False, True, False, True]
    """

    def __init__(self, *, seconds: float = SLICE_SECONDS, most: int = 0) -> None:
        self._seconds, self._most = seconds, most
        self._begin()

    def _begin(self) -> None:
        self._until, self._steps = time.perf_counter() + self._seconds, 0

    def due(self) -> bool:
        """Count a step; True where the event loop is due, and the next slice begins."""
        self._steps += 1
        if self._steps == self._most or time.perf_counter() >= self._until:
            self._begin()
            return True
        return False

    async def step(self) -> None:
        """Count a step, and let others have their turns where they are due."""
        if self.due():
            await asyncio.sleep(0)
            self._begin()
