"""Tracks the objectives of unfinished jobs: forecasts the waiting ones, and counts all by status.

The status itself is computed at each read (`jobs.objective_status`); what takes long is kept here: when the waiting
jobs with a deadline will start. One forecast answers for all of them, and is repeated after at least twenty times as
long as it took.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import islice

from cotenant import telemetry
from cotenant.core.forecast.start_forecast import WAITING_MAX
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.objective_status import expected_start, status_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.scheduling.backlog import in_order
from cotenant.services.queue.scheduling.scheduler import Scheduler
from cotenant.services.queue.scheduling.start_forecast import ForecastQuery, forecast_starts

TRACK_SECONDS = 5.0
FORECAST_SECONDS_MIN = 10.0
COST_SHARE = 0.05  # of the time that may go into forecasts

OBJECTIVES = telemetry.gauge(
    "cotenant.queue.objectives", "{objective}", "Objectives of unfinished jobs, by kind, state and tenant."
)
ENDED = telemetry.counter(
    "cotenant.queue.objectives_ended", "{objective}", "Objectives of ended jobs, by kind, outcome and tenant."
)

Counts = Counter[tuple[str, str, str]]


class ObjectiveTracker:
    """Forecasts and counts objectives periodically, and counts the outcomes of jobs as they end."""

    def __init__(self, state: State, scheduler: Scheduler) -> None:
        self._state, self._scheduler = state, scheduler
        self._reported: Counts = Counter()
        self._next_forecast = 0.0

    async def run(self) -> None:
        """Track forever; at the end all gauges are set to zero, for the next leader has its own."""
        self._state.events.ended.subscribe(self.count_end)  # not of the jobs that had ended when this leader began
        try:
            while True:
                await self.track()
                await asyncio.sleep(TRACK_SECONDS)
        finally:
            self._report(Counter())

    async def track(self) -> None:
        """Forecast the waiting jobs with a deadline if it is time, and count all objectives."""
        if time.monotonic() >= self._next_forecast:
            began = time.monotonic()
            await self.forecast()
            took = time.monotonic() - began
            self._next_forecast = time.monotonic() + max(FORECAST_SECONDS_MIN, took / COST_SHARE)
        counts: Counts = Counter()
        now, slices = time.time(), Slices()
        for record in list(self._state.records.values()):
            if not record.phase.ended:
                self._add(counts, record, now)
            if slices.due():
                await asyncio.sleep(0)
        self._report(counts)

    async def forecast(self) -> None:
        """Forecast when the waiting jobs with a deadline start; those beyond the forecast have none."""
        state, scheduler = self._state, self._scheduler
        fair = scheduler.config.rules.fair_share.shares
        waiting = list(islice(in_order(state, state.ranked, WAITING_MAX, fair=fair), WAITING_MAX))
        wanted = [record.id for record in waiting if record.spec.deadline_seconds is not None]
        if not wanted:
            state.expected_starts = {}
            return
        question = ForecastQuery(waiting, wanted)
        found = await forecast_starts(state, scheduler.config, scheduler.placement, question)
        now = time.time()
        starts = {job_id: expected_start(forecast, now) for job_id, forecast in found.items()}
        state.expected_starts = {job_id: start for job_id, start in starts.items() if start}

    def count_end(self, record: Record) -> None:
        """Count the outcomes of a job that has ended."""
        for one in status_of(record, record.ended_seconds, self._state.judged):
            ENDED.add(kind=one.kind.value, outcome=one.state.value, tenant=record.spec.tenant)

    def _add(self, counts: Counts, record: Record, now: float) -> None:
        for one in status_of(record, now, self._state.judged, self._state.expected_starts.get(record.id)):
            counts[one.kind.value, one.state.value, record.spec.tenant] += 1

    def _report(self, counts: Counts) -> None:
        for kind, state, tenant in sorted(counts.keys() | self._reported.keys()):
            OBJECTIVES.set(counts[kind, state, tenant], kind=kind, state=state, tenant=tenant)
        self._reported = counts
