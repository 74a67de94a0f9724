"""Sends observations to the predictor: rates as they arrive, run times at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
import structlog

from cotenant.codec import errors, objectives, specs
from cotenant.core.model.node import NodeShape
from cotenant.core.placement import candidate_allocations
from cotenant.core.prediction.own_rate import RateTrack
from cotenant.core.prediction.rate_windows import RateWindows, Window
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.services.queue.jobs.queue_events import QueueEvents
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

BATCH_SECONDS = 0.5
BATCH_MAX = 1_000
WAITING_MAX = 10_000
RETRY_SECONDS = 2.0
WINDOW_SECONDS = 10.0


class ObservationSink:
    """Collects observations and sends them in batches.

    Observations are kept while the predictor is unavailable; beyond a limit new ones are dropped. A loss does no harm:
    observations only improve estimates.
    """

    def __init__(
        self,
        predictor: observation_service_pb2_grpc.ObservationServiceAsyncStub,
        events: QueueEvents,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self._predictor, self._events, self._window_seconds = predictor, events, window_seconds
        self.windows = RateWindows(window_seconds, settle_seconds=window_seconds / 2)
        self._waiting: list[observation_pb2.Observation] = []
        self._last: dict[str, float] = {}
        self._wake = asyncio.Event()

    async def send(
        self, observations: Sequence[observation_pb2.Observation], timeout_seconds: float | None = None
    ) -> observation_pb2.ObserveResponse:
        """Send observations at once, and return the predictor's answer.

        Raises:
            AioRpcError: the predictor is unavailable.
        """
        request = observation_pb2.ObserveRequest(observations=observations)
        answer: observation_pb2.ObserveResponse = await self._predictor.Observe(request, timeout=timeout_seconds)
        return answer

    async def run(self) -> None:
        """Send forever."""
        away = False
        while True:
            await self._wake.wait()
            await asyncio.sleep(RETRY_SECONDS if away else BATCH_SECONDS)
            self._wake.clear()
            batch = self._waiting[:BATCH_MAX]
            try:
                response = await self.send(batch)
            except grpc.aio.AioRpcError as error:
                why = errors.from_error(error).message
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    if not away:
                        log.warning("observations_delayed", count=len(self._waiting), error=why)
                    away = True
                    self._wake.set()
                    continue
                log.warning("observations_lost", count=len(batch), error=why)
            else:
                for why in response.rejected:
                    log.info("observation_rejected", why=why)
                self._events.profile_wanted(response.profile_wanted)
            away = False
            del self._waiting[: len(batch)]
            if self._waiting:
                self._wake.set()

    def progressed(self, record: Record) -> None:
        """Observe a job's progress: each ended rate window, and a sample of its losses and batches."""
        now, progress = time.time(), record.job.progress
        self._track(record, now)
        window = self._window(record)
        sampled = progress.HasField("loss") or progress.batch_size > 0
        if window is None and not (sampled and now - self._last.get(record.id, 0.0) >= self._window_seconds):
            return
        self._last[record.id] = now
        observation = observation_of(record, record.job.attempt)
        observation.phase = progress.phase
        if window or progress.HasField("loss"):
            observation.step = progress.step
        if window:
            observation.rate_per_second = window.rate_per_second
            observation.window.CopyFrom(specs.duration(window.seconds))
        if progress.HasField("loss"):
            observation.loss = progress.loss
        if progress.batch_size > 0:
            observation.batch_size = progress.batch_size
            observation.batch_time.CopyFrom(progress.batch_time)
        observation.time.CopyFrom(progress.update_time)
        self._add(observation)
        self._events.observed(record, now)

    def _track(self, record: Record, now: float) -> None:
        """Record the job's own rate; request a new estimate if the rate begins again, or is known much better."""
        progress, track = record.job.progress, record.rate_track
        progress.ClearField("own_rate")
        if not progress.HasField("step_time"):
            return
        if track is None:
            track = record.rate_track = RateTrack(self._window_seconds, settle_seconds=self._window_seconds / 2)
        before = track.version
        throttle, _, _ = progress.throttle.partition(":")  # without the reason
        under, profiled = (*_holding(record.job.attempt), throttle), self.windows.holds(record.id)
        track.take(under, progress.step, specs.seconds(progress.step_time), now, profiled=profiled)
        own_rate_to_wire(record, now, progress)
        if track.version != before:
            self._events.observed(record, now)

    def _window(self, record: Record) -> Window | None:
        progress = record.job.progress
        if not progress.HasField("step_time"):
            return None
        number, cores, changing = _holding(record.job.attempt)
        under = number, cores, changing, progress.phase
        step = progress.phase_step if progress.phase else progress.step
        window = self.windows.take(record.id, under, step, specs.seconds(progress.step_time))
        return None if changing else window

    def ended(self, record: Record, attempt: job_pb2.Attempt) -> None:
        """Observe the end of a job: its run time predicts similar jobs."""
        self._last.pop(record.id, None)
        self.windows.drop(record.id)
        if record.phase.ended:
            record.rate_track = None
        if not record.phase.ended or not attempt.HasField("start_time") or attempt.pre_run:
            return
        observation = observation_of(record, attempt)
        ran = specs.seconds(record.job.run_time) - sum(map(_ran_before, record.job.past_attempts))
        observation.run_time.CopyFrom(specs.duration(max(0.0, ran)))
        observation.succeeded = record.job.phase == job_pb2.JOB_PHASE_SUCCEEDED
        observation.time.CopyFrom(attempt.end_time)
        self._add(observation)

    def _add(self, observation: observation_pb2.Observation) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(observation)
            self._wake.set()


