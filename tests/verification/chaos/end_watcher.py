"""A watcher of all jobs that reconnects after each loss, and must receive the end of every job."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from tests.verification.chaos.call_log import RETRY_SECONDS, CallLog

from cotenant.codec import specs
from cotenant.core.model.lifecycle import ENDED
from cotenant.history.recording import clock
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

REPORTED_SECONDS_MAX = 60.0  # after all faults; a broken stream may take part of this to resume


@dataclass
class EndWatcher:
    """Watches jobs, and tracks ends it has yet to receive. `jobs` are the calls of a user who sees all jobs."""

    call_log: CallLog
    jobs: Any
    awaited: dict[str, float] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)  # ends received

    async def run(self) -> None:
        """Watch forever."""
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                self.call_log.refusals[error.code().name] += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self) -> None:
        stream = self.jobs.WatchJobs(pb.WatchJobsRequest())
        try:
            async for update in stream:
                if update is None:
                    return  # it was garbled: resume to get it again
                for job in update.jobs:
                    self.observe(job)
        finally:
            stream.cancel()

    def observe(self, job: job_pb2.Job) -> None:
        """Process a job from the watch."""
        if specs.PHASES.from_wire(job.phase) in ENDED:
            self._ended.add(job.id)
            self.awaited.pop(job.id, None)

    def expect(self, ended: Iterable[str]) -> None:
        """Expect the ends of jobs that another client has seen."""
        for job_id in ended:
            if job_id not in self._ended:
                self.awaited.setdefault(job_id, clock())

    def poll(self, there: Container[str], *, quiescing: bool) -> None:
        """Drop jobs that are no longer listed (snapshots omit them too); record ends that are overdue."""
        for job_id, since in list(self.awaited.items()):
            if job_id not in there:
                del self.awaited[job_id]
            elif not quiescing:
                self.awaited[job_id] = clock()
            elif clock() - since > REPORTED_SECONDS_MAX:
                del self.awaited[job_id]
                self.call_log.record(wrong=f"no end of {job_id} on the watch")
