"""Changes jobs durably: each change is one transaction that compares the revision of what it changes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

import structlog
from google.protobuf.message import Message

from cotenant import fail_points
from cotenant.codec import errors
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import Violation
from cotenant.security.identity import caller
from cotenant.services.queue.jobs.job_ids import Ids
from cotenant.services.queue.jobs.queue_state import LOADED_AT_ONCE, State, clone
from cotenant.services.queue.jobs.transitions import (
    SCHEMA_VERSION,
    STATES,
    Record,
    loaded,
    new_record,
    take_attempt,
    turn,
)
from cotenant.store import schema
from cotenant.store.port import Committed, Compare, Conflict, Delete, Entry, Operation, Put, Store, StoreUnavailable
from cotenant.v1 import records_pb2

log = structlog.get_logger()

JOBS, REQUESTS, TENANTS = "queue/jobs/", "queue/requests/", "queue/tenants/"
ARRAYS = "queue/arrays/"
ATTEMPTS = "placement/attempts/"  # both services keep what they know in one store
REQUEST_IDS_MAX = 64
SETTLE_SECONDS = 0.3
REQUEST_ID_LENGTH_MAX = 128
CREATE = "CreateJob"

Change = Callable[[records_pb2.StoredJob], bool | None]
Settle = Callable[[str], Awaitable[None]]


class Keeper:
    """The queue's writing side."""

    def __init__(self, store: Store, state: State) -> None:
        self.store, self.state = store, state
        self.on_reread: Callable[[Record], None] = lambda record: None  # set by whoever acts on what was found
        self.settle_array: Settle = self.reread  # set by whoever keeps arrays
        self.orphans: list[Entry] = []  # jobs whose array is not there, found at the start
        self._ids = Ids()
        self._doubtful: dict[str, Settle] = {}  # of which a write may have been committed without our knowing
        self._doubted = asyncio.Event()

    async def load(self, known: Mapping[str, Record] = MappingProxyType({})) -> None:
        """Read every job and tenant, once, before anything is served; of `known` jobs only what has changed since.

        There may be very many, and meanwhile the lease of whoever leads has to be kept alive.

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
                    raise ValueError(f"it says that it is {tenant.id!r}")
            self.state.tenants[tenant.id] = (tenant, entry.mod_revision)
        arrays = {entry.key.removeprefix(ARRAYS) for entry in (await self.store.list(ARRAYS)).entries}
        found = []
        jobs = await self.store.list(JOBS)
        for place, entry in enumerate(jobs.entries):
            if not place % LOADED_AT_ONCE:
                await asyncio.sleep(0)
            record = known.get(entry.key.removeprefix(JOBS))
            if record is None or record.revision != entry.mod_revision:
                record = loaded(entry)
            if record.spec.array_task and record.spec.array_task.array_id not in arrays:
                self.orphans.append(entry)
            else:
                found.append(record)
        for _ in self.state.loading(sorted(found, key=turn)):
            await asyncio.sleep(0)
        log.info("queue_loaded", jobs=len(found), arrays=len(arrays), tenants=len(tenants.entries))

    # What may have been written ------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Read doubtful jobs again, as soon as the store is there."""
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            try:
                for thing_id, settle in list(self._doubtful.items()):
                    await settle(thing_id)
                    self._doubtful.pop(thing_id, None)
            except StoreUnavailable as error:
                log.info("store_away", error=str(error), doubtful=len(self._doubtful))
                self._doubted.set()
                await asyncio.sleep(SETTLE_SECONDS)

    def doubt(self, thing_id: str, settle: Settle) -> None:
        """Look again, once the store is there, at what may have been written."""
        self._doubtful[thing_id] = settle
        self._doubted.set()

    def new_id(self) -> str:
        """Make an id that no job and no array has."""
        return self._ids.new()

    async def _transact(
        self, job_id: str, compares: Sequence[Compare], operations: Sequence[Operation]
    ) -> Committed | Conflict:
        await fail_points.reach("queue.committing")
        try:
            result = await self.store.transact(compares, operations)
            await fail_points.reach("queue.committed")
            return result
        except (StoreUnavailable, asyncio.CancelledError):  # it may be committed all the same
            self.doubt(job_id, self.reread)
            raise

    async def reread(self, job_id: str) -> None:
        """Learn what the store holds of a job."""
        record = self.state.records.get(job_id)
        if record:
            async with record.lock:
                await self._reread(record)
            self.state.sync(record)
            self.on_reread(record)
        elif entry := await self.store.get(JOBS + job_id):
            found = loaded(entry)
            if found.spec.array_task:
                await self.settle_array(found.spec.array_task.array_id)
            else:
                self._add(found)

    async def _reread(self, record: Record) -> None:
        """Take a job as the store has it, if that is newer; what is known of its live attempt stays known."""
        entry = await self.store.get(JOBS + record.id)
        if entry is None or entry.mod_revision <= record.revision:
            return
        live = record.job.attempt
        fresh = loaded(entry)
        if live.number and not STATES.from_wire(live.state).ended:
            take_attempt(fresh.stored, live)
        record.stored, record.spec, record.revision = fresh.stored, fresh.spec, fresh.revision

    def _add(self, record: Record) -> Record:
        """Take a job in that was committed, unless someone else has done so meanwhile."""
        if known := self.state.records.get(record.id):
            return known
        self.state.add(record)
        return record

    # Changes -------------------------------------------------------------------------------------------------

    async def create(
        self, spec: JobSpec, submitter: str, trace_parent: str, request: Request, hopeless: str = ""
    ) -> Record:
        """Take a job in, cancelled already where it is hopeless; or return the one that a call with this id made."""
        record = new_record(self.new_id(), spec, submitter, trace_parent, hopeless)
        record.stored.request_ids[:] = [request.id] if request.id else []
        puts = [Put(JOBS + record.id, record.packed)]
        if request.id:
            puts.append(request.put(record.id))
        while True:
            unused = request.unused
            result = await self._transact(record.id, [Compare(JOBS + record.id, 0), *unused], puts)
            if not isinstance(result, Conflict):
                break
            if found := await self.repeated(request):
                return found
            if request.unused == unused:
                raise errors.unavailable("two jobs were given one id; the call may be repeated")
        record.revision = result.revision
        return self._add(record)

    async def repeated(self, request: Request) -> Record | None:
        """Find what a call with this request id did before."""
        if not request.id:
            return None
        entry = await self.store.get(REQUESTS + request.id) or await self._kept_before(request)
        if entry is None:
            return None
        stored = schema.read(records_pb2.StoredRequest, entry)
        if stored.method != request.method or stored.fingerprint != request.fingerprint:
            raise errors.failed_precondition(
                "REQUEST_ID_REUSED", f"request id {request.told!r} was used for another call before", id=stored.id
            )
        known = self.state.records.get(stored.id)
        if known is None or known.revision < entry.mod_revision:
            await self.reread(stored.id)  # committed by a call that never heard so
        if record := self.state.records.get(stored.id):
            return record
        raise errors.not_found("job", stored.id)

    async def _kept_before(self, request: Request) -> Entry | None:
        """Find a caller's request as versions kept it that gave all callers' ids one name space."""
        entry = await self.store.get(REQUESTS + request.older) if request.older else None
        if entry is None:
            return None
        made = self.state.records.get(schema.read(records_pb2.StoredRequest, entry).id)
        if made is not None and made.job.submitter == request.whose:
            return entry
        request.older = ""  # it is somebody else's, and nothing of it is this caller's business
        return None

    async def change(
        self,
        record: Record,
        change: Change,
        *,
        request: Request | None = None,
        etag: str = "",
        instead: Change | None = None,
    ) -> bool:
        """Change a job durably; `change` returns False to leave it. Raises what the store raises, changed nothing then.

        What ends a job that holds nothing, or holds it back, names what is to be done `instead` where placement has an
        attempt of it that this queue has not heard of, or not of its end; see `idle_by`.

        Raises:
            Problem: ABORTED where the etag is not the job's any more.
        """
        async with record.lock:
            if etag and etag != str(record.revision):
                raise errors.conflict("job", record.id)
            compares = [Compare(JOBS + record.id, record.revision)]
            if instead and not (record.phase.ended or record.phase.holds_resources):
                idle = idle_by(record, await self.store.get(ATTEMPTS + record.id))
                compares += [idle] if idle else []
                change = change if idle else instead
            stored = clone(record.stored)
            if change(stored) is False:
                return False
            operations: list[Operation] = []
            if request and request.id:
                compares.append(Compare(REQUESTS + request.id, 0))
                stored.request_ids.append(request.id)
                operations = [request.put(record.id), *_trimmed(stored)]
            operations.append(Put(JOBS + record.id, stored.SerializeToString()))
            result = await self._transact(record.id, compares, operations)
            if isinstance(result, Conflict):
                await self._reread(record)
            else:
                record.stored, record.revision = stored, result.revision
        self.state.sync(record)
        if isinstance(result, Conflict):
            if request and await self.repeated(request):
                return False
            raise errors.unavailable("the job was changed elsewhere; the call may be repeated", 0.1, "CONFLICT")
        return True

    async def insist(self, record: Record, change: Change, *, instead: Change | None = None) -> bool:
        """Change a job durably however long the store is away: for what has happened and cannot be refused."""
        wait = 0.1
        while True:
            try:
                return await self.change(record, change, instead=instead)
            except (StoreUnavailable, errors.Problem) as error:
                log.warning("change_delayed", job=record.id, error=str(error))
                await asyncio.sleep(wait)
                wait = min(5.0, wait * 2)

    async def purge(self, job_ids: Sequence[str]) -> None:
        """Forget some ended jobs, at most a hundred, and the request ids that made them."""
        requests = [one for job_id in job_ids for one in self.state.records[job_id].stored.request_ids]
        for start in range(0, len(requests), REQUEST_IDS_MAX):
            some = requests[start : start + REQUEST_IDS_MAX]
            await self.store.transact([], [Delete(REQUESTS + request_id) for request_id in some])
        await fail_points.reach("upkeep.forgetting")
        await self.store.transact([], [Delete(JOBS + job_id) for job_id in job_ids])
        for job_id in job_ids:
            self.state.remove(job_id)


