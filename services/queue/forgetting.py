"""Forgets the oldest ended jobs once there are too many, but none that others wait for, and arrays only as a whole."""

from __future__ import annotations

import asyncio

import structlog

from cotenant.services.queue.arrays import Arrays
from cotenant.services.queue.state import State
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

SWEEP_SECONDS = 30.0


class Forgetting:
    """Sweeps now and then."""

    def __init__(self, state: State, arrays: Arrays, kept_max: int) -> None:
        self._state, self._arrays, self._kept_max = state, arrays, kept_max

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except StoreUnavailable as error:
                log.info("purge_delayed", error=str(error))

    async def sweep(self) -> None:
        """Forget jobs that ended, oldest first, until no more are kept than should be or may go."""
        state = self._state
        ended = [job_id for job_id in state.ids if state.records[job_id].phase.ended]
        over = len(ended) - self._kept_max
        for job_id in ended:
            record = state.records.get(job_id)
            if over <= 0:
                return
            if record is None or state.gates.wanted(record):
                continue
            if record.spec.array_task is None:
                with state.gates.leaving(job_id):
                    await self._arrays.keeper.purge([job_id])
                over -= 1
            elif (array := state.gates.arrays[record.spec.array_task.array_id]) and not array.standing[0]:
                over -= len(array.ids)
                with state.gates.leaving(array.id):
                    await self._arrays.purge(array)
