"""Creates, changes and deletes whole arrays, in transactions of bounded size.

A store accepts only so much in one transaction. So the jobs of an array are written first, some at a time, and the
array itself last: without it they are uncommitted. Nothing reads them before that, and if the array is never written
they are deleted, by this process or by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import groupby

import structlog

from cotenant import fail_points
from cotenant.codec import dependencies, errors
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import ArrayTask
from cotenant.rpc import gc_tuning
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.array_recovery import CHUNK_MAX, SEPARATOR
from cotenant.services.queue.jobs.complete_revision import Write
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.job_store import (
    ARRAYS,
    ATTEMPTS,
    JOBS,
    Change,
    IdempotencyKey,
    JobStore,
    idle_condition,
)
from cotenant.services.queue.jobs.notification_records import notification_puts, without_secrets
from cotenant.services.queue.jobs.queue_state import clone
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, Record, new_record
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Compare, Conflict, Delete, Entry, Operation, Put, StoreUnavailable

log = structlog.get_logger()

CHUNK_BYTES_MAX = 768 * 1024  # etcd accepts 1.5 MiB per transaction by default
SET_APART = 1_000  # jobs between two calls of `gc_tuning.set_apart`


class JobArrays:
    """Stores arrays; the part of `JobStore` for arrays."""

    def __init__(self, job_store: JobStore) -> None:
        self.job_store, self.state, self.store = job_store, job_store.state, job_store.store
        self._recovery = job_store.array_recovery

    async def create(
        self, spec: JobSpec, submitter: str, trace_parent: str, request: IdempotencyKey, unsatisfiable_reason: str = ""
    ) -> Record:
        """Create an array, all or nothing; returns its first job, or that of an earlier call with this request id.

        With an `unsatisfiable_reason` all of its jobs are cancelled at once.
        """
        with self.job_store.revisions.write() as write:
            made = await self._create(spec, submitter, trace_parent, request, unsatisfiable_reason, write)
        if made is None:  # its request id was in use only in the id space of older versions
            return await self.create(spec, submitter, trace_parent, request, unsatisfiable_reason)
        return made

    async def _create(
        self,
        spec: JobSpec,
        submitter: str,
        trace_parent: str,
        request: IdempotencyKey,
        unsatisfiable_reason: str,
        write: Write,
    ) -> Record | None:
        """Create an array; None if this has to be tried again."""
        array_id = self.job_store.new_id()
        records: list[Record] = []
        slices = Slices(most=CHUNK_MAX)
        for record in _tasks(array_id, spec, submitter, trace_parent, unsatisfiable_reason):
            record.compact()
            records.append(record)
            if not len(records) % SET_APART:
                gc_tuning.freeze_young()
            await slices.step()  # other calls get a turn
        if request.id:
            records[0].stored.request_ids.append(request.id)
        stored = records_pb2.StoredArray(schema_version=SCHEMA_VERSION, id=array_id, count=len(records))
        try:
            for chunk in _chunks(records, CHUNK_MAX):
                compares = [Compare(JOBS + record.id, 0) for record in chunk]
                puts = [Put(JOBS + record.id, record.packed) for record in chunk]
                result = await self.store.transact(compares, puts)
                if isinstance(result, Conflict):
                    raise errors.unavailable("array id collision; retry the call")
                for record in chunk:
                    record.revision = result.revision
                await slices.step()  # a store in this process may answer without a turn of the loop
            await fail_points.reach("array.begun")
            anchor = min(records, key=lambda record: record.id)
            unused = request.unused
            compares = [Compare(ARRAYS + array_id, 0), Compare(JOBS + anchor.id, anchor.revision), *unused]
            operations: list[Operation] = [
                Put(ARRAYS + array_id, stored.SerializeToString()),
                *notification_puts(array_id, spec),
            ]
            if request.id:
                operations.append(request.put(records[0].id))
            written = await self.store.transact(compares, operations)
            if isinstance(written, Conflict):
                await self._recovery.discard(array_id)
                if found := await self.job_store.find_result(request):
                    return found
                if request.unused != unused:
                    return None
                raise errors.unavailable("the array could not be created; retry the call")
            await fail_points.reach("array.kept")
        except (StoreUnavailable, asyncio.CancelledError):  # it may have been committed nevertheless
            self.job_store.mark_unknown(array_id, self._recovery.settle, write)
            raise
        write.committed(written.revision)
        return await self._recovery.add(records)

    async def discard_orphans(self) -> None:
        """Delete jobs whose array is missing.

        Those that have ended were being deleted with their array. Watches may know them, so this is recorded.
        """
        orphans = sorted(self.job_store.orphans, key=lambda record: record.phase.ended)
        for ended, group in groupby(orphans, key=lambda record: record.phase.ended):
            records = list(group)
            for start in range(0, len(records), CHUNK_MAX):
                chunk = [(record.id, record.spec.tenant) for record in records[start : start + CHUNK_MAX]]
                arrays = {array_of(job_id) for job_id, _ in chunk}
                compares = [Compare(ARRAYS + array_id, 0) for array_id in sorted(arrays)]
                if ended:
                    await self.job_store.delete(compares, chunk)
                else:
                    await self.store.transact(compares, [Delete(JOBS + job_id) for job_id, _ in chunk])
        if orphans:
            log.info("unfinished_arrays_removed", jobs=len(orphans))

    async def change(
        self, array: Array, change: Change, request: IdempotencyKey, *, instead: Change | None = None
    ) -> None:
        """Change all unfinished jobs of an array; the request is recorded once all are changed.

        The caller has looked for the result of an earlier call. For `instead` see `JobStore.change`.
        """
        first = self.state.records[array.first]
        attempts = await self.store.list(ATTEMPTS + array.id + SEPARATOR) if instead else None
        kept = {entry.key: entry for entry in attempts.entries} if attempts else {}
        living = [self.state.records[one] for one in array.ids if not self.state.records[one].phase.ended]
        for chunk in _chunks(living, CHUNK_MAX // 2):
            if not await self._change(chunk, change, instead, kept):
                for record in chunk:
                    await self.job_store.change(record, change, instead=instead)
            await fail_points.reach("array.changed")
        if request.id:
            await self.job_store.change(first, lambda stored: None, request=request)

    async def _change(
        self, records: Sequence[Record], change: Change, instead: Change | None, attempts: Mapping[str, Entry]
    ) -> bool:
        """Change some jobs in one transaction; False if any was changed elsewhere."""
        with self.job_store.revisions.write() as write:
            return await self._change_in(write, records, change, instead, attempts)

    async def _change_in(
        self,
        write: Write,
        records: Sequence[Record],
        change: Change,
        instead: Change | None,
        attempts: Mapping[str, Entry],
    ) -> bool:
        async with AsyncExitStack() as locks:
            for record in sorted(records, key=lambda record: record.id):
                await locks.enter_async_context(record.lock)
            changed, compares = [], []
            for record in records:
                stored, idle, mean = clone(record.stored), None, change
                if instead and not (record.phase.ended or record.phase.holds_resources):
                    idle = idle_condition(record, attempts.get(ATTEMPTS + record.id))
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
                    self.job_store.mark_unknown(record.id, self.job_store.reread, write)
                raise
            if isinstance(result, Conflict):
                return False
            write.committed(result.revision)
            for record, stored in changed:
                record.stored, record.revision = stored, result.revision
        for record, _ in changed:
            self.state.sync(record)
        return True

    async def purge(self, array: Array) -> None:
        """Delete an array whose jobs have all ended: the array first, so that its jobs are uncommitted without it."""
        records = [self.state.records[job_id] for job_id in array.ids]
        await self.store.transact([], [Delete(ARRAYS + array.id)])
        for start in range(0, len(records), CHUNK_MAX):
            await self.job_store.purge([record.id for record in records[start : start + CHUNK_MAX]])


def _tasks(
    array_id: str, spec: JobSpec, submitter: str, trace_parent: str, unsatisfiable_reason: str
) -> Iterator[Record]:
    """Yield the records of all jobs of an array, by index."""
    assert spec.array
    indices, running_max = spec.array.indices, spec.array.running_max
    spec = without_secrets(replace(spec, array=None))
    first = new_record("", spec, submitter, trace_parent, unsatisfiable_reason)
    for index in indices:
        task = ArrayTask(array_id, index, len(indices), running_max)
        stored = clone(first.stored)
        stored.job.id = f"{array_id}{SEPARATOR}{index}"
        stored.job.spec.array_task.CopyFrom(dependencies.task_to_wire(task))
        yield Record(stored, replace(spec, array_task=task))


def _chunks(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """Split records into transactions that every store accepts."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        own = len(record.packed) + 256  # its key, and the comparison
        size += own
        if chunk and (len(chunk) == most or size > CHUNK_BYTES_MAX):
            yield chunk
            chunk, size = [], own
        chunk.append(record)
    if chunk:
        yield chunk


def array_of(job_id: str) -> str:
    """Return the array id in a job's id; "" for a job without an array.

    >>> array_of("01h3v9qkabcd_17")
    '01h3v9qkabcd'
    """
    array_id, separator, _ = job_id.rpartition(SEPARATOR)
    return array_id if separator else ""
