"""Whole arrays, durably: taken in, changed and forgotten in transactions of bounded size.

A store takes only so much in one transaction. So the jobs of an array are written first, some at a time, and last the
array itself: without it they are nobody's. Nobody sees them before, and where the array was never written they are
deleted, by this process or by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import structlog

from cotenant import fail_points
from cotenant.codec import dependencies, errors
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import ArrayTask
from cotenant.rpc import gc_tuning
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.job_store import ARRAYS, ATTEMPTS, JOBS, Change, Keeper, Request, idle_by
from cotenant.services.queue.jobs.queue_state import clone
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, Record, loaded, new_record, turn
from cotenant.store.port import Compare, Conflict, Delete, Entry, Operation, Put, StoreUnavailable
from cotenant.v1 import records_pb2

log = structlog.get_logger()

CHUNK_MAX = 100  # etcd takes 128 operations in a transaction unless told otherwise
CHUNK_BYTES_MAX = 768 * 1024  # and 1.5 MiB
SET_APART = 1_000  # jobs, between two times at which they are kept from the garbage collector
SEPARATOR = "_"  # between the array's id and the index


class Arrays:
    """The keeper's hand for arrays."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.state, self.store = keeper, keeper.state, keeper.store
        self._adding = asyncio.Lock()
        keeper.settle_array = self.settle

    async def create(
        self, spec: JobSpec, submitter: str, trace_parent: str, request: Request, hopeless: str = ""
    ) -> Record:
        """Take an array in, all of it or nothing; returns its first job, or that of a call with this request id.

        One that is hopeless is cancelled at once.
        """
        array_id = self.keeper.new_id()
        records: list[Record] = []
        slices = Slices(most=CHUNK_MAX)
        for record in _tasks(array_id, spec, submitter, trace_parent, hopeless):
            record.rest()
            records.append(record)
            if not len(records) % SET_APART:
                gc_tuning.set_apart()
            await slices.step()  # whoever else calls need not wait for all of them
        if request.id:
            records[0].stored.request_ids.append(request.id)
        stored = records_pb2.StoredArray(schema_version=SCHEMA_VERSION, id=array_id, count=len(records))
        try:
            for chunk in _chunks(records, CHUNK_MAX):
                compares = [Compare(JOBS + record.id, 0) for record in chunk]
                puts = [Put(JOBS + record.id, record.packed) for record in chunk]
                result = await self.store.transact(compares, puts)
                if isinstance(result, Conflict):
                    raise errors.unavailable("two arrays were given one id; the call may be repeated")
                for record in chunk:
                    record.revision = result.revision
                await slices.step()  # a store in this process may answer without a turn of the loop
            await fail_points.reach("array.begun")
            anchor = min(records, key=lambda record: record.id)
            unused = request.unused
            compares = [Compare(ARRAYS + array_id, 0), Compare(JOBS + anchor.id, anchor.revision), *unused]
            operations: list[Operation] = [Put(ARRAYS + array_id, stored.SerializeToString())]
            if request.id:
                operations.append(request.put(records[0].id))
            if isinstance(await self.store.transact(compares, operations), Conflict):
                await self._discard(array_id)
                if found := await self.keeper.repeated(request):
                    return found
                if request.unused != unused:
                    return await self.create(spec, submitter, trace_parent, request, hopeless)
                raise errors.unavailable("the array could not be taken in; the call may be repeated")
            await fail_points.reach("array.kept")
        except (StoreUnavailable, asyncio.CancelledError):  # it may be committed all the same
            self.keeper.doubt(array_id, self.settle)
            raise
        return await self._add(records)

    async def _add(self, records: Sequence[Record]) -> Record:
        """Let everybody see them, at once; they get their turns some at a time, so that others have theirs.

        That is done to its end also where the caller goes away meanwhile.
        """
        adding, gone = asyncio.ensure_future(self._take_in(records)), False
        while not adding.done():
            try:
                await asyncio.shield(adding)
            except asyncio.CancelledError:
                gone = True
        adding.result()
        if gone:
            raise asyncio.CancelledError
        return self.state.records[records[0].id]

    async def _take_in(self, records: Sequence[Record]) -> None:
        async with self._adding:  # a repeat of the call may find the array in the store, and take it in too
            if fresh := [record for record in records if record.id not in self.state.records]:
                for _ in self.state.adding(fresh):
                    await asyncio.sleep(0)
                gc_tuning.set_apart()  # the last slice has been short

    async def settle(self, array_id: str) -> None:
        """Learn whether an array was committed; if so, take its jobs in, else leave nothing of them."""
        if await self.store.get(ARRAYS + array_id) is None:
            await self._discard(array_id)
            return
        found = await self.store.list(JOBS + array_id + SEPARATOR)
        jobs, slices = [], Slices()
        for entry in found.entries:
            jobs.append(loaded(entry))
            await slices.step()
        await self._add(sorted(jobs, key=turn))

    async def _discard(self, array_id: str) -> None:
        """Delete jobs whose array was never written; with the first ones goes what it would have to find."""
        found = await self.store.list(JOBS + array_id + SEPARATOR)
        await self.discard(found.entries)

    async def discard(self, entries: Sequence[Entry]) -> None:
        """Delete jobs of arrays that are not there."""
        for start in range(0, len(entries), CHUNK_MAX):
            chunk = entries[start : start + CHUNK_MAX]
            arrays = {array_of(entry.key.removeprefix(JOBS)) for entry in chunk}
            compares = [Compare(ARRAYS + array_id, 0) for array_id in sorted(arrays)]
            await self.store.transact(compares, [Delete(entry.key) for entry in chunk])
        if entries:
            log.info("unfinished_arrays_removed", jobs=len(entries))

    async def change(self, array: Array, change: Change, request: Request, *, instead: Change | None = None) -> Record:
        """Change all jobs of an array that have not ended; the request is done once all are. Returns the first job.

        For `instead` see `Keeper.change`.
        """
        first = self.state.records[array.first]
        if await self.keeper.repeated(request):
            return first
        attempts = await self.store.list(ATTEMPTS + array.id + SEPARATOR) if instead else None
        kept = {entry.key: entry for entry in attempts.entries} if attempts else {}
        living = [self.state.records[one] for one in array.ids if not self.state.records[one].phase.ended]
        for chunk in _chunks(living, CHUNK_MAX // 2):
            if not await self._change(chunk, change, instead, kept):
                for record in chunk:
                    await self.keeper.change(record, change, instead=instead)
            await fail_points.reach("array.changed")
        if request.id:
            await self.keeper.change(first, lambda stored: None, request=request)
        return first

    async def _change(
        self, records: Sequence[Record], change: Change, instead: Change | None, attempts: Mapping[str, Entry]
    ) -> bool:
        """Change some jobs in one transaction; False where some had been changed elsewhere."""
        async with AsyncExitStack() as locks:
            for record in sorted(records, key=lambda record: record.id):
                await locks.enter_async_context(record.lock)
            changed, compares = [], []
            for record in records:
                stored, idle, mean = clone(record.stored), None, change
                if instead and not (record.phase.ended or record.phase.holds_resources):
                    idle = idle_by(record, attempts.get(ATTEMPTS + record.id))
                    mean = change if idle else instead
                if mean(stored) is not False:
                    changed.append((record, stored))
                    compares += [Compare(JOBS + record.id, record.revision), *([idle] if idle else [])]
            if not changed:
                return True
            try:
                result = await self.store.transact(
                    compares, [Put(JOBS + record.id, stored.SerializeToString()) for record, stored in changed]
                )
            except (StoreUnavailable, asyncio.CancelledError):
                for record, _ in changed:
                    self.keeper.doubt(record.id, self.keeper.reread)
                raise
            if isinstance(result, Conflict):
                return False
            for record, stored in changed:
                record.stored, record.revision = stored, result.revision
        for record, _ in changed:
            self.state.sync(record)
        return True

    async def purge(self, array: Array) -> None:
        """Forget an array of which every job has ended: first itself, so that the rest is nobody's."""
        records = [self.state.records[job_id] for job_id in array.ids]
        await self.store.transact([], [Delete(ARRAYS + array.id)])
        for start in range(0, len(records), CHUNK_MAX):
            await self.keeper.purge([record.id for record in records[start : start + CHUNK_MAX]])


def _tasks(array_id: str, spec: JobSpec, submitter: str, trace_parent: str, hopeless: str) -> Iterator[Record]:
    """Make the records of all jobs of an array, by index."""
    assert spec.array
    indices, running_max = spec.array.indices, spec.array.running_max
    spec = replace(spec, array=None)
    first = new_record("", spec, submitter, trace_parent, hopeless)
    for index in indices:
        task = ArrayTask(array_id, index, len(indices), running_max)
        stored = clone(first.stored)
        stored.job.id = f"{array_id}{SEPARATOR}{index}"
        stored.job.spec.array_task.CopyFrom(dependencies.task_to_wire(task))
        yield Record(stored, replace(spec, array_task=task))


def _chunks(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """Part records into transactions that every store takes."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        own = len(record.packed) + 256  # and its key, and what compares it
        size += own
        if chunk and (len(chunk) == most or size > CHUNK_BYTES_MAX):
            yield chunk
            chunk, size = [], own
        chunk.append(record)
    if chunk:
        yield chunk


def array_of(job_id: str) -> str:
    """The id of the array that a job's id tells of; "" where the job is of none.

    >>> array_of("01h3v9qkabcd_17")
    '01h3v9qkabcd'
    """
    array_id, separator, _ = job_id.rpartition(SEPARATOR)
    return array_id if separator else ""
