"""The servicer of schedules, and what happens at their due times."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import errors, specs
from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job import JobSpec
from cotenant.core.model.notification import redacted
from cotenant.core.model.recurrence import COUNTED_MAX
from cotenant.core.model.validation import Violation
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.security.identity import Identity, caller, set_caller
from cotenant.security.permissions import Role, Scope
from cotenant.services.queue.api.submission import Submission
from cotenant.services.queue.jobs.job_ids import JobIdGenerator
from cotenant.services.queue.jobs.job_store import CREATE, REQUESTS, JobStore, idempotency_key_of
from cotenant.services.queue.jobs.schedule_book import (
    SCHEDULES,
    ScheduleRecord,
    load_schedule,
    read_schedule,
    run_of,
)
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Compare, Conflict, Delete, Put, StoreUnavailable
from cotenant.v1 import job_service_pb2 as job_pb
from cotenant.v1 import schedule_service_pb2 as pb
from cotenant.v1 import schedule_service_pb2_grpc
from cotenant.v1.job_pb2 import JobSpec as JobMessage

log = structlog.get_logger()

SCHEDULES_OF_TENANT_MAX = 200
LOOK_SECONDS_MAX = 5.0  # the wall clock may be set meanwhile
RETRY_SECONDS = 2.0
LATER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})  # the due time stays
FIXED_TIMES = ("begin_time", "deadline")
Cancel = Callable[[Record], Awaitable[None]]
T = TypeVar("T")


class ScheduleServicer(schedule_service_pb2_grpc.ScheduleServiceServicer):
    """Keeps schedules, and submits their jobs; `cancel` cancels a job."""

    def __init__(self, job_store: JobStore, submission: Submission, cancel: Cancel) -> None:
        self._job_store, self._submission, self._cancel = job_store, submission, cancel
        self._state, self._book = job_store.state, job_store.state.schedules
        self._ids = JobIdGenerator()
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Any) -> pb.CreateScheduleResponse:
        """Check a schedule and its job, and store it."""
        key = idempotency_key_of("CreateSchedule", request.request_id, request.schedule)
        made_id = _id_of(key.id) if request.request_id else self._ids.new()
        record = _new_record(request.schedule, made_id, key.fingerprint)
        checked = job_pb.CreateJobRequest(spec=record.schedule.spec, validate_only=True)
        accepted = await self._submission.submit(checked, CREATE)  # with defaults, and the tenant
        if not request.validate_only:
            record.stored.schedule.spec.tenant = accepted.spec.tenant
            async with self._writing:
                record = await self._create(read_schedule(record.stored, 0))
            log.info("schedule_created", schedule=made_id, tenant=accepted.spec.tenant, every=request.schedule.every)
        return pb.CreateScheduleResponse(schedule=self._message(record))

    async def GetSchedule(self, request: pb.GetScheduleRequest, context: Any) -> pb.GetScheduleResponse:
        """Return a schedule."""
        return pb.GetScheduleResponse(schedule=self._message(self._find(request.id)))

    async def ListSchedules(self, request: pb.ListSchedulesRequest, context: Any) -> pb.ListSchedulesResponse:
        """Return a page of schedules."""
        view, records = View(self._state), self._book.records
        asked = PageRequest.read(request.page_size, request.page_token, "schedules")
        ids = sorted(one for one, record in records.items() if view.sees_tenant(record.spec.tenant))
        page = await page_of_messages(ids, lambda one: self._message(records[one]) if one in records else None, asked)
        return pb.ListSchedulesResponse(schedules=page.items, next_page_token=page.next_token)

    async def PauseSchedule(self, request: pb.PauseScheduleRequest, context: Any) -> pb.PauseScheduleResponse:
        """Pause a schedule."""
        return pb.PauseScheduleResponse(schedule=self._message(await self._set_paused(request.id, paused=True)))

    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest, context: Any) -> pb.ResumeScheduleResponse:
        """Resume a schedule from now on."""
        return pb.ResumeScheduleResponse(schedule=self._message(await self._set_paused(request.id, paused=False)))

    async def RunSchedule(self, request: pb.RunScheduleRequest, context: Any) -> pb.RunScheduleResponse:
        """Submit the job of a schedule now."""
        record = self._find(request.id)
        suffix = f"now-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        known = f"schedule.{request.id}.now.{_id_of(request.request_id)}" if request.request_id else ""
        made = await self._as_submitter(record, self._run_now(run_of(record, suffix), known))
        return pb.RunScheduleResponse(job=View(self._state).message(made))

    async def DeleteSchedule(self, request: pb.DeleteScheduleRequest, context: Any) -> pb.DeleteScheduleResponse:
        """Delete a schedule."""
        async with self._writing:
            record = self._find(request.id)
            key = SCHEDULES + request.id
            done = await self._job_store.store.transact([Compare(key, record.revision)], [Delete(key)])
            await self._check_committed(request.id, done)
            self._book.remove(request.id)
        log.info("schedule_deleted", schedule=request.id)
        return pb.DeleteScheduleResponse()

    # Due times -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Submit jobs at the due times, forever."""
        while True:
            self._changed.clear()
            retry = False
            for record in self._book.due(time.time()):
                try:
                    await self._handle(record, time.time())
                except (StoreUnavailable, errors.Problem) as error:  # the due time stays
                    log.warning("schedule_delayed", schedule=record.schedule.id, error=str(error))
                    retry = True
            left = RETRY_SECONDS if retry else self._book.next_seconds() - time.time()
            try:
                async with asyncio.timeout(min(LOOK_SECONDS_MAX, max(0.0, left))):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _handle(self, record: ScheduleRecord, now: float) -> None:
        """Submit the job of the last due time until now, and store that all of them are handled."""
        due, count = record.recurrence.last_until(record.handled_seconds, now)
        if not count:
            return
        try:
            job_id, result = await self._as_submitter(record, self._run(record, due))
        except errors.Problem as problem:
            if problem.code in LATER:
                raise
            job_id, result = "", f"not submitted: {problem.message}"
        if count > 1:
            several = f"{count}" if count < COUNTED_MAX else f"at least {count}"
            result = f"{result}; this run stands for {several} due times, which passed while nothing was submitted"
        await self._store(record, due, job_id, result)
        log.info("schedule_ran", schedule=record.schedule.id, due=due, due_times=count, job=job_id, result=result)

    async def _run(self, record: ScheduleRecord, due: float) -> tuple[str, str]:
        """Submit the job of a due time by the overlap rule; return its id and what was done.

        The request id follows from the schedule and the time, so the same due time never submits a second job.
        """
        spec = run_of(record, f"{datetime.fromtimestamp(due, UTC):%Y%m%dT%H%M%SZ}")
        request_id = f"schedule.{record.schedule.id}.{due:.0f}"
        if known := await self._known(request_id):
            return known, "submitted"
        earlier = self._state.records.get(record.schedule.last_job_id)
        if earlier is None or earlier.phase.ended:
            return (await self._submit(spec, request_id)).id, "submitted"
        if record.schedule.overlap == pb.OVERLAP_RULE_QUEUE:
            made = await self._submit(_after(spec, earlier.id), request_id)
            return made.id, f"submitted, and waits until {earlier.id} has ended"
        if record.schedule.overlap == pb.OVERLAP_RULE_REPLACE:
            await self._cancel(earlier)
            made = await self._submit(_after(spec, earlier.id), request_id)
            return made.id, f"submitted; {earlier.id} was cancelled"
        return "", f"skipped: {earlier.id} has not ended"

    async def _run_now(self, spec: JobSpec, request_id: str) -> Record:
        """Submit a job now, unless an earlier call with this request id did; it may have been in another second."""
        made = await self._known(request_id) if request_id else ""
        return self._state.records.get(made) or await self._submit(spec, request_id)

    async def _known(self, request_id: str) -> str:
        """Return the id of the job that was submitted for the same due time, also by another queue; "" if none was."""
        key = REQUESTS + idempotency_key_of(CREATE, request_id, JobMessage()).id
        entry = await self._job_store.store.get(key)
        return schema.read(records_pb2.StoredRequest, entry).id if entry else ""

    async def _submit(self, spec: JobSpec, request_id: str) -> Record:
        return await self._submission.submit(
            job_pb.CreateJobRequest(spec=specs.spec_to_wire(spec), request_id=request_id), CREATE
        )

    @staticmethod
    async def _as_submitter(record: ScheduleRecord, work: Awaitable[T]) -> T:
        """Return the result of work that is done in the name of a schedule's submitter."""

        async def act() -> T:
            set_caller(
                Identity(record.schedule.submitter, frozenset({Role.USER}), frozenset({record.spec.tenant})),
                Scope.TENANT,
            )
            return await work

        return await asyncio.create_task(act())  # a context of its own

    # Records -------------------------------------------------------------------------------------------------

    async def _create(self, record: ScheduleRecord) -> ScheduleRecord:
        schedule_id = record.schedule.id
        if known := self._book.records.get(schedule_id):
            if known.stored.fingerprint == record.stored.fingerprint:
                return known
            raise errors.failed_precondition("REQUEST_ID_REUSED", "the request id was already used for another call")
        tenant = record.spec.tenant
        count = sum(one.spec.tenant == tenant for one in self._book.records.values())
        if count >= SCHEDULES_OF_TENANT_MAX:
            raise errors.failed_precondition(
                "TOO_MANY_SCHEDULES", f"tenant {tenant} has {count} schedules already; delete some first"
            )
        return await self._put(record.stored, 0)

    async def _set_paused(self, schedule_id: str, *, paused: bool) -> ScheduleRecord:
        async with self._writing:
            record = self._find(schedule_id)
            if record.schedule.paused == paused:
                return record
            stored = _copy(record)
            stored.schedule.paused = paused
            if not paused:
                stored.handled_time.FromNanoseconds(max(time.time_ns(), stored.handled_time.ToNanoseconds()))
            return await self._put(stored, record.revision)

    async def _store(self, record: ScheduleRecord, due: float, job_id: str, result: str) -> None:
        """Store what happened at a due time, unless the schedule was changed meanwhile: then its job is known again."""
        async with self._writing:
            if self._book.records.get(record.schedule.id) is not record:
                return
            stored = _copy(record)
            stored.handled_time.FromNanoseconds(round(due * 1e9))
            stored.schedule.last_time.FromNanoseconds(round(due * 1e9))
            stored.schedule.last_job_id = job_id or stored.schedule.last_job_id
            stored.schedule.last_result = result
            await self._put(stored, record.revision)

    async def _put(self, stored: records_pb2.StoredSchedule, revision: int) -> ScheduleRecord:
        key = SCHEDULES + stored.schedule.id
        result = await self._job_store.store.transact([Compare(key, revision)], [Put(key, stored.SerializeToString())])
        record = read_schedule(stored, await self._check_committed(stored.schedule.id, result))
        self._book.put(record)
        self._changed.set()
        return record

    async def _check_committed(self, schedule_id: str, result: Any) -> int:
        """Return the revision of a commit; after a conflict, which follows an unknown outcome, read the record again.

        Raises:
            Problem: it was a conflict.
        """
        if not isinstance(result, Conflict):
            return int(result.revision)
        entry = await self._job_store.store.get(SCHEDULES + schedule_id)
        if entry is None:
            self._book.remove(schedule_id)
        else:
            self._book.put(load_schedule(entry))
        raise errors.unavailable("the schedule was changed concurrently; retry the call", 0.1, "CONFLICT")

    def _find(self, schedule_id: str) -> ScheduleRecord:
        """Return a schedule that the caller may see (and change, if the call changes it).

        Raises:
            Problem: NOT_FOUND, or PERMISSION_DENIED for another submitter's schedule.
        """
        view, records = View(self._state), self._book.records
        record = records.get(schedule_id)
        if record is None or not view.sees_tenant(record.spec.tenant):
            near = [one for one, other in records.items() if view.sees_tenant(other.spec.tenant)]
            raise errors.not_found("schedule", schedule_id, near=near)
        view.require_owner(f"schedule {schedule_id}", record.schedule.submitter)
        return record

    def _message(self, record: ScheduleRecord) -> pb.Schedule:
        """Return a schedule as callers see it: with its next due time, and with the hosts of targets only."""
        message = pb.Schedule()
        message.CopyFrom(record.schedule)
        message.spec.notify[:] = map(redacted, record.schedule.spec.notify)
        due = record.due_seconds
        if due < math.inf:
            message.next_time.FromNanoseconds(round(due * 1e9))
        return message


