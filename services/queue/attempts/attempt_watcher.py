"""Watches placement's attempts and applies their states to jobs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter

import grpc
import structlog

from cotenant import fail_points, telemetry
from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import AttemptState, Phase, StopReason
from cotenant.core.model.resources import Resources
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.internal.v1.attempt_pb2 import AttemptEvidence
from cotenant.rpc.slices import Slices
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.queue.attempts.pre_runs import PreRuns
from cotenant.services.queue.estimates.observation_sink import ObservationSink
from cotenant.services.queue.estimates.profiling import Profiling
from cotenant.services.queue.jobs.desired_state import cancel_or_suspend
from cotenant.services.queue.jobs.failure_classifier import FailureClassifier
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.objective_status import latency_now
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, apply_attempt, apply_end
from cotenant.v1 import job_pb2

log = structlog.get_logger()

RETRY_SECONDS = 0.3
STOP_RETRY_SECONDS_MAX = 5.0
AWAY_LOG_SECONDS = 10.0  # between two log lines while placement is unavailable
FORGET_SECONDS = 0.05
FORGET_MAX = 1_000
TAKEN_AT_ONCE = 100  # attempts applied before other calls get a turn

ENDED = telemetry.counter(
    "cotenant.queue.attempts_ended", "{attempt}", "Ended attempts, by state and by the job's phase."
)


class AttemptWatcher:
    """Keeps jobs in sync with placement's attempts."""

    def __init__(
        self,
        state: State,
        job_store: JobStore,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        observations: ObservationSink,
        profiles: Profiling,
        failure_classifier: FailureClassifier,
        term: int = 0,
    ) -> None:
        self.state, self.job_store, self.placement = state, job_store, placement
        self.observations, self.profiles, self.failure_classifier = observations, profiles, failure_classifier
        self.synced = asyncio.Event()  # set while the watch is connected
        self.connections = 0  # how often the watch was connected
        self._stop_orders: set[tuple[str, int, StopReason]] = set()  # that placement has not taken yet
        self.ending: Counter[str] = Counter()  # jobs whose attempt has ended and is being committed
        self._term, self._revision = term, 0
        self._forget: dict[tuple[str, int], None] = {}
        self._forgetting = asyncio.Event()
        self._capacity_changed = asyncio.Event()
        self.capacity_changes = 0  # as reported by placement
        self._capacity_asked = self._capacity_known = 0  # the last request for it, and the last whose answer is known
        self._background = BackgroundTasks()
        self.pre_runs = PreRuns(job_store, self.order_stop, self._background)
        state.events.reread.subscribe(self.stop_by_wish)

    async def run(self) -> None:
        """Watch forever, through restarts of placement."""
        logged_time = -math.inf
        while True:
            try:
                watch = self.placement.WatchAttempts(placement_pb2.WatchAttemptsRequest(after_revision=self._revision))
                async for event in watch:
                    await self._handle_event(event)
            except grpc.aio.AioRpcError as error:
                if self.synced.is_set() or time.monotonic() - logged_time >= AWAY_LOG_SECONDS:
                    log.warning("placement_disconnected", error=errors.from_error(error).message)
                    logged_time = time.monotonic()
            except Exception:  # an event was not understood: a snapshot makes up for it
                self._revision = 0
                raise
            finally:
                self.synced.clear()
            await asyncio.sleep(RETRY_SECONDS)

    def stop_by_wish(self, record: Record) -> None:
        """Stop a running job that is to be cancelled or suspended; its end arrives like any attempt event."""
        if record.phase.holds_resources and record.stored.wish:
            self._background.start(self.stop(record, record.attempt_number, wished_stop_reason(record)))

    async def close(self) -> None:
        """Stop all background work."""
        await self._background.close()

    async def _handle_event(self, event: placement_pb2.WatchAttemptsResponse) -> None:
        self.capacity_changes += event.capacity_changed
        if event.capacity_changed and event.snapshot:
            await self._refresh_capacity()
        elif event.capacity_changed:
            self._capacity_changed.set()
        for place, observed in enumerate(event.attempts, 1):
            self.apply_attempt(observed.attempt, observed.evidence)
            if not place % TAKEN_AT_ONCE:  # a snapshot may have ten thousand
                await asyncio.sleep(0)
        if event.snapshot:
            await self._handle_missing({observed.attempt.job_id for observed in event.attempts}, event.revision)
        for job_progress in event.progress:
            self._handle_progress(job_progress)
        for report in event.profiled:
            self.profiles.take(report)
        self._revision = max(self._revision, event.revision)
        if not self.synced.is_set():
            self.synced.set()
            self.connections += 1
            self.state.events.changed()

    async def _handle_missing(self, present: set[str], revision: int) -> None:
        """Mark attempts as lost that a snapshot of placement does not contain.

        An attempt that was committed at the snapshot's revision or later is too new to be in it.
        """
        slices = Slices()
        for record in list(self.state.records.values()):
            await slices.step()
            if record.phase.ended or record.id in present:
                continue
            if record.wish and not record.attempt_number:  # the attempt it was to be stopped for had already ended
                self._background.start(self._hold_back(record))
            elif (record.phase.holds_resources or record.wish) and record.job.attempt.epoch < revision:
                lost = job_pb2.Attempt()
                lost.CopyFrom(record.job.attempt)
                lost.state = specs.ATTEMPT_STATES.to_wire(AttemptState.LOST)
                lost.message = "placement no longer knows this attempt"
                lost.end_time.FromNanoseconds(time.time_ns())
                self._begin_end(record, lost, AttemptEvidence())

    async def _hold_back(self, record: Record) -> None:
        """Cancel or suspend a job as wished, if placement's record still says that it is idle."""
        await self.job_store.change_with_retry(
            record,
            lambda stored: bool(stored.wish) and cancel_or_suspend(stored, stored.wish),
            instead=lambda stored: False,
        )

    def apply_attempt(self, attempt: job_pb2.Attempt, evidence: AttemptEvidence) -> None:
        """Apply an attempt event to its job; its failure is classified from the evidence."""
        record = self.state.records.get(attempt.job_id)
        ended = specs.ATTEMPT_STATES.from_wire(attempt.state).ended
        if record is None:
            log.warning("attempt_of_unknown_job", job=attempt.job_id)
            if ended:
                self._schedule_forget(attempt)
            return
        if ended:
            self._begin_end(record, attempt, evidence)
        elif not record.lock.locked():
            self._follow(record, attempt)
        else:
            self._background.start(self._follow_later(record, attempt))

    async def _follow_later(self, record: Record, attempt: job_pb2.Attempt) -> None:
        async with record.lock:
            self._follow(record, attempt)

    def _follow(self, record: Record, attempt: job_pb2.Attempt) -> None:
        """Apply that an attempt was assigned, runs or stops. Not committed here: placement stores it."""
        if apply_attempt(record.stored, attempt):
            self.state.sync(record)
        if record.phase is Phase.SUSPENDED or record.phase.ended:
            reason = StopReason.SUSPENDED if record.phase is Phase.SUSPENDED else StopReason.CANCELLED
            self._background.start(self.stop(record, attempt.number, reason))
        elif record.stored.wish and record.phase is not Phase.STOPPING:
            self._background.start(self.stop(record, attempt.number, wished_stop_reason(record)))
        self.pre_runs.follow(record)

    def _begin_end(self, record: Record, attempt: job_pb2.Attempt, evidence: AttemptEvidence) -> None:
        self.ending[record.id] += 1
        self._background.start(self._end(record, attempt, evidence))

    async def _end(self, record: Record, attempt: job_pb2.Attempt, evidence: AttemptEvidence) -> None:
        """Commit the end of an attempt, then let placement forget it. The job is not placed in between."""
        attempt = self.failure_classifier.classify_attempt(attempt, evidence)
        retrying, latency = self.failure_classifier.retrying, latency_now(record)
        try:
            news = await self.job_store.change_with_retry(
                record, lambda stored: apply_end(stored, attempt, retrying, record.start_prediction, latency)
            )
        finally:
            self.ending[record.id] -= 1
            if not self.ending[record.id]:
                del self.ending[record.id]
            self.state.events.changed()
        if news:
            self.failure_classifier.count_failure(attempt)
            log.info("attempt_ended", job=record.id, attempt=attempt.number, phase=record.phase.value)
            ENDED.add(state=specs.ATTEMPT_STATES.names[attempt.state], phase=record.phase.value)
            self.observations.ended(record, attempt)
            self.pre_runs.drop(record.id)
        await fail_points.reach("queue.end_kept")
        self._schedule_forget(attempt)

    def _schedule_forget(self, attempt: job_pb2.Attempt) -> None:
        self._forget[attempt.job_id, attempt.number] = None
        self._forgetting.set()

    async def forget(self) -> None:
        """Acknowledge ended attempts to placement forever, so that it forgets them; failed calls are retried."""
        while True:
            await self._forgetting.wait()
            await asyncio.sleep(FORGET_SECONDS)  # batches many ends into one call
            self._forgetting.clear()
            gone = list(self._forget)[:FORGET_MAX]
            request = placement_pb2.ForgetAttemptsRequest(
                attempts=[placement_pb2.Victim(job_id=job_id, number=number) for job_id, number in gone],
                term=self._term,
            )
            try:
                await self.placement.ForgetAttempts(request)
            except grpc.aio.AioRpcError as error:
                log.info("forget_delayed", attempts=len(gone), error=errors.from_error(error).message)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                for key in gone:
                    self._forget.pop(key, None)
            if self._forget:
                self._forgetting.set()

    async def stop(self, record: Record, number: int, reason: StopReason) -> None:
        """Order the stop that the owner of a job wants, until placement takes the order; the end arrives as an event.

        The watch of attempts may go on while a call is lost, so that no event would remind the queue of the order.
        """
        order = (record.id, number, reason)
        if order in self._stop_orders:
            return
        self._stop_orders.add(order)
        try:
            wait_seconds = RETRY_SECONDS
            while record.attempt_number <= number and (record.wish or not record.phase.holds_resources):
                try:
                    await self.order_stop(record, number, reason)
                    return
                except grpc.aio.AioRpcError as error:
                    log.info("stop_delayed", job=record.id, error=errors.from_error(error).message)
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(STOP_RETRY_SECONDS_MAX, wait_seconds * 2)
        finally:
            self._stop_orders.discard(order)

    def change_time_limit(self, record: Record) -> None:
        """Send placement the new time limit of a job with resources, again until it is accepted or the attempt ends."""
        if record.phase.holds_resources:
            self._background.start(self._tell_time_limit(record, record.attempt_number))

    async def _tell_time_limit(self, record: Record, number: int) -> None:
        wait_seconds = RETRY_SECONDS
        while record.attempt_number == number and record.phase.holds_resources:
            change = placement_pb2.ChangedTimeLimit()
            if record.job.spec.HasField("time_limit"):
                change.limit.CopyFrom(record.job.spec.time_limit)
            advice = placement_pb2.Advice(job_id=record.id, number=number, time_limit=change)
            try:
                await self.placement.AdviseAttempts(placement_pb2.AdviseAttemptsRequest(advice=[advice]))
                return
            except grpc.aio.AioRpcError as error:
                log.info("time_limit_delayed", job=record.id, error=errors.from_error(error).message)
            await asyncio.sleep(wait_seconds)
            wait_seconds = min(STOP_RETRY_SECONDS_MAX, wait_seconds * 2)

    async def order_stop(self, record: Record, number: int, reason: StopReason, detail: str = "") -> None:
        """Order the stop of a job's attempt; placement ignores an ended one.

        Raises:
            AioRpcError: placement is unavailable.
        """
        request = placement_pb2.StopAttemptsRequest(
            attempts=[placement_pb2.Victim(job_id=record.id, number=number)],
            reason=specs.STOP_REASONS.to_wire(reason),
            detail=detail,
            term=self._term,
        )
        await self.placement.StopAttempts(request)

    def _handle_progress(self, job_progress: placement_pb2.JobProgress) -> None:
        record = self.state.records.get(job_progress.job_id)
        if record is None or record.phase.ended:
            return
        launch = job_progress.progress.launch
        if launch or not job_progress.progress.ByteSize():  # the program does not run yet
            record.job.progress.launch = launch
            if not record.job.progress.ByteSize():
                record.job.ClearField("progress")
            return
        if record.job.attempt.pre_run:
            self.pre_runs.progressed(record, job_progress.progress)
            return  # it is not progress of the job itself
        record.job.progress.CopyFrom(job_progress.progress)
        self.state.resize_meter.progressed(record, time.time())
        self.observations.progressed(record)
        self.profiles.progressed(record)

    async def follow_capacity(self) -> None:
        """Refresh the cluster's capacity after changes, forever; many changes make one call."""
        while True:
            await self._capacity_changed.wait()
            self._capacity_changed.clear()
            await self._refresh_capacity()

    async def _refresh_capacity(self) -> None:
        """Ask for the cluster's capacity. Answers may overtake each other: an older one is dropped."""
        self._capacity_asked += 1
        number = self._capacity_asked
        try:
            response = await self.placement.GetCapacity(placement_pb2.GetCapacityRequest())
        except grpc.aio.AioRpcError as error:
            log.info("capacity_read_failed", error=errors.from_error(error).message)
            self._capacity_changed.set()
            await asyncio.sleep(RETRY_SECONDS)
            return
        if number < self._capacity_known:
            return
        self._capacity_known = number
        self.state.capacity = Resources.of(response.capacity, "total_")
        self.state.shapes = tuple(specs.shape_from_wire(shape) for shape in response.shapes)
        self.state.elastic = response.elastic
        self.state.events.changed()


def wished_stop_reason(record: Record) -> StopReason:
    """Return the stop reason for a job's wish."""
    cancelled = record.stored.wish == job_pb2.JOB_PHASE_CANCELLED
    return StopReason.CANCELLED if cancelled else StopReason.SUSPENDED
