"""Why Slurm's jobs wait and when they start, by the core's cycle and forecast. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.forecast.forecast_state import ForecastState, QueueSnapshot, RunningEntry, WaitingEntry
from cotenant.core.forecast.start_forecast import DRAWS, WAITING_MAX, Forecast, forecast
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec, Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.unschedulable import no_place
from cotenant.core.policy.cluster_view import RunningJob
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.prediction.remaining_time import RUN_SECONDS_UNKNOWN, RemainingTime, remaining_time_of
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.reservations import ReservationRules
from cotenant.services.slurm.placement_view import PRIORITY_MAX, gang_of, in_slurms_order, ledger_of, spec_of
from cotenant.services.slurm.records import Picture, SlurmJob
from cotenant.services.slurm.wait_reasons import external_reason

BACKFILL = ReservationRules(after_seconds=0.0, most=1)  # later jobs do not delay the first that waits, as in Slurm
BEHIND_MAX = 100  # jobs behind the last one that is asked about, which may start before it
LIMITED = frozenset({Code.ARRAY_LIMIT})  # reasons that a forecast knows of


@dataclass(frozen=True)
class Scene:
    """The jobs of a picture as the core sees them: waiting ones in Slurm's order, and those that hold resources."""

    picture: Picture
    now: float
    ledger: Ledger
    held: Mapping[str, tuple[Holding, ...]]
    specs: Mapping[str, JobSpec]
    waiting: Sequence[SlurmJob]
    reasons: Mapping[str, Refusal]  # of jobs that wait for something else than their places
    estimates: Mapping[str, Estimate] = field(default_factory=dict)

    def gang(self, job: SlurmJob) -> Gang:
        """Return the gang of a job."""
        return gang_of(job, self.specs[job.id], self.picture, self.now, self.estimates.get(job.id, UNKNOWN))

    @property
    def ready(self) -> list[SlurmJob]:
        """The jobs that wait for places only, or for their turn in their array, in order."""
        return [job for job in self.waiting if job.id not in self.reasons or self.reasons[job.id].code in LIMITED]


def scene_of(picture: Picture, now: float, predicted: Mapping[str, Estimate]) -> Scene:
    """Return a picture as the core sees it, with what the predictor says of its jobs."""
    active = [job for job in picture.jobs.values() if not job.ended]
    estimates = {job.id: expected_of(job, predicted.get(job.id, UNKNOWN), now) for job in active}
    ledger, held = ledger_of(picture)
    waiting = in_slurms_order(picture)
    ranks = {priority: rank for rank, priority in enumerate(sorted({job.priority for job in waiting if job.priority}))}
    specs = {
        job.id: spec_of(job, picture, min(ranks.get(job.priority, 0), PRIORITY_MAX)) for job in picture.jobs.values()
    }
    reasons = {job.id: reason for job in waiting if (reason := external_reason(job))}
    return Scene(picture, now, ledger, held, specs, waiting, reasons, estimates)


def expected_of(job: SlurmJob, predicted: Estimate, now: float) -> Estimate:
    """Return the prediction within the job's time limit; without one, by the limit alone.

    A job of which only the limit is known is expected to use half of what is left of it, and in 8 of 10 cases between
    a tenth and all [R].

    >>> job = SlurmJob("17", 17, time_limit_seconds=600.0)
    >>> expected_of(job, Estimate(predictable=True, remaining_seconds=900), 0.0).remaining_seconds
    600.0
    >>> expected_of(job, UNKNOWN, 0.0).remaining_seconds
    300.0
    """
    if job.time_limit_seconds is None:
        return predicted
    left = max(1.0, job.time_limit_seconds - job.ran_seconds(now))
    if not predicted.predictable or predicted.remaining_seconds is None:
        return Estimate(True, 0.0, left / 2, left / 10, left, source="time limit")
    low, high = predicted.remaining_p10_seconds, predicted.remaining_p90_seconds
    return replace(
        predicted,
        remaining_seconds=min(predicted.remaining_seconds, left),
        remaining_p10_seconds=None if low is None else min(low, left),
        remaining_p90_seconds=left if high is None else min(high, left),
    )


def remaining_time(scene: Scene, job: SlurmJob, usual_seconds: float) -> RemainingTime:
    """Return how long a job will still run."""
    estimate = scene.estimates.get(job.id, UNKNOWN)
    return remaining_time_of(estimate, job.ran_seconds(scene.now), usual_seconds=usual_seconds)


