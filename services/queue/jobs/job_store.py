"""Changes jobs durably: each change is one transaction that compares the revision of the changed record."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import structlog
from google.protobuf.message import Message

from cotenant import fail_points
from cotenant.codec import errors
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import Violation
from cotenant.security.identity import caller
from cotenant.services.queue.jobs.array_recovery import ARRAYS as ARRAYS
from cotenant.services.queue.jobs.array_recovery import JOBS as JOBS
from cotenant.services.queue.jobs.array_recovery import ArrayRecovery
from cotenant.services.queue.jobs.complete_revision import CompleteRevision, Write
from cotenant.services.queue.jobs.job_ids import JobIdGenerator
from cotenant.services.queue.jobs.notification_records import notification_puts
from cotenant.services.queue.jobs.queue_state import LOADED_AT_ONCE, State, clone
from cotenant.services.queue.jobs.removal_log import REMOVALS, Batch, Removal, RemovalLog, key_of, read_batch
from cotenant.services.queue.jobs.schedule_book import SCHEDULES, load_schedule
from cotenant.services.queue.jobs.secret_gate import SECRETS, load_secret
from cotenant.services.queue.jobs.transitions import (
    SCHEMA_VERSION,
    STATES,
    Record,
    RecordLoader,
    apply_attempt,
    load_record,
    new_record,
    submission_order,
)
from cotenant.services.queue.jobs.usage_store import load_usage
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.identity_check import generation_of
from cotenant.store.port import Committed, Compare, Conflict, Delete, Entry, Operation, Put, Store, StoreUnavailable
from cotenant.v1 import job_pb2

log = structlog.get_logger()

REQUESTS, TENANTS = "queue/requests/", "queue/tenants/"
ATTEMPTS = "placement/attempts/"  # placement and queue share one store
REQUEST_IDS_MAX = 64
SETTLE_SECONDS = 0.3
REQUEST_ID_LENGTH_MAX = 128
CREATE, CREATE_ARRAY = "CreateJob", "CreateArray"

Change = Callable[[records_pb2.StoredJob], bool | None]
Settle = Callable[[str], Awaitable[None]]


class _Unknown(NamedTuple):
    """Writes that may have been committed although their calls failed, and how to find out."""

    settle: Settle
    writes: list[Write]


class JobStore:
    """The write side of the queue."""

    def __init__(self, store: Store, state: State) -> None:
        self.store, self.state = store, state
        self.array_recovery = ArrayRecovery(store, state)
        self.orphans: list[Record] = []  # jobs without an array, found by `load`
        self.revisions, self.removals = CompleteRevision(), RemovalLog()
        self._ids = JobIdGenerator()
        self._removing = asyncio.Lock()
        self._unknown_outcomes: dict[str, _Unknown] = {}  # by what the writes may have changed
        self._outcome_unknown = asyncio.Event()

    async def load(self, known: Mapping[str, Record] = MappingProxyType({})) -> None:
        """Read every job and tenant, once, before anything is served; of `known` jobs, only those that have changed.

        There may be very many; the leader's lease has to be renewed in between.

        Raises:
            StoreUnavailable: they cannot be read.
            NewerSchema: a newer version wrote one of them.
            BadRecord: one of them is damaged.
        """
        tenants = await self.store.list(TENANTS)
        for entry in tenants.entries:
            tenant = schema.read(records_pb2.StoredTenant, entry).tenant
            with schema.reading(entry):
                if entry.key != TENANTS + tenant.id:
                    raise ValueError(f"its id is {tenant.id!r}")
            self.state.tenants[tenant.id] = (tenant, entry.mod_revision)
        for entry in (await self.store.list(SECRETS)).entries:
            self.state.secrets.put(load_secret(entry), entry.mod_revision)
        for entry in (await self.store.list(SCHEDULES)).entries:
            self.state.schedules.put(load_schedule(entry))
        await load_usage(self.store, self.state)
        arrays = {entry.key.removeprefix(ARRAYS) for entry in (await self.store.list(ARRAYS)).entries}
        found = []
        self.removals.load((await self.store.list(REMOVALS)).entries)
        generation = generation_of(self.store)
        jobs = await self.store.list(JOBS)
        self.revisions.start(generation, jobs.revision)
        loader = RecordLoader()
        for place, entry in enumerate(jobs.entries):
            if not place % LOADED_AT_ONCE:
                await asyncio.sleep(0)
            record = known.get(entry.key.removeprefix(JOBS))
            if record is None or record.revision != entry.mod_revision:
                record = loader.load(entry)
            if record.spec.array_task and record.spec.array_task.array_id not in arrays:
                self.orphans.append(record)
            else:
                found.append(record)
        for _ in self.state.load_in_slices(sorted(found, key=submission_order)):
            await asyncio.sleep(0)
        log.info("queue_loaded", jobs=len(found), arrays=len(arrays), tenants=len(tenants.entries))

    # Unknown outcomes ----------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Resolve unknown outcomes, as soon as the store is available."""
        while True:
            await self._outcome_unknown.wait()
            self._outcome_unknown.clear()
            try:
                while self._unknown_outcomes:
                    await self._settle_one(next(iter(self._unknown_outcomes)))
            except StoreUnavailable as error:
                log.info("store_unavailable", error=str(error), doubtful=len(self._unknown_outcomes))
                self._outcome_unknown.set()
                await asyncio.sleep(SETTLE_SECONDS)

    async def _settle_one(self, thing_id: str) -> None:
        unknown = self._unknown_outcomes.pop(thing_id)  # a write that fails meanwhile is settled again
        try:
            await unknown.settle(thing_id)
        except BaseException:
            self._unknown_outcomes.setdefault(thing_id, _Unknown(unknown.settle, [])).writes.extend(unknown.writes)
            raise
        for write in unknown.writes:
            self.revisions.settle(write)

    def mark_unknown(self, thing_id: str, settle: Settle, write: Write) -> None:
        """Resolve the outcome of a write later, once the store is available. Until then it stays open."""
        write.unsettled += 1
        self._unknown_outcomes.setdefault(thing_id, _Unknown(settle, [])).writes.append(write)
        self._outcome_unknown.set()

    def new_id(self) -> str:
        """Return an id that no job and no array has."""
        return self._ids.new()

    async def _transact(
        self, job_id: str, compares: Sequence[Compare], operations: Sequence[Operation], write: Write
    ) -> Committed | Conflict:
        await fail_points.reach("queue.committing")
        try:
            result = await self.store.transact(compares, operations)
            await fail_points.reach("queue.committed")
        except (StoreUnavailable, asyncio.CancelledError):  # it may have been committed nevertheless
            self.mark_unknown(job_id, self.reread, write)
            raise
        if isinstance(result, Committed):
            write.committed(result.revision)
        return result

    async def reread(self, job_id: str) -> None:
        """Read a job from the store again."""
        record = self.state.records.get(job_id)
        if record:
            async with record.lock:
                await self._reread(record)
            self.state.sync(record)
            self.state.events.reread(record)
        elif entry := await self.store.get(JOBS + job_id):
            found = load_record(entry)
            if found.spec.array_task:
                await self.array_recovery.settle(found.spec.array_task.array_id)
            else:
                self._add(found)

    async def _reread(self, record: Record) -> None:
        """Replace a record by the stored one if that is newer; the state of a live attempt is kept."""
        entry = await self.store.get(JOBS + record.id)
        if entry is None or entry.mod_revision <= record.revision:
            return
        live = record.job.attempt
        fresh = load_record(entry)
        if live.number and not STATES.from_wire(live.state).ended:
            apply_attempt(fresh.stored, live)
        record.stored, record.spec, record.revision = fresh.stored, fresh.spec, fresh.revision

    def _add(self, record: Record) -> Record:
        """Add a committed job, unless it was added concurrently."""
        if known := self.state.records.get(record.id):
            return known
        self.state.add(record)
        return record

    # Changes -------------------------------------------------------------------------------------------------

    async def create(
        self,
        spec: JobSpec,
        submitter: str,
        trace_parent: str,
        request: IdempotencyKey,
        unsatisfiable_reason: str = "",
        expected: Sequence[job_pb2.ObjectiveStatus] = (),
    ) -> Record:
        """Create a job, cancelled at once if it has an `unsatisfiable_reason`; or return the job that this request id
        created. `expected` is the forecast of its objectives.
        """
        record = new_record(self.new_id(), spec, submitter, trace_parent, unsatisfiable_reason, expected)
        record.stored.request_ids[:] = [request.id] if request.id else []
        puts = [Put(JOBS + record.id, record.packed), *notification_puts(record.id, spec)]
        if request.id:
            puts.append(request.put(record.id))
        while True:
            unused = request.unused
            with self.revisions.write() as write:
                result = await self._transact(record.id, [Compare(JOBS + record.id, 0), *unused], puts, write)
                if not isinstance(result, Conflict):
                    record.revision = result.revision
                    return self._add(record)
            if found := await self.find_result(request):
                return found
            if request.unused == unused:
                raise errors.unavailable("job id collision; retry the call")

    async def find_result(self, request: IdempotencyKey) -> Record | None:
        """Return the job that an earlier call with this request id created or changed."""
        if not request.id:
            return None
        entry = await self.store.get(REQUESTS + request.id) or await self._find_legacy_request(request)
        if entry is None:
            return None
        stored = schema.read(records_pb2.StoredRequest, entry)
        if stored.method != request.method or stored.fingerprint != request.fingerprint:
            raise errors.failed_precondition(
                "REQUEST_ID_REUSED", f"request id {request.given_id!r} was already used for another call", id=stored.id
            )
        known = self.state.records.get(stored.id)
        if known is None or known.revision < entry.mod_revision:
            await self.reread(stored.id)  # committed by a call that never got the answer
        if record := self.state.records.get(stored.id):
            return record
        raise errors.not_found("job", stored.id)

    async def _find_legacy_request(self, request: IdempotencyKey) -> Entry | None:
        """Find a request stored by a version in which all callers shared one id space."""
        entry = await self.store.get(REQUESTS + request.legacy_id) if request.legacy_id else None
        if entry is None:
            return None
        made = self.state.records.get(schema.read(records_pb2.StoredRequest, entry).id)
        if made is not None and made.job.submitter == request.owner:
            return entry
        request.legacy_id = ""  # of another caller, and none of this caller's business
        return None

    async def change(
        self,
        record: Record,
        change: Change,
        *,
        request: IdempotencyKey | None = None,
        etag: str = "",
        instead: Change | None = None,
    ) -> bool:
        """Change a job durably; `change` returns False to leave it unchanged. If the store raises, nothing is changed.

        Pass `instead` with a change that ends or suspends an idle job: it is applied if placement has an attempt of
        the job, or its end, that this queue does not know of; see `idle_condition`.

        Raises:
            Problem: ABORTED if the etag is stale.
        """
        with self.revisions.write() as write:
            result = await self._change(record, change, request, etag, instead, write)
            if result is None:
                return False
            self.state.sync(record)
        if isinstance(result, Conflict):
            if request and await self.find_result(request):
                return False
            raise errors.unavailable("the job was changed concurrently; retry the call", 0.1, "CONFLICT")
        return True

    async def _change(
        self,
        record: Record,
        change: Change,
        request: IdempotencyKey | None,
        etag: str,
        instead: Change | None,
        write: Write,
    ) -> Committed | Conflict | None:
        """Commit a change of a job; None if it changes nothing."""
        async with record.lock:
            if etag and etag != str(record.revision):
                raise errors.conflict("job", record.id)
            compares = [Compare(JOBS + record.id, record.revision)]
            if instead and not (record.phase.ended or record.phase.holds_resources):
                idle = idle_condition(record, await self.store.get(ATTEMPTS + record.id))
                compares += [idle] if idle else []
                change = change if idle else instead
            stored = clone(record.stored)
            if change(stored) is False:
                return None
            operations: list[Operation] = []
            if request and request.id:
                compares.append(Compare(REQUESTS + request.id, 0))
                stored.request_ids.append(request.id)
                operations = [request.put(record.id), *_trimmed(stored)]
            operations.append(Put(JOBS + record.id, stored.SerializeToString()))
            result = await self._transact(record.id, compares, operations, write)
            if isinstance(result, Conflict):
                await self._reread(record)
            else:
                record.stored, record.revision = stored, result.revision
            return result

    async def change_with_retry(self, record: Record, change: Change, *, instead: Change | None = None) -> bool:
        """Change a job durably, retrying while the store is unavailable: for events that have happened and cannot be
        refused.
        """
        wait = 0.1
        while True:
            try:
                return await self.change(record, change, instead=instead)
            except (StoreUnavailable, errors.Problem) as error:
                log.warning("change_delayed", job=record.id, error=str(error))
                await asyncio.sleep(wait)
                wait = min(5.0, wait * 2)

    async def purge(self, job_ids: Sequence[str]) -> None:
        """Delete ended jobs, at most a hundred, and the request ids that created them."""
        records = self.state.records
        found = [record for job_id in job_ids if (record := records.get(job_id))]
        requests = [one for record in found for one in record.stored.request_ids]
        for start in range(0, len(requests), REQUEST_IDS_MAX):
            some = requests[start : start + REQUEST_IDS_MAX]
            await self.store.transact([], [Delete(REQUESTS + request_id) for request_id in some])
        await fail_points.reach("upkeep.forgetting")
        async with self._removing:
            removed = [(job_id, records[job_id].spec.tenant) for job_id in job_ids if job_id in records]
            if removed:  # else another sweep was faster
                await self.delete([], removed)

    async def delete(self, compares: Sequence[Compare], removed: Sequence[Removal]) -> None:
        """Delete jobs, and record this for watches that resume later."""
        batch, operations = self.removals.begin(removed)
        with self.revisions.write() as write:
            try:
                result = await self.store.transact(
                    compares, [*(Delete(JOBS + job_id) for job_id, _ in removed), *operations]
                )
            except (StoreUnavailable, asyncio.CancelledError):  # it may have been committed nevertheless
                self.mark_unknown(key_of(batch), self._settle_removals, write)
                raise
            if isinstance(result, Committed):
                write.committed(result.revision)
                self._apply_removals(replace(batch, revision=result.revision))

    async def _settle_removals(self, key: str) -> None:
        """Read whether jobs were deleted."""
        if entry := await self.store.get(key):
            self._apply_removals(read_batch(entry))

    def _apply_removals(self, batch: Batch) -> None:
        self.removals.add(batch)
        for job_id, _ in batch.removed:
            if job_id in self.state.records:
                self.state.remove(job_id)


