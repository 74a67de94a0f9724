"""Puts jobs to rest to which nothing happens, so that very many take little memory."""

from __future__ import annotations

import asyncio

from cotenant.services.queue.state import State

REST_SECONDS = 5.0
AT_ONCE = 2_000  # jobs, of which most rest already


class Resting:
    """Looks at all jobs every few seconds."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(REST_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """Look at all jobs; others have their turns meanwhile."""
        records = list(self._state.records.values())
        for start in range(0, len(records), AT_ONCE):
            for record in records[start : start + AT_ONCE]:
                record.rest()
            await asyncio.sleep(0)
