"""Forgets ended jobs once they are too many or too old, but none that others wait for, and arrays only as a whole.

What is forgotten is written into the archive first, where there is one; where that fails nothing is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import structlog

from cotenant import fail_points
from cotenant.services.queue.arrays import Arrays
from cotenant.services.queue.past import Past
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

FIRST_SWEEP_SECONDS = 3.0  # after a queue has begun to lead: leaders may change more often than they sweep
SWEEP_SECONDS = 30.0
AT_ONCE_MAX = 50  # between two looks at whether others need the queue


class Forgetting:
    """Sweeps now and then."""

    def __init__(
        self,
        state: State,
        arrays: Arrays,
        past: Past,
        kept_max: int,
        kept_seconds: float = math.inf,
    ) -> None:
        self._state, self._arrays, self._past = state, arrays, past
        self._kept_max, self._kept_seconds = kept_max, kept_seconds

    async def run(self) -> None:
        """Sweep for ever."""
        await asyncio.sleep(FIRST_SWEEP_SECONDS)
        while True:
            try:
                await self.sweep(time.time())
            except (StoreUnavailable, OSError) as error:
                log.warning("purge_delayed", error=str(error))
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self, now: float) -> None:
        """Forget jobs, those first that ended first, until no more are kept than should be or may go.

        Raises:
            StoreUnavailable: the store is away.
            OSError: the archive cannot be written.
        """
        state, old = self._state, now - self._kept_seconds
        ended = [record for record in state.records.values() if record.phase.ended]
        over, gone = len(ended) - self._kept_max, 0
        some: list[Record] = []
        for job_id in _by_end(ended) if over > 0 or any(one.ended_seconds <= old for one in ended) else ():
            record = state.records.get(job_id)
            if record is None or state.gates.wanted(record):
                continue
            if gone + len(some) >= over and record.ended_seconds > old:
                break
            if record.spec.array_task is None:
                some.append(record)
                if len(some) == AT_ONCE_MAX:
                    gone += await self._forget(some)
                    some = []
            elif (array := state.gates.arrays[record.spec.array_task.array_id]) and not array.standing[0]:
                records = [state.records[one] for one in array.ids]
                await self._keep(records)
                with state.gates.leaving(array.id):
                    await self._arrays.purge(array)
                gone += len(records)
        await self._forget(some)

    async def _forget(self, records: Sequence[Record]) -> int:
        """Forget jobs that belong to no array; those that somebody began to wait for meanwhile stay."""
        await self._keep(records)
        gates = self._state.gates
        gone = [one.id for one in records if one.id in self._state.records and not gates.wanted(one)]
        with ExitStack() as leaving:
            for job_id in gone:
                leaving.enter_context(gates.leaving(job_id))
            if gone:
                await self._arrays.keeper.purge(gone)
        return len(gone)

    async def _keep(self, records: Sequence[Record]) -> None:
        if self._past.keeps and records:
            await self._past.keep([record.job for record in records])
            await fail_points.reach("upkeep.archived")


def _by_end(records: Iterable[Record]) -> list[str]:
    return [one.id for one in sorted(records, key=lambda one: (one.ended_seconds, one.id))]
