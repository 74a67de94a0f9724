"""Deletes ended jobs once they are too many or too old, but none that others depend on, and arrays only as a whole.

Jobs are written to the archive first, if there is one; if that fails, nothing is deleted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack

import structlog

from cotenant import fail_points
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.store_footprint import kept_bytes
from cotenant.services.queue.jobs.transitions import Record
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

FIRST_SWEEP_SECONDS = 3.0  # after a queue starts to lead: leaders may change more often than they sweep
SWEEP_SECONDS = 30.0
RECENT_SECONDS = 600.0  # an ended job younger than this is not deleted to free space
AT_ONCE_MAX = 50  # jobs per batch; other tasks run in between


class Retention:
    """Sweeps periodically."""

    def __init__(
        self,
        state: State,
        arrays: JobArrays,
        past: ArchivedJobs,
        kept_max: int,
        kept_seconds: float = math.inf,
    ) -> None:
        self._state, self._arrays, self._archived_jobs = state, arrays, past
        self._kept_max, self._kept_seconds = kept_max, kept_seconds

    async def run(self) -> None:
        """Sweep forever."""
        await asyncio.sleep(FIRST_SWEEP_SECONDS)
        while True:
            try:
                await self.sweep(time.time())
            except (StoreUnavailable, OSError) as error:
                log.warning("purge_delayed", error=str(error))
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self, now: float) -> None:
        """Delete jobs, the earliest ended first, until no more are left than may be kept.

        Raises:
            StoreUnavailable: the store is unavailable.
            OSError: the archive cannot be written.
        """
        state, old = self._state, now - self._kept_seconds
        ended = [record for record in state.records.values() if record.phase.ended]
        over, gone = len(ended) - self._kept_max, 0
        some: list[Record] = []
        for job_id in _by_end(ended) if over > 0 or any(one.ended_seconds <= old for one in ended) else ():
            record = state.records.get(job_id)
            if record is None or state.dependency_gate.has_dependents(record):
                continue
            if gone + len(some) >= over and record.ended_seconds > old:
                break
            if record.spec.array_task is None:
                some.append(record)
                if len(some) == AT_ONCE_MAX:
                    gone += await self._forget(some)
                    some = []
            else:
                gone += await self._forget_array(record.spec.array_task.array_id)
        await self._forget(some)

    async def free_space(self, tenants: Set[str] | None, size: int, now: float) -> int:
        """Delete ended jobs of some tenants, or of all, until `size` bytes are freed; return how many were freed.

        Jobs that ended recently stay: their users may be about to look at them.

        Raises:
            StoreUnavailable: the store is unavailable.
            OSError: the archive cannot be written.
        """
        state, before = self._state, sum(self._state.footprint.by_tenant().values())
        late = now - RECENT_SECONDS
        ended = [
            one
            for one in state.records.values()
            if one.phase.ended and one.ended_seconds <= late and (tenants is None or one.spec.tenant in tenants)
        ]
        freed, some = 0, list[Record]()
        for job_id in _by_end(ended):
            if freed + sum(map(kept_bytes, some)) >= size:
                break
            record = state.records.get(job_id)
            if record is None or state.dependency_gate.has_dependents(record):
                continue
            if record.spec.array_task is not None:
                await self._forget_array(record.spec.array_task.array_id)
            else:
                some.append(record)
                if len(some) == AT_ONCE_MAX:
                    await self._forget(some)
                    some = []
            freed = before - sum(state.footprint.by_tenant().values())
        await self._forget(some)
        freed = before - sum(state.footprint.by_tenant().values())
        log.info("space_freed", tenants=sorted(tenants or ()), wanted_bytes=size, freed_bytes=freed)
        return freed

    async def _forget_array(self, array_id: str) -> int:
        """Delete an array whose jobs have all ended; return how many jobs it had."""
        array = self._state.dependency_gate.arrays[array_id]
        if not array or array.left:
            return 0
        records = [self._state.records[one] for one in array.ids]
        await self._keep(records)
        with self._state.dependency_gate.removing(array.id):
            await self._arrays.purge(array)
        return len(records)

    async def _forget(self, records: Sequence[Record]) -> int:
        """Delete jobs without an array, except those that got dependents in between."""
        await self._keep(records)
        dependency_gate = self._state.dependency_gate
        gone = [one.id for one in records if one.id in self._state.records and not dependency_gate.has_dependents(one)]
        with ExitStack() as removing:
            for job_id in gone:
                removing.enter_context(dependency_gate.removing(job_id))
            if gone:
                await self._arrays.job_store.purge(gone)
        return len(gone)

    async def _keep(self, records: Sequence[Record]) -> None:
        if self._archived_jobs.enabled and records:
            await self._archived_jobs.keep([record.job for record in records])
            await fail_points.reach("upkeep.archived")


def _by_end(records: Iterable[Record]) -> list[str]:
    return [one.id for one in sorted(records, key=lambda one: (one.ended_seconds, one.id))]