def idle_by(record: Record, entry: Entry | None) -> Compare | None:
    """What has to hold so that a job holds nothing, by the record that placement has of its attempt; None where it may.

    A queue that has just begun to lead does not know what runs, and one that asked for a start may have lost the
    answer. Where a job's end is committed under this comparison no attempt of it is alive, and none begins: a start
    compares the job's record.
    """
    if entry is None:
        return Compare(ATTEMPTS + record.id, 0)
    attempt = schema.read(records_pb2.StoredAttempt, entry).attempt
    known = STATES.from_wire(attempt.state).ended and attempt.number <= record.attempt_number
    return Compare(entry.key, entry.mod_revision) if known else None


def _trimmed(stored: records_pb2.StoredJob) -> list[Operation]:
    """Forget the oldest request ids of a job that was changed very often."""
    many = stored.request_ids[:-REQUEST_IDS_MAX]
    del stored.request_ids[: len(many)]
    return [Delete(REQUESTS + request_id) for request_id in many]


class Request:
    """A mutating call that may be repeated (AIP-155).

    Whoever is of some tenants has ids of its own: what others have called theirs is neither told to it nor in its way.
    `told` is the id as the caller said it, and `id` the one under which the call is kept.
    """

    def __init__(self, method: str, request_id: str, message: bytes, whose: str = "") -> None:
        self.method, self.told, self.whose = method, request_id, whose
        self.id = f"{whose}/{request_id}" if whose and request_id else request_id
        self.older = (
            request_id if whose and method == CREATE else ""
        )  # where versions before kept what may not be twice
        self.fingerprint = hashlib.blake2b(message, digest_size=16).digest()

    @property
    def unused(self) -> list[Compare]:
        """What holds as long as no such call was served."""
        return [Compare(REQUESTS + one, 0) for one in (self.id, self.older) if one]

    def put(self, thing_id: str) -> Put:
        """What is written with the change, so that a repeat is known."""
        stored = records_pb2.StoredRequest(
            schema_version=SCHEMA_VERSION, method=self.method, fingerprint=self.fingerprint, id=thing_id
        )
        stored.time.FromNanoseconds(time.time_ns())
        return Put(REQUESTS + self.id, stored.SerializeToString())


def request_of(method: str, request_id: str, message: Message) -> Request:
    """Read a call's request id.

    Raises:
        Problem: INVALID_ARGUMENT, where it can be none.
    """
    if len(request_id) > REQUEST_ID_LENGTH_MAX or not request_id.isprintable() or "/" in request_id:
        raise errors.invalid(
            [Violation("request_id", f"must be printable, without slashes and at most {REQUEST_ID_LENGTH_MAX} long")]
        )
    whose = caller().name if caller().tenants is not None else ""
    return Request(method, request_id, message.SerializeToString(deterministic=True), whose)
