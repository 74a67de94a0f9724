"""Estimates of Slurm's jobs: the predictor learns from those that ended, and is asked about the others.

Where jobs' output is read, the progress of a running job says how long it will still take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence

import grpc
import structlog

from cotenant.codec import errors, estimates, specs
from cotenant.core.model.estimate import Estimate
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.services.slurm.messages import job_message
from cotenant.services.slurm.output_progress import OutputProgress
from cotenant.services.slurm.placement_view import cores_of, spec_of
from cotenant.services.slurm.records import SUCCEEDED, Picture, SlurmJob
from cotenant.v1 import job_pb2, predictor_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

QUERIES_MAX = 250  # in one call
RENEWED_MAX = 2_000  # estimates that are renewed after one reading
RENEW_SECONDS = 30.0
DEADLINE_SECONDS = 5.0
OBSERVATIONS_MAX = 10_000  # that wait for the predictor; older ones are dropped

Wire = predictor_pb2.Estimate


class Predictions:
    """The last estimate of each job that waits or runs."""

    def __init__(
        self,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
        observations: observation_service_pb2_grpc.ObservationServiceAsyncStub,
        progress: OutputProgress | None = None,
    ) -> None:
        self._predictor, self._observations, self.progress = predictor, observations, progress
        self._known: dict[str, tuple[Wire, float, float]] = {}  # with the run time and the moment of the query
        self._ended: deque[observation_pb2.Observation] = deque(maxlen=OBSERVATIONS_MAX)

    def ended(self, jobs: Sequence[SlurmJob], picture: Picture, now: float) -> None:
        """Note jobs that ended after a run, for the predictor to learn from."""
        for job in jobs:
            ran = job.ran_seconds(now)
            if not job.placed or ran <= 0 or job.state == "NODE_FAIL":
                continue
            spec = spec_of(job, picture)
            observation = observation_pb2.Observation(
                job_id=f"slurm-{job.id}-{int(job.submitted_seconds)}",
                number=job.restarts + 1,
                spec=specs.spec_to_wire(spec),
                submitter=job.user,
                succeeded=job.state in SUCCEEDED,
                run_time=specs.duration(ran),
                time=specs.timestamp(job.ended_seconds or now),
                submit_time=specs.timestamp(job.submitted_seconds),
            )
            observation.allocation.cores = -(-cores_of(job.cpus, picture) // len(job.placed))
            observation.allocation.gpu_milli = 1000 * max(len(one.gpus) for one in job.placed)
            self._ended.append(observation)

    async def send(self) -> None:
        """Send what was noted; keep it while the predictor does not take it."""
        if self._ended:  # what was unpredictable may no longer be
            self._known = {job_id: known for job_id, known in self._known.items() if known[0].predictable}
        while self._ended:
            batch = [self._ended[place] for place in range(min(len(self._ended), QUERIES_MAX))]
            try:
                request = observation_pb2.ObserveRequest(observations=batch)
                answer = await self._observations.Observe(request, timeout=DEADLINE_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.warning("observations_delayed", count=len(self._ended), error=errors.from_error(error).message)
                return
            for why in answer.rejected:
                log.info("observation_rejected", why=why)
            for _ in batch:
                self._ended.popleft()

    async def renew(self, picture: Picture) -> None:
        """Request the estimates that are missing or old, those of tasks of one array that have not run only once."""
        now = time.time()
        active = {job.id: job for job in picture.jobs.values() if not job.ended}
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in active}
        alike: dict[str, list[SlurmJob]] = {}
        for job in active.values():
            known = self._known.get(job.id)
            if known is None or now - known[2] > RENEW_SECONDS:
                key = f"array {job.array}" if job.waits and job.task is not None else job.id
                alike.setdefault(key, []).append(job)
        groups = list(alike.values())[:RENEWED_MAX]
        for first in range(0, len(groups), QUERIES_MAX):
            part = groups[first : first + QUERIES_MAX]
            queries = [_query(jobs[0], picture, now) for jobs in part]
            try:
                request = predictor_pb2.EstimateRequest(queries=queries)
                answer = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.warning("predictor_unavailable", error=errors.from_error(error).message)
                return
            for jobs, estimate in zip(part, answer.estimates, strict=True):
                for job in jobs:
                    self._known[job.id] = estimate, job.ran_seconds(now), now
            await asyncio.sleep(0)

    async def of_spec(self, spec: job_pb2.JobSpec, submitter: str) -> Estimate:
        """Return the estimate of a job that was not submitted."""
        query = predictor_pb2.EstimateQuery(job_id="hypothetical", spec=spec, submitter=submitter)
        try:
            request = predictor_pb2.EstimateRequest(queries=[query])
            answer = await self._predictor.Estimate(request, timeout=DEADLINE_SECONDS)
        except grpc.aio.AioRpcError:
            return Estimate()
        return estimates.estimate_from_wire(answer.estimates[0])

    def wire(self, job: SlurmJob, now: float) -> Wire | None:
        """Return the estimate of a job, less what it has run since; what its progress says goes first."""
        track = self.progress.track(job) if self.progress else None
        if track and job.runs and (by_progress := track.estimate(now, job.ran_seconds(now))):
            return estimates.estimate_to_wire(job.id, by_progress)
        known = self._known.get(job.id)
        if known is None:
            return None
        estimate = Wire()
        estimate.CopyFrom(known[0])
        estimate.job_id = job.id
        ran = max(0.0, job.ran_seconds(now) - known[1])
        for field in ("remaining", "remaining_p10", "remaining_p90"):
            if estimate.HasField(field):
                left = max(0.0, specs.seconds(getattr(estimate, field)) - ran)
                getattr(estimate, field).CopyFrom(specs.duration(left))
        return estimate

    def all(self, picture: Picture, now: float) -> Mapping[str, Estimate]:
        """Return the estimates of all jobs that wait or run."""
        found = {job_id: self.wire(job, now) for job_id in self._known if (job := picture.jobs.get(job_id))}
        by_progress = self.progress.estimates(picture, now) if self.progress else {}
        known = {job_id: estimates.estimate_from_wire(one) for job_id, one in found.items() if one is not None}
        return {**known, **by_progress}


def _query(job: SlurmJob, picture: Picture, now: float) -> predictor_pb2.EstimateQuery:
    message = job_message(job, spec_of(job, picture), picture, now, None)
    return predictor_pb2.EstimateQuery(
        job_id=job.id,
        spec=message.spec,
        attained_gpu_seconds=message.attained_gpu_seconds,
        run_time=specs.duration(job.ran_seconds(now)),
        submitter=job.user,
        submit_time=message.create_time if message.HasField("create_time") else None,
    )
