"""Why jobs wait and when they start, computed once per picture, outside of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.codec import specs
from cotenant.core.forecast.start_forecast import Forecast
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal, about, format_duration_range, plural
from cotenant.core.placement.unschedulable import request_in_words
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.cycle import Start
from cotenant.services.slurm import planning
from cotenant.services.slurm.cluster_watch import ClusterWatch
from cotenant.services.slurm.planning import Scene
from cotenant.services.slurm.predictions import Predictions
from cotenant.services.slurm.records import SlurmJob
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

BUDGET_SECONDS = 3.0
ESTIMATES_SECONDS_MAX = 5.0  # a scene is renewed after this time, with the newest estimates
NAMED_MAX = 5
SEED = 0


@dataclass(frozen=True)
class Answers:
    """A scene, and why each of its waiting jobs waits."""

    scene: Scene
    refusals: dict[str, Refusal]


class StartTimes:
    """Answers questions about waiting jobs, by the last picture."""

    def __init__(self, watch: ClusterWatch, predictions: Predictions, policy: PlacementPolicy) -> None:
        self._watch, self._predictions, self._policy = watch, predictions, policy
        self._answers: Answers | None = None
        self._lock = asyncio.Lock()  # policies and ledgers are used by one thread at a time

    async def answers(self) -> Answers:
        """Return the scene of the last picture with the reasons."""
        async with self._lock:
            picture, now = self._watch.picture, time.time()
            known = self._answers
            if known and known.scene.picture is picture and now - known.scene.now < ESTIMATES_SECONDS_MAX:
                return known
            estimates = self._predictions.all(picture, now)

            def compute() -> Answers:
                scene = planning.scene_of(picture, now, estimates)
                return Answers(scene, planning.refusals(scene, self._policy, np.random.default_rng(SEED)))

            self._answers = await asyncio.to_thread(compute)
            return self._answers

    async def forecast(
        self, scene: Scene, wanted: Sequence[str], more: Sequence[tuple[Gang, SlurmJob]] = (), draws: int = 20
    ) -> Forecast:
        """Return when jobs start."""
        until = time.monotonic() + BUDGET_SECONDS
        async with self._lock:
            return await asyncio.to_thread(
                lambda: planning.forecast_starts(
                    scene,
                    self._policy,
                    np.random.default_rng(SEED),
                    wanted,
                    lambda: time.monotonic() > until,
                    more,
                    draws,
                )
            )

    async def place(self, scene: Scene, gang: Gang, job: SlurmJob) -> tuple[Start | Refusal, int]:
        """Return where a hypothetical job starts now, or why not; and its position."""
        async with self._lock:
            return await asyncio.to_thread(
                lambda: planning.place_hypothetical(scene, gang, job, self._policy, np.random.default_rng(SEED))
            )


# Words ---------------------------------------------------------------------------------------------------------


def forecast_message(job_id: str, forecast: Forecast) -> job_pb2.StartForecast | None:
    """Return the forecast of a job as the API has it; None if there is none."""
    expected = forecast.expected.get(job_id)
    if expected is None:
        return None
    message = job_pb2.StartForecast(
        job_id=job_id,
        ending_job_ids=expected.ends,
        ending_count=expected.ends_count,
        draws=forecast.draws,
        of_unknown=expected.of_unknown,
    )
    figures = {
        "start": expected.seconds,
        "start_p10": expected.p10_seconds,
        "start_p90": expected.p90_seconds,
        "finish": expected.finish_seconds,
    }
    for field, seconds in figures.items():
        if seconds <= specs.DURATION_SECONDS_MAX and not expected.of_unknown:
            getattr(message, field).CopyFrom(specs.duration(seconds))
    message.reached.CopyFrom(specs.duration(min(forecast.reached_seconds, specs.DURATION_SECONDS_MAX)))
    return message


def outlook(message: job_pb2.StartForecast, scene: Scene) -> str:
    """Return in one sentence when a job starts and what it waits for."""
    why = _ends(message, scene)
    if message.of_unknown:
        return f"start time unknown: it depends on jobs of unknown length{why}"
    if not message.HasField("start"):
        return f"does not start within the {about(specs.seconds(message.reached))} of the forecast"
    start = specs.seconds(message.start)
    if not start:
        return "starts in the next cycle"
    high = specs.seconds(message.start_p90) if message.HasField("start_p90") else None
    low = specs.seconds(message.start_p10)
    spread = "" if low == start == high else f" ({format_duration_range(low, high)})"
    return f"starts in about {about(start)}{spread}{why}"


def _ends(message: job_pb2.StartForecast, scene: Scene) -> str:
    if not message.ending_job_ids:
        return ""
    first = ahead(scene, message.ending_job_ids[0])
    name = f"{first.job_id} ({first.name})" if first.name else first.job_id
    others = message.ending_count - 1
    return f", once {name}" + (f" and {plural(others, 'other job')} have ended" if others > 0 else " has ended")


def slurms_estimate(job: SlurmJob, now: float) -> str:
    """Return when Slurm itself expects a waiting job to start; "" if it does not say."""
    if not job.waits or job.started_seconds <= now:
        return ""
    return f"Slurm itself plans its start in {about(job.started_seconds - now)}, by time limits"


def ahead(scene: Scene, job_id: str) -> pb.JobAhead:
    """Return a job that another job waits for, and what it requests."""
    message = pb.JobAhead(job_id=job_id)
    job, spec = scene.picture.jobs.get(job_id), scene.specs.get(job_id)
    if job and spec:
        role = spec.roles[0]
        count = f"{plural(role.replicas, 'replica')} of " if role.replicas > 1 else ""
        message.name, message.needs, message.running = job.name, count + request_in_words(role.request), job.runs
    return message
