"""Tells the predictor what was seen: rates as they come, run times at the end."""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from cotenant.rpc import errors, translate
from cotenant.services.queue.records import Record
from cotenant.v1 import job_pb2, predictor_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

BATCH_SECONDS = 0.5
WAITING_MAX = 10_000
RATE_SECONDS = 10.0


class Observations:
    """Collects what was seen and sends it in batches. Losing some is no harm: they only make estimates better."""

    def __init__(self, predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub) -> None:
        self._predictor = predictor
        self._waiting: list[predictor_pb2.Observation] = []
        self._last: dict[str, float] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_SECONDS)
            self._wake.clear()
            batch, self._waiting = self._waiting[:1000], self._waiting[1000:]
            try:
                response = await self._predictor.Observe(predictor_pb2.ObserveRequest(observations=batch))
                for why in response.rejected:
                    log.info("observation_rejected", why=why)
            except grpc.aio.AioRpcError as error:
                log.info("observations_lost", count=len(batch), error=errors.from_error(error).message)
            if self._waiting:
                self._wake.set()

    def progressed(self, record: Record) -> None:
        """A job told its rate, its loss or the time of a batch; one window in ten seconds is enough."""
        now, progress = time.time(), record.job.progress
        last = self._last.get(record.id, 0.0)
        tells = progress.rate_per_second > 0 or progress.HasField("loss") or progress.batch_size > 0
        if not tells or now - last < RATE_SECONDS:
            return
        self._last[record.id] = now
        seen = self._observation(record, record.job.attempt)
        if progress.rate_per_second > 0 or progress.HasField("loss"):
            seen.step = progress.step
        if progress.rate_per_second > 0:
            seen.rate_per_second = progress.rate_per_second
            seen.window.FromNanoseconds(int(RATE_SECONDS * 1e9))
        if progress.HasField("loss"):
            seen.loss = progress.loss
        if progress.batch_size > 0:
            seen.batch_size = progress.batch_size
            seen.batch_time.CopyFrom(progress.batch_time)
        seen.time.CopyFrom(progress.update_time)
        self._add(seen)

    def ended(self, record: Record, attempt: job_pb2.Attempt) -> None:
        """A job ended: its run time tells about the next one like it."""
        self._last.pop(record.id, None)
        if not record.phase.ended or not attempt.HasField("start_time"):
            return
        seen = self._observation(record, attempt)
        seen.run_time.CopyFrom(record.job.run_time)
        seen.succeeded = record.job.phase == job_pb2.JOB_PHASE_SUCCEEDED
        seen.time.CopyFrom(attempt.end_time)
        self._add(seen)

    def _observation(self, record: Record, attempt: job_pb2.Attempt) -> predictor_pb2.Observation:
        tasks = [task for allocation in attempt.allocations for task in allocation.tasks]
        seen = predictor_pb2.Observation(
            job_id=record.id,
            number=attempt.number,
            spec=translate.spec_to_wire(record.spec),
            submitter=record.job.submitter,
            submit_time=record.job.create_time,
        )
        seen.allocation.cores = max((len(task.core_ids) for task in tasks), default=0)
        seen.allocation.gpu_milli = max((sum(share.milli for share in task.gpus) for task in tasks), default=0)
        seen.allocation.nodes = len(attempt.allocations)
        return seen

    def _add(self, seen: predictor_pb2.Observation) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(seen)
            self._wake.set()
