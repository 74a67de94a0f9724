"""Changes jobs durably: each change is one transaction that compares the revision of what it changes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

import structlog

from cotenant.core.jobs import JobSpec
from cotenant.rpc import errors
from cotenant.services.queue.ids import Ids
from cotenant.services.queue.records import SCHEMA_VERSION, Record, loaded, new_record
from cotenant.services.queue.state import State, clone
from cotenant.store.port import Compare, Conflict, Delete, Put, Store, StoreUnavailable
from cotenant.v1 import records_pb2

log = structlog.get_logger()

JOBS, REQUESTS, TENANTS = "queue/jobs/", "queue/requests/", "queue/tenants/"
REQUEST_IDS_MAX = 64

Change = Callable[[records_pb2.StoredJob], bool | None]


class Keeper:
    """The queue's writing side."""

    def __init__(self, store: Store, state: State) -> None:
        self.store, self.state = store, state
        self._ids = Ids()

    async def load(self) -> None:
        """Read every job and tenant; what is in memory already stays, with its revision brought up to date."""
        jobs = await self.store.list(JOBS)
        for entry in jobs.entries:
            stored = records_pb2.StoredJob.FromString(entry.value)
            known = self.state.records.get(stored.job.id)
            if known is None:
                self.state.add(loaded(stored, entry.mod_revision))
            elif known.revision != entry.mod_revision:
                known.stored, known.revision = stored, entry.mod_revision
                self.state.sync(known)
        tenants = await self.store.list(TENANTS)
        for entry in tenants.entries:
            tenant = records_pb2.StoredTenant.FromString(entry.value).tenant
            self.state.tenants[tenant.id] = (tenant, entry.mod_revision)
        log.info("queue_loaded", jobs=len(jobs.entries), tenants=len(tenants.entries))

    async def create(self, spec: JobSpec, submitter: str, trace_parent: str, request: Request) -> Record:
        """Take a job in, or return the one that a call with this request id made."""
        if found := await self.repeated(request):
            return found
        record = new_record(self._ids.new(), spec, submitter, trace_parent)
        record.stored.request_ids[:] = [request.id] if request.id else []
        compares = [Compare(JOBS + record.id, 0)]
        puts = [Put(JOBS + record.id, record.stored.SerializeToString())]
        if request.id:
            compares.append(Compare(REQUESTS + request.id, 0))
            puts.append(request.put(record.id))
        result = await self.store.transact(compares, puts)
        if isinstance(result, Conflict):
            if found := await self.repeated(request):
                return found
            raise errors.unavailable("two jobs were given one id; the call may be repeated")
        record.revision = result.revision
        self.state.add(record)
        return record

    async def repeated(self, request: Request) -> Record | None:
        """Find what a call with this request id did before."""
        if not request.id:
            return None
        entry = await self.store.get(REQUESTS + request.id)
        if entry is None:
            return None
        stored = records_pb2.StoredRequest.FromString(entry.value)
        if stored.method != request.method or stored.fingerprint != request.fingerprint:
            raise errors.failed_precondition(
                "REQUEST_ID_REUSED", f"request id {request.id!r} was used for another call before", id=stored.id
            )
        if stored.id not in self.state.records:
            await self.load()  # committed by a call that never heard so
        if record := self.state.records.get(stored.id):
            return record
        raise errors.not_found("job", stored.id)

    async def change(self, record: Record, change: Change, *, request: Request | None = None, etag: str = "") -> bool:
        """Change a job durably; `change` returns False to leave it. Raises what the store raises, changed nothing then.

        Raises:
            Problem: ABORTED where the etag is not the job's any more.
        """
        async with record.lock:
            if etag and etag != str(record.revision):
                raise errors.conflict("job", record.id)
            stored = clone(record.stored)
            if change(stored) is False:
                return False
            puts = [Put(JOBS + record.id, stored.SerializeToString())]
            compares = [Compare(JOBS + record.id, record.revision)]
            if request and request.id:
                stored.request_ids.append(request.id)
                del stored.request_ids[: len(stored.request_ids) - REQUEST_IDS_MAX]
                puts[0] = Put(JOBS + record.id, stored.SerializeToString())
                puts.append(request.put(record.id))
                compares.append(Compare(REQUESTS + request.id, 0))
            result = await self.store.transact(compares, puts)
            if isinstance(result, Conflict):
                await self._reread(record)
                raise errors.unavailable("the job was changed elsewhere; the call may be repeated", 0.1, "CONFLICT")
            record.stored, record.revision = stored, result.revision
        self.state.sync(record)
        return True

    async def insist(self, record: Record, change: Change) -> bool:
        """Change a job durably however long the store is away: for what has happened and cannot be refused."""
        wait = 0.1
        while True:
            try:
                return await self.change(record, change)
            except (StoreUnavailable, errors.Problem) as error:
                log.warning("change_delayed", job=record.id, error=str(error))
                await asyncio.sleep(wait)
                wait = min(5.0, wait * 2)
                await self._reread_quietly(record)

    async def _reread(self, record: Record) -> None:
        """Learn the revision of a job's record; a commit whose answer was lost may have raised it."""
        entry = await self.store.get(JOBS + record.id)
        if entry and entry.mod_revision != record.revision:
            kept = records_pb2.StoredJob.FromString(entry.value)
            record.stored, record.revision = kept, entry.mod_revision

    async def _reread_quietly(self, record: Record) -> None:
        try:
            await self._reread(record)
        except StoreUnavailable:
            log.debug("store_still_away", job=record.id)

    async def purge(self, job_ids: list[str]) -> None:
        """Forget ended jobs and the request ids that made them."""
        for job_id in job_ids:
            record = self.state.records[job_id]
            keys = [JOBS + job_id, *(REQUESTS + request_id for request_id in record.stored.request_ids)]
            await self.store.transact([], [Delete(key) for key in keys])
            self.state.remove(job_id)


class Request:
    """A mutating call that may be repeated (AIP-155)."""

    def __init__(self, method: str, request_id: str, message: bytes) -> None:
        self.method, self.id = method, request_id
        self.fingerprint = hashlib.blake2b(message, digest_size=16).digest()

    def put(self, thing_id: str) -> Put:
        """What is written with the change, so that a repeat is known."""
        stored = records_pb2.StoredRequest(
            schema_version=SCHEMA_VERSION, method=self.method, fingerprint=self.fingerprint, id=thing_id
        )
        stored.time.FromNanoseconds(time.time_ns())
        return Put(REQUESTS + self.id, stored.SerializeToString())
