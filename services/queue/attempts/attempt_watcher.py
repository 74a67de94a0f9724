"""Follows placement: what becomes of attempts becomes of jobs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter

import grpc
import structlog

from cotenant import fail_points, telemetry
from cotenant.codec import errors, specs
from cotenant.core.model.job_table import Capacity
from cotenant.core.model.lifecycle import AttemptState, Phase, StopReason
from cotenant.rpc.task_group import Background
from cotenant.services.queue.attempts.pre_runs import PreRuns
from cotenant.services.queue.estimates.observation_sink import Observations
from cotenant.services.queue.estimates.profiling import Profiles
from cotenant.services.queue.jobs.desired_state import hold_back
from cotenant.services.queue.jobs.failure_classifier import Failing
from cotenant.services.queue.jobs.job_store import Keeper
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, take_attempt
from cotenant.v1 import job_pb2, placement_service_pb2_grpc
from cotenant.v1 import placement_service_pb2 as placement_pb2

log = structlog.get_logger()

RETRY_SECONDS = 0.3
AWAY_TOLD_SECONDS = 10.0  # between two lines that say that placement is away still
FORGET_SECONDS = 0.05
FORGET_MAX = 1_000
TAKEN_AT_ONCE = 100  # attempts, between two looks at whether others need the queue

ENDED = telemetry.counter("cotenant.queue.attempts_ended", "{attempt}", "Ends of attempts, by what became of jobs.")


class Follower:
    """Keeps jobs in step with placement's attempts."""

    def __init__(
        self,
        state: State,
        keeper: Keeper,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        observations: Observations,
        profiles: Profiles,
        failing: Failing,
        term: int = 0,
    ) -> None:
        self.state, self.keeper, self.placement = state, keeper, placement
        self.observations, self.profiles, self.failing = observations, profiles, failing
        self.synced = asyncio.Event()  # set while placement can be heard
        self.connections = 0  # so many times placement could be heard anew
        self.ending: Counter[str] = Counter()  # jobs whose attempt has ended, which is being committed
        self._term, self._revision = term, 0
        self._forget: dict[tuple[str, int], None] = {}
        self._forgetting = asyncio.Event()
        self._capacity_changed = asyncio.Event()
        self.capacity_changes = 0  # of which placement has told
        self._background = Background()
        self.pre_runs = PreRuns(keeper, self.order_stop, self._background)

    async def run(self) -> None:
        """Follow for ever, through placement's restarts."""
        told_time = -math.inf
        while True:
            try:
                watch = self.placement.WatchAttempts(placement_pb2.WatchAttemptsRequest(after_revision=self._revision))
                async for event in watch:
                    await self._take(event)
            except grpc.aio.AioRpcError as error:
                if self.synced.is_set() or time.monotonic() - told_time >= AWAY_TOLD_SECONDS:
                    log.warning("placement_away", error=errors.from_error(error).message)
                    told_time = time.monotonic()
            except Exception:  # something in it was not understood: a whole picture makes up for what was missed
                self._revision = 0
                raise
            finally:
                self.synced.clear()
            await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """Stop whatever was begun."""
        await self._background.close()

    async def _take(self, event: placement_pb2.WatchAttemptsResponse) -> None:
        self.capacity_changes += event.capacity_changed
        if event.capacity_changed and event.snapshot:
            await self._refresh_capacity()
        elif event.capacity_changed:
            self._capacity_changed.set()
        for place, attempt in enumerate(event.attempts, 1):
            self.take_attempt(attempt)
            if not place % TAKEN_AT_ONCE:  # a whole picture may be of ten thousand
                await asyncio.sleep(0)
        if event.snapshot:
            self._take_absent({attempt.job_id for attempt in event.attempts}, event.revision)
        for told in event.progress:
            self._take_progress(told)
        for report in event.profiled:
            self.profiles.take(report)
        self._revision = max(self._revision, event.revision)
        if not self.synced.is_set():
            self.synced.set()
            self.connections += 1
            self.state.wake()

    def _take_absent(self, present: set[str], revision: int) -> None:
        """What holds something in our eyes but is unknown to placement has been lost.

        An attempt that was committed at the picture's revision or later is only too young to be in it.
        """
        for record in list(self.state.records.values()):
            if record.phase.ended or record.id in present:
                continue
            if record.wish and not record.attempt_number:  # what it was to be stopped for had been over all along
                self._background.start(self._hold_back(record))
            elif (record.phase.holds_resources or record.wish) and record.job.attempt.epoch < revision:
                lost = job_pb2.Attempt()
                lost.CopyFrom(record.job.attempt)
                lost.state = specs.ATTEMPT_STATES.to_wire(AttemptState.LOST)
                lost.message = "placement does not know this attempt any more"
                lost.end_time.FromNanoseconds(time.time_ns())
                self._end_soon(record, lost)

    async def _hold_back(self, record: Record) -> None:
        """Let a job be what is wished of it, if placement's record still says that it holds nothing."""
        await self.keeper.insist(
            record,
            lambda stored: bool(stored.wish) and hold_back(stored, stored.wish),
            instead=lambda stored: False,
        )

    def take_attempt(self, attempt: job_pb2.Attempt) -> None:
        """Let a job follow its attempt."""
        record = self.state.records.get(attempt.job_id)
        ended = specs.ATTEMPT_STATES.from_wire(attempt.state).ended
        if record is None:
            log.warning("attempt_of_unknown_job", job=attempt.job_id)
            if ended:
                self._forget_soon(attempt)
            return
        if ended:
            self._end_soon(record, attempt)
        elif not record.lock.locked():
            self._follow(record, attempt)
        else:
            self._background.start(self._follow_later(record, attempt))

    async def _follow_later(self, record: Record, attempt: job_pb2.Attempt) -> None:
        async with record.lock:
            self._follow(record, attempt)

    def _follow(self, record: Record, attempt: job_pb2.Attempt) -> None:
        """Take in that an attempt was assigned, runs or stops. None of this is kept: placement keeps it."""
        if take_attempt(record.stored, attempt):
            self.state.sync(record)
        if record.phase is Phase.SUSPENDED or record.phase.ended:
            reason = StopReason.SUSPENDED if record.phase is Phase.SUSPENDED else StopReason.CANCELLED
            self._background.start(self.stop(record, attempt.number, reason))
        elif record.stored.wish and record.phase is not Phase.STOPPING:
            self._background.start(self.stop(record, attempt.number, wished(record)))
        self.pre_runs.follow(record)

    def _end_soon(self, record: Record, attempt: job_pb2.Attempt) -> None:
        self.ending[record.id] += 1
        self._background.start(self._end(record, attempt))

    async def _end(self, record: Record, attempt: job_pb2.Attempt) -> None:
        """Take in that an attempt has ended, durably; then let placement forget it. It is not placed meanwhile."""
        attempt = self.failing.classified(attempt)
        retrying = self.failing.retrying
        try:
            news = await self.keeper.insist(record, lambda stored: take_attempt(stored, attempt, retrying))
        finally:
            self.ending[record.id] -= 1
            if not self.ending[record.id]:
                del self.ending[record.id]
            self.state.wake()
        if news:
            self.failing.note(attempt)
            log.info("attempt_ended", job=record.id, attempt=attempt.number, phase=record.phase.value)
            ENDED.add(state=specs.ATTEMPT_STATES.names[attempt.state], phase=record.phase.value)
            self.observations.ended(record, attempt)
            self.pre_runs.drop(record.id)
        await fail_points.reach("queue.end_kept")
        self._forget_soon(attempt)

    def _forget_soon(self, attempt: job_pb2.Attempt) -> None:
        self._forget[attempt.job_id, attempt.number] = None
        self._forgetting.set()

    async def forget(self) -> None:
        """Let placement forget what has ended, for ever; what it cannot be told now it is told later."""
        while True:
            await self._forgetting.wait()
            await asyncio.sleep(FORGET_SECONDS)  # many ends make one call
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
        """Ask placement to stop a job's attempt; the answer comes as any news of attempts."""
        try:
            await self.order_stop(record, number, reason)
        except grpc.aio.AioRpcError as error:
            log.info("stop_delayed", job=record.id, error=errors.from_error(error).message)

    async def order_stop(self, record: Record, number: int, reason: StopReason, detail: str = "") -> None:
        """Have a job's attempt stopped; one that is over is passed over.

        Raises:
            AioRpcError: placement is away.
        """
        request = placement_pb2.StopAttemptsRequest(
            attempts=[placement_pb2.Victim(job_id=record.id, number=number)],
            reason=specs.STOP_REASONS.to_wire(reason),
            detail=detail,
            term=self._term,
        )
        await self.placement.StopAttempts(request)

    def _take_progress(self, told: placement_pb2.JobProgress) -> None:
        record = self.state.records.get(told.job_id)
        if record is None or record.phase.ended:
            return
        if record.job.attempt.pre_run:
            self.pre_runs.progressed(record, told.progress)
            return  # nor does it say how far the job has come
        record.job.progress.CopyFrom(told.progress)
        self.observations.progressed(record)
        self.profiles.progressed(record)

    async def follow_capacity(self) -> None:
        """Learn what the cluster has whenever that changes, for ever; many changes make one call."""
        while True:
            await self._capacity_changed.wait()
            self._capacity_changed.clear()
            await self._refresh_capacity()

    async def _refresh_capacity(self) -> None:
        try:
            response = await self.placement.GetCapacity(placement_pb2.GetCapacityRequest())
        except grpc.aio.AioRpcError as error:
            log.info("capacity_unknown", error=errors.from_error(error).message)
            self._capacity_changed.set()
            await asyncio.sleep(RETRY_SECONDS)
            return
        total = response.capacity
        self.state.capacity = Capacity(total.total_gpu_milli, total.total_cores, total.total_memory_bytes)
        self.state.shapes = tuple(specs.shape_from_wire(shape) for shape in response.shapes)
        self.state.elastic = response.elastic
        self.state.wake()


def wished(record: Record) -> StopReason:
    """Why a job that has a wish is to be stopped."""
    cancelled = record.stored.wish == job_pb2.JOB_PHASE_CANCELLED
    return StopReason.CANCELLED if cancelled else StopReason.SUSPENDED
