"""Asks the predictor about jobs, each once while it waits; without an answer they are unpredictable."""

from __future__ import annotations

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

ESTIMATES_MAX = 250  # questions in one call, each of which the predictor answers in one piece
TAKEN_MAX = 5_000  # jobs that they may be about
DEADLINE_SECONDS = 2.0
KEPT_MAX = 1_024


class Estimating:
    """Asks about jobs of the table before they are ordered."""

    def __init__(self, state: State, predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub) -> None:
        self._state, self._predictor = state, predictor
        self._away = False

    async def ask_unknown(self) -> None:
        """Ask in one call about jobs of which nothing was asked yet; those that are left are asked about next time.

        Jobs of one array that have never run differ in nothing that is asked: one of them speaks for all.
        """
        asked, slices = dict[str, list[Record]](), Slices()
        request = predictor_pb2.EstimateRequest()
        for record in self._state.take_unestimated(TAKEN_MAX):
            task = record.spec.array_task
            key = task.array_id if task and not record.attempt_number else record.id
            if key not in asked:
                if len(asked) == ESTIMATES_MAX:
                    self._state.unestimated[record.id] = None
                    continue
                request.queries.append(query_of(record, self._state.shapes))
            asked.setdefault(key, []).append(record)
            await slices.step()
        if not asked:
            return
        try:
            response = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not self._away:
                log.warning("predictor_away", error=errors.from_error(error).message)
            self._away = True
            self._state.unestimated.update(dict.fromkeys(record.id for alike in asked.values() for record in alike))
            return
        self._away = False
        for alike, estimate in zip(asked.values(), response.estimates, strict=True):
            known = _one_of(estimate.SerializeToString())
            for record in alike:
                record.expect(known)
                self._state.estimate(record)
                await slices.step()

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