def _new_record(asked: pb.Schedule, schedule_id: str, fingerprint: bytes) -> ScheduleRecord:
    """Return the record of a new schedule.

    Raises:
        Problem: INVALID_ARGUMENT, naming each bad field of the schedule itself.
    """
    now = Timestamp()
    now.FromNanoseconds(time.time_ns() // 1_000_000_000 * 1_000_000_000)
    schedule = pb.Schedule(
        id=schedule_id,
        spec=asked.spec,
        every=asked.every,
        time_zone=asked.time_zone,
        overlap=asked.overlap or pb.OVERLAP_RULE_SKIP,
        submitter=caller().name,
        create_time=now,
    )
    stored = records_pb2.StoredSchedule(
        schema_version=SCHEMA_VERSION, schedule=schedule, handled_time=now, fingerprint=fingerprint
    )
    wrong = [
        Violation(f"schedule.spec.{name}", "is a fixed time, and a schedule has many")
        for name in FIXED_TIMES
        if asked.spec.HasField(name)  # type: ignore[arg-type]  # names of its fields
    ]
    if schedule.overlap not in pb.OverlapRule.values():
        wrong.append(Violation("schedule.overlap", f"{schedule.overlap} is unknown; 1 skip, 2 queue, 3 replace"))
    try:
        record = read_schedule(stored, 0)
    except ValueError as error:
        field = "time_zone" if "time zone" in str(error) else "every"
        raise errors.invalid([Violation(f"schedule.{field}", str(error)), *wrong]) from None
    if wrong:
        raise errors.invalid(wrong)
    return record


def _after(spec: JobSpec, job_id: str) -> JobSpec:
    return replace(spec, dependencies=(*spec.dependencies, Dependency(job_id, Condition.AFTER)))


def _copy(record: ScheduleRecord) -> records_pb2.StoredSchedule:
    copy = records_pb2.StoredSchedule()
    copy.CopyFrom(record.stored)
    return copy


def _id_of(request_id: str) -> str:
    """Return an id that follows from a request id."""
    return hashlib.blake2b(request_id.encode(errors="replace"), digest_size=6).hexdigest()
