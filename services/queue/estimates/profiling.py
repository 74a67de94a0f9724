"""Has running jobs profiled where the predictor wants it, and those of their kind estimated anew.

The predictor names a job in the answer to what was observed of it; it is asked what to measure, and placement is told.
Each rate that comes back is observed under the cores that it was measured on. When the profile is over the predictor
either wants more of it, or all jobs of that kind are estimated anew. The first two counts of a plan are ordered at a
time: two are needed in any case, and what is best after them depends on what they tell.
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
from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import plural
from cotenant.services.queue.estimates.estimate_refresh import Renewals
from cotenant.services.queue.estimates.observation_sink import Observations, allocation_of, observation_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, note
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc, predictor_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

COUNTS_AT_ONCE = 2
CALL_SECONDS = 5.0
RETRY_SECONDS = 1.0
TRIES_MAX = 5  # of an order that placement refuses: a job's cores may just be changing
OVERDUE_SECONDS = 30.0  # after its budget a profile is over, even if nobody says so
BATCH_MAX = 500
WAITING_MAX = 10_000
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

PROFILES = telemetry.counter("cotenant.queue.profiles", "{profile}", "Profiles of running jobs, by what came of them.")


class Profiles:
    """Profiles that are wanted or under way, and rates that were measured."""

    def __init__(
        self,
        state: State,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
        observations: Observations,
        renewals: Renewals,
    ) -> None:
        self.state, self.placement, self.predictor, self.observations = state, placement, predictor, observations
        self.renewals = renewals
        self._wanted: dict[str, None] = {}
        self._reports: list[node_pb2.ProfileReport] = []
        self._under_way: dict[str, asyncio.TimerHandle] = {}
        self._blurred: set[str] = set()  # profiled jobs that were in another phase meanwhile
        self._measured: set[str] = set()  # jobs of whose present profile a rate is known
        self._tries: Counter[str] = Counter()  # of orders that were refused
        self._wake = asyncio.Event()

    # What is heard -------------------------------------------------------------------------------------------

    def want(self, job_ids: Iterable[str]) -> None:
        """The predictor wants these jobs profiled."""
        self._wanted.update(dict.fromkeys(job_ids))
        if self._wanted:
            self._wake.set()

    def progressed(self, record: Record) -> None:
        """A job told its progress; what is measured while it validates, say, tells nothing of its training."""
        if record.id in self._under_way and record.job.progress.phase:
            self._blurred.add(record.id)

    def take(self, report: node_pb2.ProfileReport) -> None:
        """A rate was measured, or a profile has ended."""
        record = self._running(report.job_id)
        if record is None or record.attempt_number != report.number:
            self._over(report.job_id)
            self._measured.discard(report.job_id)
            return
        if report.message:
            log.info("profile_told", job=report.job_id, cores=report.cores, why=report.message)
        if report.done:
            self._over(report.job_id)
        elif report.job_id not in self._under_way:  # begun by another life of this queue
            self._begun(record, OVERDUE_SECONDS)
        if len(self._reports) < WAITING_MAX:
            self._reports.append(report)
            self._wake.set()

    # What is done --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._observe()
                await self._begin()
            except grpc.aio.AioRpcError as error:
                log.info("profiling_delayed", error=errors.from_error(error).message)
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def _observe(self) -> None:
        """Tell the predictor what was measured; it says whose profile has to go on."""
        while self._reports:
            batch = self._reports[:BATCH_MAX]
            seen = [one for report in batch for one in self._observations(report)]
            response = await self.predictor.Observe(
                predictor_pb2.ObserveRequest(observations=seen), timeout=CALL_SECONDS
            )
            del self._reports[: len(batch)]
            for why in response.rejected:
                log.info("observation_rejected", why=why)
            self.want(response.profile_wanted)
            for report in batch:
                if report.done and report.job_id not in response.profile_wanted:
                    self._ended(report)

    def _ended(self, report: node_pb2.ProfileReport) -> None:
        """A profile is over: what it tells is news for all jobs of the kind; where it tells nothing, that is told."""
        record = self._running(report.job_id)
        if report.job_id in self._measured:
            self._measured.discard(report.job_id)
            PROFILES.add(outcome="done")
            self._renew(report.job_id)
        else:
            PROFILES.add(outcome="failed")
            if record:
                note(record.stored, "not profiled", report.message or "nothing was measured")

    def _observations(self, report: node_pb2.ProfileReport) -> list[predictor_pb2.Observation]:
        record = self._running(report.job_id)
        if record is None:
            return []
        attempt, seen = record.job.attempt, []
        sound = report.cores > 0 and 0 < report.rate_per_second < math.inf and report.HasField("window")
        if sound and report.job_id not in self._blurred:
            window = observation_of(record, attempt)
            window.allocation.cores = report.cores
            window.rate_per_second, window.profiled = report.rate_per_second, True
            window.window.CopyFrom(report.window)
            window.time.CopyFrom(report.time)
            seen.append(window)
            self._measured.add(report.job_id)
        if not record.job.progress.phase:
            self._blurred.discard(report.job_id)
        if report.done:
            end = observation_of(record, attempt)
            end.profiled = end.profile_done = True
            end.time.CopyFrom(report.time)
            seen.append(end)
        return seen

    async def _begin(self) -> None:
        for job_id in list(self._wanted):
            record = self._running(job_id)
            if record and job_id not in self._under_way:
                try:
                    await self._begin_one(record)
                except grpc.aio.AioRpcError as error:
                    if error.code() in PASSING:
                        raise
                    self._fail(record, errors.from_error(error).message)
            self._wanted.pop(job_id, None)

    async def _begin_one(self, record: Record) -> None:
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
        self._begun(record, specs.seconds(planned.budget) + OVERDUE_SECONDS)
        advice = placement_pb2.Advice(job_id=record.id, number=record.attempt_number, profile=plan)
        try:
            refused = await self._advise([advice])
        except grpc.aio.AioRpcError:
            self._over(record.id)
            raise
        if refused:
            self._over(record.id)
            self._refused(record, refused[0])
            return
        self._tries.pop(record.id, None)
        PROFILES.add(outcome="begun")
        log.info("profile_begun", job=record.id, cores=list(cores), steps=planned.steps, why=planned.reason)
        counts = " and ".join(map(str, cores))
        note(record.stored, "profiling", f"on {counts} of its {plural(held.cores, 'core')}: {planned.reason}")

    def _refused(self, record: Record, why: str) -> None:
        """Ask again in a moment, but not for ever."""
        self._tries[record.id] += 1
        if self._tries[record.id] < TRIES_MAX:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.want, [record.id])
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

    def _begun(self, record: Record, seconds_max: float) -> None:
        """Let no window of the job's rate end until its profile has, which takes so long at most."""
        self.observations.windows.hold(record.id)
        why = "its end was not told in time"
        timer = asyncio.get_running_loop().call_later(seconds_max, self._fail, record, why)
        if before := self._under_way.get(record.id):
            before.cancel()
        self._under_way[record.id] = timer

    def _over(self, job_id: str) -> None:
        timer = self._under_way.pop(job_id, None)
        if timer:
            timer.cancel()
            self.observations.windows.release(job_id)

    def _fail(self, record: Record, why: str) -> None:
        """Take a profile as ended of which nothing more will be heard."""
        report = node_pb2.ProfileReport(job_id=record.id, number=record.attempt_number, done=True, message=why)
        report.time.FromNanoseconds(time.time_ns())
        self.take(report)

    def _renew(self, job_id: str) -> None:
        """Ask anew about all jobs of a job's kind: those that run, and those that wait."""
        record = self.state.records.get(job_id)
        if record is None:
            return
        kind = _kind(record)
        others = [self.state.records[one] for one in self.state.table.ids if one in self.state.records]
        alike = [other for other in others if _kind(other) == kind]
        self.renewals.want([one.id for one in alike if one.phase is Phase.RUNNING], profiled=job_id)
        self.state.unestimated.update({one.id: None for one in alike if one.phase is not Phase.RUNNING})
        self.state.wake()


def _kind(record: Record) -> tuple[str, str, int, int]:
    """Jobs are alike, to predictors, that share these."""
    spec = record.spec
    return spec.tenant, spec.model or spec.name, spec.gpu_milli, spec.replicas
