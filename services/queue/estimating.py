"""Asks the predictor about jobs, each once while it waits; without an answer they are unpredictable."""

from __future__ import annotations

import asyncio
from functools import lru_cache

import grpc
import structlog

from cotenant.rpc import errors
from cotenant.services.queue.observations import query_of
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import predictor_service_pb2_grpc

log = structlog.get_logger()

ESTIMATES_MAX = 1000
DEADLINE_SECONDS = 2.0
AT_ONCE = 100  # between two looks at whether others need the queue
KEPT_MAX = 1_024


class Estimating:
    """Asks about jobs of the table before they are ordered."""

    def __init__(self, state: State, predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub) -> None:
        self._state, self._predictor = state, predictor
        self._away = False

    async def ask_unknown(self) -> None:
        """Ask in one call about jobs of which nothing was asked yet; those that are left are asked about next time."""
        unknown = self._state.take_unestimated(ESTIMATES_MAX)
        if not unknown:
            return
        request = predictor_pb2.EstimateRequest()
        for start in range(0, len(unknown), AT_ONCE):
            some = unknown[start : start + AT_ONCE]
            request.queries.extend(query_of(record, self._state.shapes) for record in some)
            await asyncio.sleep(0)
        try:
            response = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not self._away:
                log.warning("predictor_away", error=errors.from_error(error).message)
            self._away = True
            self._state.unestimated.update(dict.fromkeys(record.id for record in unknown))
            return
        self._away = False
        for place, (record, estimate) in enumerate(zip(unknown, response.estimates, strict=True), 1):
            record.expect(_one_of(estimate.SerializeToString()))
            self._state.estimate(record)
            if not place % AT_ONCE:
                await asyncio.sleep(0)

    async def ask(self, record: Record) -> None:
        """Ask about one job that is not in the table."""
        request = predictor_pb2.EstimateRequest(queries=[query_of(record, self._state.shapes)])
        try:
            response = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("predictor_away", error=errors.from_error(error).message)
            return
        record.expect(response.estimates[0])


@lru_cache(KEPT_MAX)
def _one_of(packed: bytes) -> predictor_pb2.Estimate:
    """Give one message for equal estimates: many are, those of one array's jobs and of all of whom nothing is known."""
    return predictor_pb2.Estimate.FromString(packed)
