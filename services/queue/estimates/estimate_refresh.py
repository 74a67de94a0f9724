"""Estimates of running jobs, asked for anew as they come to be known better.

An estimate is renewed when the first window of a job's rate under what it holds has been seen, then whenever the job
has run for a tenth longer, and when a profile of its kind is over. Jobs are asked about together, so many at most in a
second: whatever happens, this costs little. Placement is told where cores could follow from what is new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import grpc
import structlog

from cotenant import telemetry
from cotenant.codec import errors, specs
from cotenant.codec.estimates import about_cores
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.limits import ADVICE_MAX
from cotenant.services.queue.estimates.observation_sink import query_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, note
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc, predictor_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

LONGER = 0.1  # of what a job has run: so much later it is asked about again
SECONDS_MIN, SECONDS_MAX = 30.0, 600.0  # but no sooner, and no later than that
GATHER_SECONDS = 0.05
BATCH_MAX = 200
BATCH_SECONDS = 1.0  # from one batch to the next
CALL_SECONDS = 5.0

RENEWED = telemetry.counter("cotenant.queue.estimates_renewed", "{job}", "Estimates of running jobs, asked for anew.")


class Renewals:
    """Jobs that are to be estimated anew, and what of it placement has to be told."""

    def __init__(
        self,
        state: State,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
    ) -> None:
        self.state, self.placement, self.predictor = state, placement, predictor
        self._wanted: dict[str, None] = {}
        self._profiled: set[str] = set()  # jobs in whose story is to stand that their profile has ended
        self._untold: dict[str, None] = {}  # jobs whose estimates placement has to be told
        self._wake = asyncio.Event()

    def want(self, job_ids: Iterable[str], profiled: str = "") -> None:
        """Ask about some jobs anew; of one the profile has ended."""
        self._wanted.update(dict.fromkeys(job_ids))
        if profiled:
            self._profiled.add(profiled)
        self._wake.set()

    def seen(self, record: Record, now: float) -> None:
        """Something was observed of a running job: it may be time to ask about it again."""
        under = record.attempt_number, record.job.attempt.epoch
        if record.renewed_under == under and now < record.renew_after:
            return
        ran = max(0.0, now - specs.seconds(record.job.attempt.start_time))
        record.renewed_under = under
        record.renew_after = now + min(SECONDS_MAX, max(SECONDS_MIN, LONGER * ran))
        self.want([record.id])

    async def run(self) -> None:
        """Ask and tell for ever."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            try:
                while self._wanted or self._untold:
                    await self._renew(list(self._wanted)[:BATCH_MAX])
                    await self._tell()
                    if self._wanted:
                        await asyncio.sleep(BATCH_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.info("renewal_delayed", error=errors.from_error(error).message)
                await asyncio.sleep(BATCH_SECONDS)
                self._wake.set()

    async def _renew(self, job_ids: list[str]) -> None:
        asked = [record for job_id in job_ids if (record := self._running(job_id))]
        if asked:
            request = predictor_pb2.EstimateRequest(queries=[query_of(record, self.state.shapes) for record in asked])
            response = await self.predictor.Estimate(request, timeout=CALL_SECONDS)
            now = time.time()
            for record, estimate in zip(asked, response.estimates, strict=True):
                self._take(record, estimate, now)
            RENEWED.add(len(asked))
        for job_id in job_ids:
            self._wanted.pop(job_id, None)
            self._profiled.discard(job_id)

    def _take(self, record: Record, estimate: predictor_pb2.Estimate, now: float) -> None:
        if record.estimate is None or about_cores(estimate) != about_cores(record.estimate):
            self._untold[record.id] = None
        record.expect(estimate, now)
        self.state.estimate(record)
        if record.id in self._profiled:
            note(record.stored, "profiled", estimate.source)
            self.state.wake()

    async def _tell(self) -> None:
        told = list(self._untold)[:ADVICE_MAX]
        news = [record for job_id in told if (record := self._running(job_id))]
        if news:
            response: placement_pb2.AdviseAttemptsResponse = await self.placement.AdviseAttempts(
                placement_pb2.AdviseAttemptsRequest(
                    advice=[
                        placement_pb2.Advice(job_id=one.id, number=one.attempt_number, estimate=one.estimate)
                        for one in news
                    ]
                ),
                timeout=CALL_SECONDS,
            )
            for why in response.refused:
                log.info("advice_refused", why=why)
        for job_id in told:
            self._untold.pop(job_id, None)

    def _running(self, job_id: str) -> Record | None:
        record = self.state.records.get(job_id)
        runs = record and record.phase is Phase.RUNNING and not record.job.attempt.pre_run
        return record if runs else None
