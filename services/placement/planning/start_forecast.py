"""Start forecast: simulates the schedule on a copy of the cluster state to predict when waiting jobs start."""

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
from cotenant.core.forecast.start_forecast import (
    ExpectedStart,
    Forecast,
    QueueSnapshot,
    RunningEntry,
    WaitingEntry,
    forecast,
    held,
)
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.prediction.remaining_time import RemainingTime, certain_time, remaining_time_of
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.services.placement.cluster.request_decoding import check_candidates, gang_of
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, LiveClusterView
from cotenant.services.placement.planning.planner import reserving_of
from cotenant.v1 import job_pb2

BUDGET_SECONDS_MAX = 5.0
DRAWS_MAX = 200
SLICE = 2_000  # runs decoded before yielding to other tasks

SECONDS = telemetry.histogram("cotenant.placement.forecast", "s", "Time to forecast when waiting jobs will start.")


class StartForecaster:
    """Forecasts starts, one request at a time, in a thread with its own ledger and policies."""

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[], tuple[PlacementPolicy, CpuAllocator]],
        check_leadership: Callable[[], None],
    ) -> None:
        self._cluster, self._make, self._check_leadership = cluster, make, check_leadership
        self._lock = asyncio.Lock()

    async def forecast(self, request: placement_pb2.ForecastStartsRequest) -> placement_pb2.ForecastStartsResponse:
        """Forecast from a snapshot of the present state, in a thread beside the event loop.

        Raises:
            Problem: INVALID_ARGUMENT, naming each invalid field of the candidates.
        """
        await check_candidates(request.candidates)
        async with self._lock:
            self._check_leadership()
            begin = time.monotonic()
            now = time.time()
            remaining = await _remaining_times(request.runs)
            ledger, holders = self._snapshot(remaining, now)
            held_now = {(holder.job_id, self._cluster.attempts[holder.job_id].key[1]) for holder in holders}
            stoppable = {one.job_id: one.ahead for one in request.stoppable if (one.job_id, one.number) in held_now}
            placed = frozenset(key for key, live in self._cluster.attempts.items() if not live.state.ended)
            shapes = self._cluster.open_shapes()
            budget = min(BUDGET_SECONDS_MAX, specs.seconds(request.budget) or BUDGET_SECONDS_MAX)

            def play() -> placement_pb2.ForecastStartsResponse:
                cpu = time.thread_time()
                policy, allocator = self._make()
                waiters = _waiters(request, remaining, placed, shapes, allocator)
                headroom = Headroom(map(tenant_of, request.tenants))
                for holder in holders:
                    headroom.take(holder.tenant, *held(holder.holdings))
                result = forecast(
                    QueueSnapshot(
                        ledger, holders, waiters, request.strict, headroom, reserving_of(request), stoppable, now
                    ),
                    policy,
                    np.random.default_rng(request.seed),
                    request.wanted_job_ids or None,
                    draws=max(0, min(request.draws, DRAWS_MAX)),
                    spent=lambda: time.monotonic() - begin > budget,
                )
                response = _answer(result)
                response.processing.CopyFrom(specs.duration(time.thread_time() - cpu))
                return response

            response = await asyncio.to_thread(play)
        SECONDS.record(time.monotonic() - begin)
        return response

    def _snapshot(
        self, remaining: Mapping[tuple[str, int], RemainingTime], now: float
    ) -> tuple[Ledger, list[RunningEntry]]:
        """Return a ledger copy with everything about to be freed, and the running jobs with their remaining times."""
        cluster = self._cluster
        running_jobs = LiveClusterView(cluster, STOP_COSTS, now).running_jobs()
        ledger = cluster.ledger.copy()
        for holding in cluster.leaving():
            ledger.release(holding)
        holders = [
            RunningEntry(
                live.key[0],
                cluster.firm_holdings(live),
                remaining.get(live.key) or remaining_time_of(UNKNOWN, _ran_seconds(live, now)),
                live.record.spec.tenant,
                running_jobs.get(live.key[0]),
                task.array_id if (task := live.record.spec.array_task) and task.running_max else "",
            )
            for live in cluster.attempts.values()
            if live.state in (AttemptState.ASSIGNED, AttemptState.RUNNING)
        ]
        return ledger, holders


async def _remaining_times(runs: Sequence[placement_pb2.RunLeft]) -> Mapping[tuple[str, int], RemainingTime]:
    """Return the remaining times of runs, yielding to other tasks now and then."""
    remaining: dict[tuple[str, int], RemainingTime] = {}
    for number, left in enumerate(runs):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        remaining[left.job_id, left.number] = _remaining_time(left)
    return remaining


def _remaining_time(left: placement_pb2.RunLeft) -> RemainingTime:
    """Return a run's remaining time, with quantiles that are not negative and in order."""
    middle, low, high = (max(0.0, specs.seconds(one)) for one in (left.median, left.p10, left.p90))
    return RemainingTime(middle, min(low, middle), max(high, middle), not left.unknown)


def _ran_seconds(live: LiveAttempt, now: float) -> float:
    attempt = live.attempt
    since = attempt.start_time if attempt.HasField("start_time") else attempt.assign_time
    return max(1.0, now - specs.seconds(since))


def _waiters(
    request: placement_pb2.ForecastStartsRequest,
    remaining: Mapping[tuple[str, int], RemainingTime],
    placed: frozenset[str],
    shapes: tuple[NodeShape, ...],
    allocator: CpuAllocator,
) -> list[WaitingEntry]:
    """Return the waiting jobs among the candidates, each once; jobs that are already placed are left out."""
    return [
        WaitingEntry(
            gang_of(candidate, allocator, shapes),
            remaining.get((candidate.job_id, 0)) or certain_time(0.0),
            candidate.spec.array_task.array_id,
            candidate.spec.array_task.running_max,
        )
        for candidate in {candidate.job_id: candidate for candidate in request.candidates}.values()
        if candidate.job_id not in placed
    ]


def _answer(result: Forecast) -> placement_pb2.ForecastStartsResponse:
    response = placement_pb2.ForecastStartsResponse()
    for job_id, expected in sorted(result.expected.items()):
        _write(response.forecasts.add(job_id=job_id, draws=result.draws), expected, result.reached_seconds)
    return response


def _write(message: job_pb2.StartForecast, expected: ExpectedStart, reached_seconds: float) -> None:
    message.ending_job_ids.extend(expected.ends)
    message.ending_count = expected.ends_count
    message.reached.CopyFrom(specs.duration(min(reached_seconds, specs.DURATION_SECONDS_MAX)))
    message.of_unknown = expected.of_unknown
    if expected.of_unknown:
        return
    for name, value in (
        ("start", expected.seconds),
        ("start_p10", expected.p10_seconds),
        ("start_p90", expected.p90_seconds),
        ("finish", expected.finish_seconds),
    ):
        if value < math.inf:
            getattr(message, name).CopyFrom(specs.duration(min(value, specs.DURATION_SECONDS_MAX)))
