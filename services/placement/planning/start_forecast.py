"""When waiting jobs will probably start, played through on a copy of the picture: nothing is decided by it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant import telemetry
from cotenant.codec import specs
from cotenant.codec.tenants import tenant_of
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.forecast.start_forecast import Expected, Forecast, Holder, Picture, Waiter, forecast, held
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.prediction.remaining_time import Rest, exactly, rest_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live
from cotenant.services.placement.cluster.request_decoding import check_candidates, gang_of
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, Moment
from cotenant.services.placement.planning.planner import reserving_of
from cotenant.v1 import job_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

BUDGET_SECONDS_MAX = 5.0
DRAWS_MAX = 200
SLICE = 2_000  # runs that are read between two turns of others

SECONDS = telemetry.histogram("cotenant.placement.forecast", "s", "Time to foretell when waiting jobs will start.")


class Forecasting:
    """Foretells starts, one question at a time, in a thread that has a ledger and policies of its own."""

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[], tuple[PlacementPolicy, CpuAllocator]],
        check_trust: Callable[[], None],
    ) -> None:
        self._cluster, self._make, self._check_trust = cluster, make, check_trust
        self._lock = asyncio.Lock()

    async def forecast(self, request: placement_pb2.ForecastStartsRequest) -> placement_pb2.ForecastStartsResponse:
        """Take the picture as it is now, and play through what comes of it beside whatever else is to be done.

        Raises:
            Problem: INVALID_ARGUMENT, naming what of the candidates nobody can count with.
        """
        await check_candidates(request.candidates)
        async with self._lock:
            self._check_trust()
            begin = time.monotonic()
            now = time.time()
            lefts = await _rests(request.runs)
            ledger, holders = self._stand(lefts, now)
            held_now = {(holder.job_id, self._cluster.attempts[holder.job_id].key[1]) for holder in holders}
            stoppable = {one.job_id: one.ahead for one in request.stoppable if (one.job_id, one.number) in held_now}
            there = frozenset(key for key, live in self._cluster.attempts.items() if not live.state.ended)
            shapes = self._cluster.open_shapes()
            budget = min(BUDGET_SECONDS_MAX, specs.seconds(request.budget) or BUDGET_SECONDS_MAX)

            def play() -> placement_pb2.ForecastStartsResponse:
                cpu = time.thread_time()
                policy, allocator = self._make()
                waiters = _waiters(request, lefts, there, shapes, allocator)
                headroom = Headroom(map(tenant_of, request.tenants))
                for holder in holders:
                    headroom.take(holder.tenant, *held(holder.holdings))
                told = forecast(
                    Picture(ledger, holders, waiters, request.strict, headroom, reserving_of(request), stoppable, now),
                    policy,
                    np.random.default_rng(request.seed),
                    request.wanted_job_ids or None,
                    draws=max(0, min(request.draws, DRAWS_MAX)),
                    spent=lambda: time.monotonic() - begin > budget,
                )
                response = _answer(told)
                response.processing.CopyFrom(specs.duration(time.thread_time() - cpu))
                return response

            response = await asyncio.to_thread(play)
        SECONDS.record(time.monotonic() - begin)
        return response

    def _stand(self, lefts: Mapping[tuple[str, int], Rest], now: float) -> tuple[Ledger, list[Holder]]:
        """Copy what is free, with what is coming back anyway, and say who holds the rest and for how long."""
        cluster = self._cluster
        residents = Moment(cluster, STOP_COSTS, now).residents()
        ledger = cluster.ledger.copy()
        for holding in cluster.leaving():
            ledger.release(holding)
        holders = [
            Holder(
                live.key[0],
                cluster.firm(live),
                lefts.get(live.key) or rest_of(UNKNOWN, _ran_seconds(live, now)),
                live.record.spec.tenant,
                residents.get(live.key[0]),
                task.array_id if (task := live.record.spec.array_task) and task.running_max else "",
            )
            for live in cluster.attempts.values()
            if live.state in (AttemptState.ASSIGNED, AttemptState.RUNNING)
        ]
        return ledger, holders


async def _rests(runs: Sequence[placement_pb2.RunLeft]) -> Mapping[tuple[str, int], Rest]:
    """Read how long runs last yet; others have their turn meanwhile."""
    rests: dict[tuple[str, int], Rest] = {}
    for number, left in enumerate(runs):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        rests[left.job_id, left.number] = _rest(left)
    return rests


def _rest(left: placement_pb2.RunLeft) -> Rest:
    """Read how long a run lasts yet; nobody's ends before now, or surely later than perhaps."""
    middle, low, high = (max(0.0, specs.seconds(one)) for one in (left.median, left.p10, left.p90))
    return Rest(middle, min(low, middle), max(high, middle))


def _ran_seconds(live: Live, now: float) -> float:
    attempt = live.attempt
    since = attempt.start_time if attempt.HasField("start_time") else attempt.assign_time
    return max(1.0, now - specs.seconds(since))


def _waiters(
    request: placement_pb2.ForecastStartsRequest,
    lefts: Mapping[tuple[str, int], Rest],
    there: frozenset[str],
    shapes: tuple[NodeShape, ...],
    allocator: CpuAllocator,
) -> list[Waiter]:
    """Make gangs of the candidates, but for those that have a place already; a job waits once, however often named."""
    return [
        Waiter(
            gang_of(candidate, allocator, shapes),
            lefts.get((candidate.job_id, 0)) or exactly(0.0),
            candidate.spec.array_task.array_id,
            candidate.spec.array_task.running_max,
        )
        for candidate in {candidate.job_id: candidate for candidate in request.candidates}.values()
        if candidate.job_id not in there
    ]


def _answer(told: Forecast) -> placement_pb2.ForecastStartsResponse:
    response = placement_pb2.ForecastStartsResponse()
    for job_id, expected in sorted(told.expected.items()):
        _write(response.forecasts.add(job_id=job_id, draws=told.draws), expected, told.reached_seconds)
    return response


def _write(message: job_pb2.StartForecast, expected: Expected, reached_seconds: float) -> None:
    message.ending_job_ids.extend(expected.ends)
    message.ending_count = expected.ends_count
    message.reached.CopyFrom(specs.duration(min(reached_seconds, specs.DURATION_SECONDS_MAX)))
    for name, value in (
        ("start", expected.seconds),
        ("start_p10", expected.p10_seconds),
        ("start_p90", expected.p90_seconds),
        ("finish", expected.finish_seconds),
    ):
        if value < math.inf:
            getattr(message, name).CopyFrom(specs.duration(min(value, specs.DURATION_SECONDS_MAX)))
