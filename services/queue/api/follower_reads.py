"""What a queue that follows answers itself: what has ended changes no more, so its record says all there is of it.

Jobs that live are asked of the leader, which alone knows why they wait and how far they have come; so are all jobs by
a caller who may see only those of some tenants. Records are read as they come, a few at a time; while some are still to
be read, or the store cannot be followed, the leader is asked too. A queue that begins to lead takes the records over,
and need not read them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError

from cotenant.codec import specs
from cotenant.leadership.replica import REVISION
from cotenant.leadership.store_cache import Mirror
from cotenant.rpc.paging import page_of
from cotenant.security.identity import caller
from cotenant.services.queue.api.failure_summary import Summary
from cotenant.services.queue.api.job_filter import Filter
from cotenant.services.queue.jobs.job_store import ARRAYS, JOBS
from cotenant.services.queue.jobs.queue_state import State, kept_message
from cotenant.services.queue.jobs.transitions import Record, loaded
from cotenant.services.queue.jobs.visibility import View
from cotenant.store import schema
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

READ_AT_ONCE = 50  # records, about 2 ms


class QueueReader:
    """The jobs of a mirror of the store."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._nothing = State()  # which a view that sees everything need not look at
        self._mirror: Mirror | None = None
        self._pending: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._ended: list[str] | None = None  # sorted; None where it is to be made anew
        self._answers = {
            "/cotenant.v1.JobService/GetJob": self._get,
            "/cotenant.v1.JobService/ListJobs": self._list,
            "/cotenant.v1.JobService/SummarizeFailures": self._summarize,
        }

    serves = False  # without a leader only what has ended can be told

    # What there is -------------------------------------------------------------------------------------------

    def take(self, mirror: Mirror, keys: Iterable[str]) -> None:
        """Hear of keys that have changed."""
        self._mirror = mirror
        for key in keys:
            if key.startswith(JOBS):
                self._pending[key] = None
        self._wake.set()

    async def run(self) -> None:
        """Read what is to be read, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                for key in [key for key, _ in zip(self._pending, range(READ_AT_ONCE), strict=False)]:
                    del self._pending[key]
                    self._read(key)
                await asyncio.sleep(0)

    def _read(self, key: str) -> None:
        assert self._mirror
        job_id, entry = key.removeprefix(JOBS), self._mirror.entries.get(key)
        before = self.records.pop(job_id, None)
        if entry is not None:
            with suppress(schema.NewerSchema, schema.BadRecord):  # whoever leads says so
                self.records[job_id] = loaded(entry)
        after = self.records.get(job_id)
        if (before is not None and before.phase.ended) or (after is not None and after.phase.ended):
            self._ended = None

    # What is asked -------------------------------------------------------------------------------------------

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Answer a call, or None where the leader is to be asked. The trailers tell which revision was seen."""
        answers = self._answers.get(path)
        if answers is None or self._pending or self._mirror is None or not self._mirror.following:
            return None
        if caller().tenants is not None:
            return None  # to whom a tenant belongs is for the leader to say
        try:
            answer = answers(request)
        except DecodeError:
            return None  # the leader says so
        if answer is None:
            return None
        context.set_trailing_metadata(((REVISION, str(self._mirror.revision)),))
        return bytes(answer.SerializeToString())

    def _get(self, request: bytes) -> Any:
        record = self.records.get(pb.GetJobRequest.FromString(request).id)
        return pb.GetJobResponse(job=kept_message(record)) if record and self._seen(record) else None

    def _list(self, request: bytes) -> Any:
        asked = pb.ListJobsRequest.FromString(request)
        phases = asked.filter.phases
        known = job_pb2.JobPhase.values()
        if asked.fold_arrays or not phases or not all(one in known and _ends(one) for one in phases):
            return None
        chosen = Filter(asked.filter, View(self._nothing))
        ids = [job_id for job_id in self._ended_ids() if chosen.takes(self.records[job_id])]
        page, token = page_of(ids, asked.page_size, asked.page_token, descending=True, scope=chosen.digest)
        jobs = [kept_message(self.records[job_id]) for job_id in page]
        return pb.ListJobsResponse(jobs=jobs, next_page_token=token, total_size=len(ids))

    def _ended_ids(self) -> Sequence[str]:
        if self._ended is None:
            self._ended = sorted(job_id for job_id, record in self.records.items() if self._seen(record))
        return self._ended

    def _seen(self, record: Record) -> bool:
        """Whether a job has ended and is somebody's: jobs of an array are, once the array itself is written."""
        task = record.spec.array_task
        assert self._mirror
        return record.phase.ended and (task is None or ARRAYS + task.array_id in self._mirror.entries)

    def _summarize(self, request: bytes) -> Any:
        jobs = (record.job for record in self.records.values())
        return Summary(pb.SummarizeFailuresRequest.FromString(request)).add(jobs).told


def _ends(phase: job_pb2.JobPhase.ValueType) -> bool:
    return phase != job_pb2.JOB_PHASE_UNSPECIFIED and specs.PHASES.from_wire(phase).ended