def usual_seconds(scene: Scene) -> float:
    """Return the median run time of jobs with a predicted one."""
    totals = sorted(
        job.ran_seconds(scene.now) + (estimate.remaining_seconds or 0.0)
        for job in scene.picture.jobs.values()
        if not job.ended and (estimate := scene.estimates.get(job.id, UNKNOWN)).predictable
    )
    return totals[len(totals) // 2] if totals else RUN_SECONDS_UNKNOWN


def refusals(scene: Scene, policy: PlacementPolicy, rng: np.random.Generator) -> dict[str, Refusal]:
    """Return why each waiting job waits: for something of its own, for places, or for jobs before it."""
    ready = [job for job in scene.waiting if job.id not in scene.reasons][:WAITING_MAX]
    gangs = [scene.gang(job) for job in ready]
    plan = cycle.place(gangs, scene.ledger, policy, rng, cluster_view=view_of(scene), reserving=BACKFILL)
    found = dict(scene.reasons) | plan.refusals
    for start in plan.starts:
        found[start.gang.job_id] = Refusal(
            Code.NOT_YET_CONSIDERED, "it has room, and Slurm has not started it yet", "Slurm's next scheduling cycle"
        )
    for job in scene.waiting:
        if job.id not in found:
            found[job.id] = Refusal(Code.OUTRANKED, f"{WAITING_MAX:,} jobs are before it", "these jobs start")
    return found


def view_of(scene: Scene) -> ForecastState:
    """Return which jobs hold what now."""
    view = ForecastState(0.0)
    for holder in holders_of(scene):
        view.enter(holder)
    return view


def holders_of(scene: Scene) -> list[RunningEntry]:
    """Return the jobs that hold resources, with their remaining times."""
    usual, holders = usual_seconds(scene), []
    for job_id, holdings in scene.held.items():
        job = scene.picture.jobs[job_id]
        rest = remaining_time(scene, job, usual)
        gang = scene.gang(job)
        running = RunningJob(gang, holdings, -job.ran_seconds(scene.now), preemptible=False)
        holders.append(RunningEntry(job_id, holdings, rest, running_job=running, array=_array(job)))
    return holders


def snapshot_of(scene: Scene, ready: Sequence[tuple[Gang, SlurmJob]]) -> QueueSnapshot:
    """Return the state from which starts are forecast."""
    usual = usual_seconds(scene)
    waiters = [
        WaitingEntry(gang, remaining_time(scene, job, usual), _array(job), job.tasks_running_max)
        for gang, job in ready[:WAITING_MAX]
    ]
    return QueueSnapshot(scene.ledger, holders_of(scene), waiters, reserving=BACKFILL)


def _array(job: SlurmJob) -> str:
    return str(job.array) if job.array and job.tasks_running_max else ""


def forecast_starts(
    scene: Scene,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    wanted: Sequence[str],
    spent: Callable[[], bool],
    more: Sequence[tuple[Gang, SlurmJob]] = (),
    draws: int = DRAWS,
) -> Forecast:
    """Return when jobs start; `more` are hypothetical jobs, each before those with a lower priority of Slurm."""
    ready = [(scene.gang(job), job) for job in scene.ready]
    for gang, job in more:
        place = next((n for n, (_, other) in enumerate(ready) if other.priority < job.priority), len(ready))
        ready.insert(place, (gang, job))
    last = max((place for place, (_, job) in enumerate(ready) if job.id in {*wanted}), default=-1)
    ready = ready[: last + 1 + BEHIND_MAX]
    return forecast(snapshot_of(scene, ready), policy, rng, wanted, draws=draws, spent=spent)


def place_hypothetical(
    scene: Scene, gang: Gang, job: SlurmJob, policy: PlacementPolicy, rng: np.random.Generator
) -> tuple[cycle.Start | Refusal, int]:
    """Return where a hypothetical job would start now, or why not; and its position among the ready jobs."""
    before = [one for one in scene.ready if one.priority >= job.priority and one.id not in scene.reasons][:WAITING_MAX]
    gangs = [*map(scene.gang, before), gang]
    plan = cycle.place(gangs, scene.ledger, policy, rng, cluster_view=view_of(scene), reserving=BACKFILL)
    for start in plan.starts:
        if start.gang.job_id == gang.job_id:
            return start, len(before) + 1
    refusal = plan.refusals.get(gang.job_id) or no_place(gang, scene.ledger, within=Locality.ANYWHERE)
    return refusal, len(before) + 1
