"""Reads that a follower of the queue serves itself: ended jobs, whose stored records are final.

Calls about live jobs go to the leader: only the leader knows why a job waits and how far it has come. So do calls of
principals that are restricted to some tenants. Records are read as they arrive, a few at a time. While some are still
unread, or the store cannot be watched, the follower forwards every call. When it becomes leader it hands its records
over, so that they need not be read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError

from cotenant.codec import specs
from cotenant.leadership.replica import REVISION
from cotenant.leadership.store_cache import StoreCache
from cotenant.rpc.slices import Slices
from cotenant.security.identity import caller
from cotenant.services.queue.api.failure_summary import FailureSummary
from cotenant.services.queue.api.job_pages import JobListing
from cotenant.services.queue.jobs.job_store import ARRAYS, JOBS
from cotenant.services.queue.jobs.job_views import is_basic, omit_large, view_violations
from cotenant.services.queue.jobs.queue_state import State, stored_message
from cotenant.services.queue.jobs.transitions import Record, load_record
from cotenant.services.queue.jobs.visibility import View
from cotenant.store import schema
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

READ_AT_ONCE = 50  # records, about 2 ms


class QueueReader:
    """Reads ended jobs from a follower's store cache."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._nothing = State()  # a view that sees all tenants does not look at it
        self._cache: StoreCache | None = None
        self._pending: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._ended: list[str] | None = None  # sorted; None after a change
        self._answers = {
            "/cotenant.v1.JobService/GetJob": self._get,
            "/cotenant.v1.JobService/ListJobs": self._list,
            "/cotenant.v1.JobService/SummarizeFailures": self._summarize,
        }

    serves = False  # without a leader only ended jobs can be read

    # Records -------------------------------------------------------------------------------------------------

    def take(self, cache: StoreCache, keys: Iterable[str]) -> None:
        """Note which keys have changed."""
        self._cache = cache
        for key in keys:
            if key.startswith(JOBS):
                self._pending[key] = None
        self._wake.set()

    async def run(self) -> None:
        """Read changed records until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                for key in [key for key, _ in zip(self._pending, range(READ_AT_ONCE), strict=False)]:
                    del self._pending[key]
                    self._read(key)
                await asyncio.sleep(0)

    def _read(self, key: str) -> None:
        assert self._cache
        job_id, entry = key.removeprefix(JOBS), self._cache.entries.get(key)
        before = self.records.pop(job_id, None)
        if entry is not None:
            with suppress(schema.NewerSchema, schema.BadRecord):  # the leader reports it
                self.records[job_id] = load_record(entry)
        after = self.records.get(job_id)
        if (before is not None and before.phase.ended) or (after is not None and after.phase.ended):
            self._ended = None

    # Calls ---------------------------------------------------------------------------------------------------

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Return the answer to a call; None if the leader must answer. A trailer carries the revision that was read."""
        answers = self._answers.get(path)
        if answers is None or self._pending or self._cache is None or not self._cache.following:
            return None
        if caller().tenants is not None:
            return None  # only the leader knows which tenants belong to which
        try:
            answer = await answers(request)
        except DecodeError:
            return None  # the leader rejects it
        if answer is None:
            return None
        context.set_trailing_metadata(((REVISION, str(self._cache.revision)),))
        return bytes(answer.SerializeToString())

    async def _get(self, request: bytes) -> Any:
        asked = pb.GetJobRequest.FromString(request)
        record = self.records.get(asked.id)
        if record is None or not self._seen(record) or view_violations(asked.view):
            return None
        return pb.GetJobResponse(job=_message(record, basic=is_basic(asked.view, unset=pb.JOB_VIEW_FULL)))

    async def _list(self, request: bytes) -> Any:
        asked = pb.ListJobsRequest.FromString(request)
        phases = asked.filter.phases
        known = job_pb2.JobPhase.values()
        if not phases or not all(one in known and _ends(one) for one in phases):
            return None
        listing, ids, slices = JobListing(asked, View(self._nothing)), list[str](), Slices()
        for job_id in self._ended_ids():
            record = self.records.get(job_id)  # None: deleted in between
            if record is not None and listing.filter.matches(record):
                ids.append(job_id)
            await slices.step()
        return await listing.page(ids, self.records, lambda record: _message(record, basic=listing.basic))

    def _ended_ids(self) -> Sequence[str]:
        if self._ended is None:
            self._ended = sorted(job_id for job_id, record in self.records.items() if self._seen(record))
        return self._ended

    def _seen(self, record: Record) -> bool:
        """Return whether a job has ended and is committed: tasks of an array are, once the array itself is written."""
        task = record.spec.array_task
        assert self._cache
        return record.phase.ended and (task is None or ARRAYS + task.array_id in self._cache.entries)

    async def _summarize(self, request: bytes) -> Any:
        jobs = (record.job for record in self.records.values())
        return FailureSummary(pb.SummarizeFailuresRequest.FromString(request)).add(jobs).response


def _message(record: Record, *, basic: bool) -> job_pb2.Job:
    """Return an ended job as callers see it."""
    job = stored_message(record)
    if basic:
        omit_large(job)
    return job


def _ends(phase: job_pb2.JobPhase.ValueType) -> bool:
    return phase != job_pb2.JOB_PHASE_UNSPECIFIED and specs.PHASES.from_wire(phase).ended
