"""Compacts idle job records, so that very many jobs take little memory."""

from __future__ import annotations

import asyncio

from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.queue_state import State

SWEEP_SECONDS = 5.0


class Compaction:
    """Compacts all idle records every few seconds."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def run(self) -> None:
        """Sweep forever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            await self.sweep()

    async def sweep(self) -> None:
        """Compact all idle records; yields to other tasks in between."""
        slices = Slices()
        for record in list(self._state.records.values()):
            record.compact()
            if slices.due():
                await asyncio.sleep(0)
