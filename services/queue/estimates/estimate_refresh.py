"""Refreshes the estimates of running jobs as more is observed of them.

An estimate is refreshed after the first rate window under the present allocation, then whenever the job has run for
another tenth of its time, and when a profile of its job class ends; also when the job's own rate begins again or is
known much better, and while a job has stopped reporting steps. Jobs are batched, and batches are rate-limited, so
the cost is always small. Placement is sent the estimates that may change a job's cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import grpc
import structlog

from cotenant import telemetry
from cotenant.codec import errors, specs
from cotenant.codec.estimates import core_relevant_parts
from cotenant.codec.job_events import EventKind
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.limits import ADVICE_MAX
from cotenant.core.model.refusal import plural
from cotenant.core.prediction.own_rate import expiry_seconds, grace_seconds
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.services.queue.estimates.observation_sink import query_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, add_event
from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import predictor_service_pb2_grpc

log = structlog.get_logger()

LONGER = 0.1  # relative run time between two refreshes
SECONDS_MIN, SECONDS_MAX = 30.0, 600.0  # but within these bounds
GATHER_SECONDS = 0.05
BATCH_MAX = 200
BATCH_SECONDS = 1.0  # between two batches
CALL_SECONDS = 5.0
SILENCE_POLL_SECONDS = 15.0  # between two looks at jobs that have stopped reporting

REFRESHED = telemetry.counter("cotenant.queue.estimates_refreshed", "{job}", "Refreshed estimates of running jobs.")


class EstimateRefresh:
    """Jobs whose estimates are to be refreshed, and estimates to be sent to placement."""

    def __init__(
        self,
        state: State,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
    ) -> None:
        self.state, self.placement, self.predictor = state, placement, predictor
        self._wanted: dict[str, None] = {}
        self._profiled: set[str] = set()  # jobs whose event log gets an entry for the ended profile
        self._expired: set[str] = set()  # jobs whose own rate was too old at the last look
        self._unreported: dict[str, None] = {}  # jobs whose estimates placement does not know yet
        self._wake = asyncio.Event()
        state.events.observed.subscribe(self.observed)

    def request(self, job_ids: Iterable[str], profiled: str = "") -> None:
        """Request new estimates; `profiled` names the job whose profile has ended."""
        self._wanted.update(dict.fromkeys(job_ids))
        if profiled:
            self._profiled.add(profiled)
        self._wake.set()

    def observed(self, record: Record, now: float) -> None:
        """Request a new estimate of a running job if its time has come, after an observation."""
        version = record.rate_track.version if record.rate_track else ()
        under = record.attempt_number, record.job.attempt.epoch, *version
        if record.refreshed_under == under and now < record.refresh_after:
            return
        ran = max(0.0, now - specs.seconds(record.job.attempt.start_time))
        record.refreshed_under = under
        record.refresh_after = now + min(SECONDS_MAX, max(SECONDS_MIN, LONGER * ran))
        self.request([record.id])

    async def run(self) -> None:
        """Refresh estimates and send them to placement, forever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_POLL_SECONDS):
                    await self._wake.wait()
            self.request_silent(time.time())
            await asyncio.sleep(GATHER_SECONDS)
            self._wake.clear()
            try:
                while self._wanted or self._unreported:
                    await self._refresh(list(self._wanted)[:BATCH_MAX])
                    await self._tell()
                    if self._wanted:
                        await asyncio.sleep(BATCH_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.info("estimate_refresh_delayed", error=errors.from_error(error).message)
                await asyncio.sleep(BATCH_SECONDS)
                self._wake.set()

    def request_silent(self, now: float) -> None:
        """Request new estimates of jobs that have stopped reporting steps, until their rate has expired."""
        expired = set()
        for record in self.state.held.values():
            measured = record.rate_track.measured(now) if record.rate_track else None
            if measured is None or measured.silent_seconds <= grace_seconds(measured):
                continue
            if measured.silent_seconds > expiry_seconds(measured):
                expired.add(record.id)
            if record.id not in self._expired:
                self.request([record.id])
        self._expired = expired

    async def _refresh(self, job_ids: list[str]) -> None:
        asked = [record for job_id in job_ids if (record := self._running(job_id))]
        if asked:
            queries = [query_of(record, self.state.shapes, time.time()) for record in asked]
            request = predictor_pb2.EstimateRequest(queries=queries)
            response = await self.predictor.Estimate(request, timeout=CALL_SECONDS)
            now = time.time()
            for record, estimate in zip(asked, response.estimates, strict=True):
                self._take(record, estimate, now)
            REFRESHED.add(len(asked))
        for job_id in job_ids:
            self._wanted.pop(job_id, None)
            self._profiled.discard(job_id)

    def _take(self, record: Record, estimate: predictor_pb2.Estimate, now: float) -> None:
        if record.estimate is None or core_relevant_parts(estimate) != core_relevant_parts(record.estimate):
            self._unreported[record.id] = None
        record.set_estimate(estimate, now)
        self.state.estimate(record)
        if record.id in self._profiled:
            add_event(record.stored, EventKind.PROFILED, profile_result(estimate))
            self.state.events.changed()

    async def _tell(self) -> None:
        job_ids = list(self._unreported)[:ADVICE_MAX]
        records = [record for job_id in job_ids if (record := self._running(job_id))]
        if records:
            response: placement_pb2.AdviseAttemptsResponse = await self.placement.AdviseAttempts(
                placement_pb2.AdviseAttemptsRequest(
                    advice=[
                        placement_pb2.Advice(job_id=one.id, number=one.attempt_number, estimate=one.estimate)
                        for one in records
                    ]
                ),
                timeout=CALL_SECONDS,
            )
            for why in response.refused:
                log.info("advice_refused", why=why)
        for job_id in job_ids:
            self._unreported.pop(job_id, None)

    def _running(self, job_id: str) -> Record | None:
        record = self.state.records.get(job_id)
        runs = record and record.phase is Phase.RUNNING and not record.job.attempt.pre_run
        return record if runs else None


def profile_result(estimate: predictor_pb2.Estimate) -> str:
    """Return what is known of a job after its profile.

    >>> profile_result(predictor_pb2.Estimate(cores_useful=6, source="history: no similar job has succeeded yet"))
    'up to 6 cores per replica help; its run time is still unknown'
    """
    cores = f"up to {plural(estimate.cores_useful, 'core')} per replica help" if estimate.cores_useful else ""
    run_time = estimate.source if estimate.predictable else "its run time is still unknown"
    return "; ".join(filter(None, (cores, run_time)))
