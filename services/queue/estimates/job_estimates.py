"""Requests estimates of waiting jobs, once per wait; without an answer a job is unpredictable."""

from __future__ import annotations

import time
from functools import lru_cache

import grpc
import structlog

from cotenant.codec import errors
from cotenant.rpc.slices import Slices
from cotenant.services.queue.estimates.observation_sink import query_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import predictor_service_pb2_grpc

log = structlog.get_logger()

ESTIMATES_MAX = 250  # queries per call, which the predictor answers without a pause
TAKEN_MAX = 5_000  # jobs that these queries stand for
DEADLINE_SECONDS = 2.0
KEPT_MAX = 1_024


class JobEstimates:
    """Requests estimates of jobs before they are ordered."""

    def __init__(self, state: State, predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub) -> None:
        self._state, self._predictor = state, predictor
        self._away = False

    async def request_missing(self) -> None:
        """Request missing estimates in one call; the rest follow next time.

        Jobs of one array that have never run have equal queries: one query stands for all of them.
        """
        asked, slices = dict[str, list[Record]](), Slices()
        request, now = predictor_pb2.EstimateRequest(), time.time()
        for record in self._state.take_unestimated(TAKEN_MAX):
            task = record.spec.array_task
            key = task.array_id if task and not record.attempt_number else record.id
            if key not in asked:
                if len(asked) == ESTIMATES_MAX:
                    self._state.unestimated[record.id] = None
                    continue
                request.queries.append(query_of(record, self._state.shapes, now))
            asked.setdefault(key, []).append(record)
            await slices.step()
        if not asked:
            return
        try:
            response = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not self._away:
                log.warning("predictor_unavailable", error=errors.from_error(error).message)
            self._away = True
            self._state.unestimated.update(dict.fromkeys(record.id for alike in asked.values() for record in alike))
            return
        self._away = False
        for alike, estimate in zip(asked.values(), response.estimates, strict=True):
            known = _interned(estimate.SerializeToString())
            for record in alike:
                record.set_estimate(known, now)
                self._state.estimate(record)
                await slices.step()

    async def request_estimate(self, record: Record) -> None:
        """Request the estimate of one job that is not in the table."""
        now = time.time()
        request = predictor_pb2.EstimateRequest(queries=[query_of(record, self._state.shapes, now)])
        try:
            response = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("predictor_unavailable", error=errors.from_error(error).message)
            return
        record.set_estimate(response.estimates[0], now)


@lru_cache(KEPT_MAX)
def _interned(packed: bytes) -> predictor_pb2.Estimate:
    """Return one message for equal estimates: many jobs of an array, or with nothing known, have equal ones."""
    return predictor_pb2.Estimate.FromString(packed)