def _holding(attempt: job_pb2.Attempt) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return what a job's rate depends on: its attempt, its cores, and those that it is changing to."""
    tasks = [task for part in attempt.allocations for task in part.tasks]
    changing = tuple(task.target_cores for task in tasks if task.target_cores)
    return attempt.number, tuple(len(task.core_ids) for task in tasks), changing


def own_rate_to_wire(record: Record, now: float, progress: job_pb2.Progress) -> None:
    """Write the rate that a job has shown by now into its progress."""
    measured = record.rate_track.measured(now) if record.rate_track else None
    if measured is None:
        return
    runs = record.job.phase == job_pb2.JOB_PHASE_RUNNING
    progress.own_rate.CopyFrom(
        job_pb2.OwnRate(
            rate_per_second=measured.rate_per_second,
            windows=measured.windows if runs else 0,
            spread=measured.spread,
            gap=specs.duration(measured.gap_seconds),
            silence=specs.duration(measured.silent_seconds if runs else 0.0),
        )
    )


def observation_of(record: Record, attempt: job_pb2.Attempt) -> observation_pb2.Observation:
    """Return a new observation of a job, with the allocation of an attempt."""
    observation = observation_pb2.Observation(
        job_id=record.id,
        number=attempt.number,
        spec=record.job.spec,
        submitter=record.job.submitter,
        submit_time=record.job.create_time,
    )
    observation.allocation.CopyFrom(allocation_of(attempt))
    return observation


def query_of(record: Record, shapes: Sequence[NodeShape], now: float) -> predictor_pb2.EstimateQuery:
    """Return the query for a job now, with candidate allocations that are worth considering on these node shapes.

    A running job is estimated for its present GPU type.
    """
    job = record.job
    useful = record.estimate.cores_useful or None if record.estimate else None
    query = predictor_pb2.EstimateQuery(
        job_id=record.id,
        spec=job.spec,
        candidates=[
            objectives.candidate_to_wire(one)
            for one in candidate_allocations.standard_candidates(record.spec, shapes, useful)
        ],
        attained_gpu_seconds=record.attained_gpu_seconds(now),
        run_time=specs.duration(record.ran_seconds(now)),
        progress=job.progress,
        submitter=job.submitter,
        submit_time=job.create_time if job.HasField("create_time") else None,
        gpu_type=allocation_of(job.attempt).gpu_type if record.phase.holds_resources else "",
    )
    own_rate_to_wire(record, now, query.progress)
    return query


def allocation_of(attempt: job_pb2.Attempt) -> predictor_pb2.CandidateAllocation:
    """Return what each replica holds; with several roles, the role with the most GPUs.

    Mixed GPU types across nodes count as an unknown type.
    """
    tasks = [task for part in attempt.allocations for task in part.tasks]
    gpu_milli = max((_gpu_milli(task) for task in tasks), default=0)
    types = {part.gpu_type for part in attempt.allocations if part.gpu_type}
    return predictor_pb2.CandidateAllocation(
        cores=max((len(task.core_ids) for task in tasks if _gpu_milli(task) == gpu_milli), default=0),
        gpu_milli=gpu_milli,
        nodes=len(attempt.allocations),
        gpu_type=types.pop() if len(types) == 1 else "",
    )


def _ran_before(attempt: job_pb2.Attempt) -> float:
    """Return the run time of a pre-run in seconds; 0 for other attempts."""
    if not attempt.pre_run or not attempt.HasField("start_time"):
        return 0.0
    return max(0.0, specs.seconds(attempt.end_time) - specs.seconds(attempt.start_time))


def _gpu_milli(task: resources_pb2.TaskAllocation) -> int:
    return sum(share.milli for share in task.gpus)
