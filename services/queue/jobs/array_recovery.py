"""Finds out whether an array was committed: adds its jobs to the state if so, and deletes them otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from cotenant.rpc import gc_tuning
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, load_record, submission_order
from cotenant.store.port import Compare, Delete, Store

log = structlog.get_logger()

JOBS, ARRAYS = "queue/jobs/", "queue/arrays/"
CHUNK_MAX = 100  # etcd accepts 128 operations per transaction by default
SEPARATOR = "_"  # between the array's id and the index


class ArrayRecovery:
    """Adds whole arrays to the state, and discards unfinished ones."""

    def __init__(self, store: Store, state: State) -> None:
        self._store, self._state = store, state
        self._adding = asyncio.Lock()

    async def add(self, records: Sequence[Record]) -> Record:
        """Add all jobs to the state at once, and schedule them slice by slice, so that other calls get their turns.

        This completes even if the caller is cancelled.
        """
        add_in_slices, gone = asyncio.ensure_future(self._take_in(records)), False
        while not add_in_slices.done():
            try:
                await asyncio.shield(add_in_slices)
            except asyncio.CancelledError:
                gone = True
        add_in_slices.result()
        if gone:
            raise asyncio.CancelledError
        return self._state.records[records[0].id]

    async def _take_in(self, records: Sequence[Record]) -> None:
        async with self._adding:  # a repeat of the call may find the array in the store, and add it too
            if fresh := [record for record in records if record.id not in self._state.records]:
                for _ in self._state.add_in_slices(fresh):
                    await asyncio.sleep(0)
                gc_tuning.freeze_young()  # the last slice was short

    async def settle(self, array_id: str) -> None:
        """Read whether an array was committed: add its jobs if so, delete them otherwise."""
        if await self._store.get(ARRAYS + array_id) is None:
            await self.discard(array_id)
            return
        found = await self._store.list(JOBS + array_id + SEPARATOR)
        jobs, slices = [], Slices()
        for entry in found.entries:
            jobs.append(load_record(entry))
            await slices.step()
        await self.add(sorted(jobs, key=submission_order))

    async def discard(self, array_id: str) -> None:
        """Delete jobs whose array was never written; the first delete also makes a late commit of the array fail."""
        found = await self._store.list(JOBS + array_id + SEPARATOR)
        for start in range(0, len(found.entries), CHUNK_MAX):
            chunk = found.entries[start : start + CHUNK_MAX]
            await self._store.transact([Compare(ARRAYS + array_id, 0)], [Delete(entry.key) for entry in chunk])
        if found.entries:
            log.info("unfinished_arrays_removed", jobs=len(found.entries))
