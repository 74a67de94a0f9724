"""Puts jobs to rest to which nothing happens, so that very many take little memory."""

from __future__ import annotations

import asyncio

from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.queue_state import State

REST_SECONDS = 5.0


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
        slices = Slices()
        for record in list(self._state.records.values()):
            record.rest()
            if slices.due():
                await asyncio.sleep(0)
