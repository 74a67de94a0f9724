"""Someone who watches all jobs of a mesh in trouble: who comes again after each loss hears of every end."""

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

REPORTED_SECONDS_MAX = 60.0  # after nothing is wrong any more; a stream that was cut off goes on after some of them


@dataclass
class EndWatcher:
    """Watches, and knows whose end it has yet to hear of, since when. `jobs` are the calls of one who sees all."""

    call_log: CallLog
    jobs: Any
    awaited: dict[str, float] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)  # that were heard of

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                self.call_log.refusals[error.code().name] += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self) -> None:
        stream = self.jobs.WatchJobs(pb.WatchJobsRequest())
        try:
            async for told in stream:
                if told is None:
                    return  # it was garbled, and what it said is to be asked for
                if told.HasField("job"):
                    self.observe(told.job)
        finally:
            stream.cancel()

    def observe(self, job: job_pb2.Job) -> None:
        """Take in what was told of a job."""
        if specs.PHASES.from_wire(job.phase) in ENDED:
            self._ended.add(job.id)
            self.awaited.pop(job.id, None)

    def expect(self, ended: Iterable[str]) -> None:
        """Know of jobs that have ended, as somebody else was told."""
        for job_id in ended:
            if job_id not in self._ended:
                self.awaited.setdefault(job_id, clock())

    def poll(self, there: Container[str], *, quiescing: bool) -> None:
        """Wait no more for what is in no list, for it is in no picture either; tell what took too long."""
        for job_id, since in list(self.awaited.items()):
            if job_id not in there:
                del self.awaited[job_id]
            elif not quiescing:
                self.awaited[job_id] = clock()
            elif clock() - since > REPORTED_SECONDS_MAX:
                del self.awaited[job_id]
                self.call_log.record(wrong=f"nothing of the end of {job_id}, who watched")