def idle_condition(record: Record, entry: Entry | None) -> Compare | None:
    """Return the comparison under which a job is idle, from placement's record of its attempt; None if it may not be
    idle.

    A new leader does not know what runs, and a queue that requested a start may have lost the answer. If a job's end
    is committed under this comparison, no attempt of it is alive, and none can start: a start compares the job's
    record.
    """
    if entry is None:
        return Compare(ATTEMPTS + record.id, 0)
    attempt = schema.read(records_pb2.StoredAttempt, entry).attempt
    known = STATES.from_wire(attempt.state).ended and attempt.number <= record.attempt_number
    return Compare(entry.key, entry.mod_revision) if known else None


def _trimmed(stored: records_pb2.StoredJob) -> list[Operation]:
    """Drop the oldest request ids of a job that was changed very often."""
    many = stored.request_ids[:-REQUEST_IDS_MAX]
    del stored.request_ids[: len(many)]
    return [Delete(REQUESTS + request_id) for request_id in many]


class IdempotencyKey:
    """The request id of a mutating call, by which a repeat is recognized (AIP-155).

    Callers that are restricted to some tenants have their own id space: they neither see nor collide with others' ids.
    `given_id` is the id as sent, `id` the one under which the call is stored.
    """

    def __init__(self, method: str, request_id: str, message: bytes, owner: str = "") -> None:
        self.method, self.given_id, self.owner = method, request_id, owner
        self.id = f"{owner}/{request_id}" if owner and request_id else request_id
        self.legacy_id = (
            request_id if owner and method in (CREATE, CREATE_ARRAY) else ""
        )  # where older versions stored creates
        self.fingerprint = hashlib.blake2b(message, digest_size=16).digest()

    @property
    def unused(self) -> list[Compare]:
        """Comparisons that hold if no call with this id was served."""
        return [Compare(REQUESTS + one, 0) for one in (self.id, self.legacy_id) if one]

    def put(self, thing_id: str) -> Put:
        """Return the write that records the call together with its change."""
        stored = records_pb2.StoredRequest(
            schema_version=SCHEMA_VERSION, method=self.method, fingerprint=self.fingerprint, id=thing_id
        )
        stored.time.FromNanoseconds(time.time_ns())
        return Put(REQUESTS + self.id, stored.SerializeToString())


def idempotency_key_of(method: str, request_id: str, message: Message) -> IdempotencyKey:
    """Return the idempotency key of a call.

    Raises:
        Problem: INVALID_ARGUMENT for an invalid request id.
    """
    if len(request_id) > REQUEST_ID_LENGTH_MAX or not request_id.isprintable() or "/" in request_id:
        raise errors.invalid(
            [Violation("request_id", f"must be printable, without slashes, at most {REQUEST_ID_LENGTH_MAX} long")]
        )
    owner = caller().name if caller().tenants is not None else ""
    return IdempotencyKey(method, request_id, message.SerializeToString(deterministic=True), owner)
