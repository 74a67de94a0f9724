"""Tenants' users who try to read and cancel other tenants' jobs: they must not see any."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import grpc.aio
from tests.verification.chaos.call_log import PAGE, PAUSE_SECONDS, CallLog

from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

BETWEEN_SECONDS, CALL_SECONDS_MAX, WATCH_SECONDS = (0.2, 1.5), 3.0, 1.0
NOT_FOUND_CODES = frozenset(  # no such job, or none known here because another queue has archived it
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
)


@dataclass
class IsolationProbe:
    """Reads, lists, watches and cancels as each user in turn. `jobs` are the stubs by tenant."""

    call_log: CallLog
    jobs: Mapping[str, Any]
    known: Mapping[str, str]  # tenant by submitted job

    async def run(self) -> None:
        """Probe from time to time."""
        rng = Random(f"{self.call_log.name} prying")
        tenants = sorted(self.jobs)
        while tenants:
            await self.call_log.pause(BETWEEN_SECONDS, rng)
            await asyncio.sleep(PAUSE_SECONDS)
            try:
                await self._probe(rng.choice(tenants), rng)
            except grpc.aio.AioRpcError as error:
                self.call_log.refusals[error.code().name] += 1

    async def _probe(self, tenant: str, rng: Random) -> None:
        jobs, others = self.jobs[tenant], [one for one, owner in self.known.items() if owner != tenant]
        match rng.choice(("list", "watch", "get", "cancel", "get", "cancel")):
            case "list":
                answer = await jobs.ListJobs(pb.ListJobsRequest(page_size=PAGE), timeout=CALL_SECONDS_MAX)
                self._check_visible(tenant, answer.jobs if answer else ())
            case "watch":
                await self._watch(tenant)
            case "get" if others:
                one = rng.choice(others)
                await self._ask(tenant, jobs.GetJob, pb.GetJobRequest(id=one))
            case "cancel" if others:
                one = rng.choice(others)
                await self._ask(tenant, jobs.CancelJob, pb.CancelJobRequest(id=one, request_id=self.call_log.request()))

    async def _ask(self, tenant: str, method: Any, request: Any) -> None:
        """Ask for another tenant's job, which must not be found."""
        try:
            answer = await method(request, timeout=CALL_SECONDS_MAX)
        except grpc.aio.AioRpcError as error:
            if error.code() not in NOT_FOUND_CODES:
                raise
            self.call_log.record(pried=tenant)
        else:
            if answer is not None:
                self.call_log.record(
                    wrong=f"an answer to {type(request).__name__} of {request.id} as a user of {tenant}"
                )

    async def _watch(self, tenant: str) -> None:
        stream = self.jobs[tenant].WatchJobs(pb.WatchJobsRequest(), timeout=WATCH_SECONDS)
        try:
            async for shown in stream:
                self._check_visible(tenant, shown.jobs if shown else ())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            stream.cancel()

    def _check_visible(self, tenant: str, shown: Iterable[job_pb2.Job]) -> None:
        self.call_log.record(pried=tenant)
        for job in shown:
            if job.spec.tenant != tenant:
                self.call_log.record(wrong=f"of {job.id} of {job.spec.tenant}, as a user of {tenant}")
