"""Profiles running jobs on request of the predictor, then refreshes the estimates of their job class.

The predictor names jobs to profile in its answers to observations. It plans the core counts to measure, and placement
runs the profile. Each measured rate is observed under the cores that it was measured on. When the profile ends, the
predictor either wants it continued, or all jobs of the class get new estimates. A plan is run two core counts at a
time: two are needed in any case, and the best next ones depend on their results.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import grpc
import structlog

from cotenant import telemetry
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors, specs
from cotenant.codec.job_events import EventKind
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import plural
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.services.queue.estimates.estimate_refresh import EstimateRefresh
from cotenant.services.queue.estimates.observation_sink import ObservationSink, allocation_of, observation_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, add_event
from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import predictor_service_pb2_grpc

log = structlog.get_logger()

COUNTS_AT_ONCE = 2
CALL_SECONDS = 5.0
RETRY_SECONDS = 1.0
TRIES_MAX = 5  # for an order that placement refuses: the job's cores may be changing
OVERDUE_SECONDS = 30.0  # a profile ends this long after its budget, even without a report
BATCH_MAX = 500
WAITING_MAX = 10_000
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

PROFILES = telemetry.counter("cotenant.queue.profiles", "{profile}", "Profiles of running jobs, by outcome.")


class Profiling:
    """Requested profiles, profiles in progress, and measured rates."""

    def __init__(
        self,
        state: State,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
        observations: ObservationSink,
        estimate_refresh: EstimateRefresh,
    ) -> None:
        self.state, self.placement, self.predictor, self.observations = state, placement, predictor, observations
        self.estimate_refresh = estimate_refresh
        self._wanted: dict[str, None] = {}
        self._reports: list[agent_pb2.ProfileReport] = []
        self._under_way: dict[str, asyncio.TimerHandle] = {}
        self._mixed_phase: set[str] = set()  # profiled jobs that were in another phase in between
        self._measured: set[str] = set()  # jobs with a measured rate in their present profile
        self._tries: Counter[str] = Counter()  # refused orders by job
        self._wake = asyncio.Event()
        state.events.profile_wanted.subscribe(self.request)

    # Inputs --------------------------------------------------------------------------------------------------

    def request(self, job_ids: Iterable[str]) -> None:
        """Request profiles of these jobs."""
        self._wanted.update(dict.fromkeys(job_ids))
        if self._wanted:
            self._wake.set()

    def progressed(self, record: Record) -> None:
        """Handle progress of a profiled job; rates measured outside its training phase do not count."""
        if record.id in self._under_way and record.job.progress.phase:
            self._mixed_phase.add(record.id)

    def take(self, report: agent_pb2.ProfileReport) -> None:
        """Handle a measured rate, or the end of a profile."""
        record = self._running(report.job_id)
        if record is None or record.attempt_number != report.number:
            self._release_windows(report.job_id)
            self._measured.discard(report.job_id)
            return
        if report.message:
            log.info("profile_reported", job=report.job_id, cores=report.cores, why=report.message)
        if report.done:
            self._release_windows(report.job_id)
        elif report.job_id not in self._under_way:  # started by a previous leader
            self._hold_windows(record, OVERDUE_SECONDS)
        if len(self._reports) < WAITING_MAX:
            self._reports.append(report)
            self._wake.set()

    # Work ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run forever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._observe()
                await self._start_requested()
            except grpc.aio.AioRpcError as error:
                log.info("profiling_delayed", error=errors.from_error(error).message)
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def _observe(self) -> None:
        """Send measured rates to the predictor, which may want profiles continued."""
        while self._reports:
            batch = self._reports[:BATCH_MAX]
            seen = [one for report in batch for one in self._observations(report)]
            response = await self.observations.send(seen, CALL_SECONDS)
            del self._reports[: len(batch)]
            for why in response.rejected:
                log.info("observation_rejected", why=why)
            self.request(response.profile_wanted)
            for report in batch:
                if report.done and report.job_id not in response.profile_wanted:
                    self._ended(report)

    def _ended(self, report: agent_pb2.ProfileReport) -> None:
        """Handle the end of a profile: refresh the estimates of the job class, or record that nothing was measured."""
        record = self._running(report.job_id)
        if report.job_id in self._measured:
            self._measured.discard(report.job_id)
            PROFILES.add(outcome="done")
            self._refresh(report.job_id)
        else:
            PROFILES.add(outcome="failed")
            if record:
                add_event(record.stored, EventKind.NOT_PROFILED, report.message or "nothing was measured")

    def _observations(self, report: agent_pb2.ProfileReport) -> list[observation_pb2.Observation]:
        record = self._running(report.job_id)
        if record is None:
            return []
        attempt, seen = record.job.attempt, []
        sound = report.cores > 0 and 0 < report.rate_per_second < math.inf and report.HasField("window")
        if sound and report.job_id not in self._mixed_phase:
            window = observation_of(record, attempt)
            window.allocation.cores = report.cores
            window.rate_per_second, window.profiled = report.rate_per_second, True
            window.window.CopyFrom(report.window)
            window.time.CopyFrom(report.time)
            seen.append(window)
            self._measured.add(report.job_id)
        if not record.job.progress.phase:
            self._mixed_phase.discard(report.job_id)
        if report.done:
            end = observation_of(record, attempt)
            end.profiled = end.profile_done = True
            end.time.CopyFrom(report.time)
            seen.append(end)
        return seen

    async def _start_requested(self) -> None:
        for job_id in list(self._wanted):
            record = self._running(job_id)
            if record and job_id not in self._under_way:
                try:
                    await self._start_profile(record)
                except grpc.aio.AioRpcError as error:
                    if error.code() in PASSING:
                        raise
                    self._fail(record, errors.from_error(error).message)
            self._wanted.pop(job_id, None)

    async def _start_profile(self, record: Record) -> None:
        held = allocation_of(record.job.attempt)
        planned = await self.predictor.PlanProfile(
            predictor_pb2.PlanProfileRequest(spec=record.job.spec, cores_max=held.cores, gpu_type=held.gpu_type),
            timeout=CALL_SECONDS,
        )
        cores = planned.cores[:COUNTS_AT_ONCE]
        if not cores:
            self._fail(record, planned.reason)
            return
        plan = placement_pb2.ProfilePlan(cores=cores, steps=planned.steps, budget=planned.budget)
        self._hold_windows(record, specs.seconds(planned.budget) + OVERDUE_SECONDS)
        advice = placement_pb2.Advice(job_id=record.id, number=record.attempt_number, profile=plan)
        try:
            refused = await self._advise([advice])
        except grpc.aio.AioRpcError:
            self._release_windows(record.id)
            raise
        if refused:
            self._release_windows(record.id)
            self._refused(record, refused[0])
            return
        self._tries.pop(record.id, None)
        PROFILES.add(outcome="begun")
        log.info("profile_begun", job=record.id, cores=list(cores), steps=planned.steps, why=planned.reason)
        counts = " and ".join(map(str, cores))
        add_event(
            record.stored, EventKind.PROFILING, f"on {counts} of its {plural(held.cores, 'core')}: {planned.reason}"
        )

    def _refused(self, record: Record, why: str) -> None:
        """Retry in a moment, a limited number of times."""
        self._tries[record.id] += 1
        if self._tries[record.id] < TRIES_MAX:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.request, [record.id])
        else:
            del self._tries[record.id]
            self._fail(record, why)

    async def _advise(self, advice: Sequence[placement_pb2.Advice]) -> Sequence[str]:
        response: placement_pb2.AdviseAttemptsResponse = await self.placement.AdviseAttempts(
            placement_pb2.AdviseAttemptsRequest(advice=advice), timeout=CALL_SECONDS
        )
        for why in response.refused:
            log.info("advice_refused", why=why)
        return response.refused

    # Helpers -------------------------------------------------------------------------------------------------

    def _running(self, job_id: str) -> Record | None:
        record = self.state.records.get(job_id)
        runs = record and record.phase is Phase.RUNNING and not record.job.attempt.pre_run
        return record if runs else None

    def _hold_windows(self, record: Record, seconds_max: float) -> None:
        """Hold the job's rate windows until its profile ends, at most for so many seconds."""
        self.observations.windows.hold(record.id)
        why = "its end was not reported in time"
        timer = asyncio.get_running_loop().call_later(seconds_max, self._fail, record, why)
        if before := self._under_way.get(record.id):
            before.cancel()
        self._under_way[record.id] = timer

    def _release_windows(self, job_id: str) -> None:
        timer = self._under_way.pop(job_id, None)
        if timer:
            timer.cancel()
            self.observations.windows.release(job_id)

    def _fail(self, record: Record, why: str) -> None:
        """End a profile from which no more reports are expected."""
        report = agent_pb2.ProfileReport(job_id=record.id, number=record.attempt_number, done=True, message=why)
        report.time.FromNanoseconds(time.time_ns())
        self.take(report)

    def _refresh(self, job_id: str) -> None:
        """Request new estimates of all jobs of a job's class, running and waiting."""
        record = self.state.records.get(job_id)
        if record is None:
            return
        kind = _kind(record)
        others = [self.state.records[one] for one in self.state.table.ids if one in self.state.records]
        alike = [other for other in others if _kind(other) == kind]
        self.estimate_refresh.request([one.id for one in alike if one.phase is Phase.RUNNING], profiled=job_id)
        self.state.unestimated.update({one.id: None for one in alike if one.phase is not Phase.RUNNING})
        self.state.events.changed()


def _kind(record: Record) -> tuple[str, str, int, int]:
    """Return the job class as predictors see it."""
    spec = record.spec
    return spec.tenant, spec.model or spec.name, spec.gpu_milli, spec.replicas
