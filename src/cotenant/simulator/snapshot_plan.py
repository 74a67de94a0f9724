"""Plans: what one scheduling cycle would do with the jobs of a snapshot, and when the others would start. Pure.

The cycle is the simulator's, and so the live mesh's, under the policies of the snapshot or others; the starts of jobs
that have to wait are those of the start forecast. Nothing is started, and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.core.forecast.start_forecast import DRAWS, WAITING_MAX, ExpectedStart, Forecast, forecast
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.resources import Amounts, amounts_of
from cotenant.core.model.validation import Violation
from cotenant.core.policy import profiles
from cotenant.core.policy.options import BadOption
from cotenant.core.prediction.remaining_time import RUN_SECONDS_UNKNOWN, RemainingTime, remaining_time_of
from cotenant.core.spelling import did_you_mean
from cotenant.simulator.clusters.cluster_argument import cluster_of_snapshot
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.run import Prepared
from cotenant.simulator.scenario import DECIDING, Scenario
from cotenant.simulator.snapshots import BadSnapshot, Job, Snapshot
from cotenant.simulator.traces import trace_of_snapshot

SOURCE = "snapshot"  # what errors call a snapshot that is in no file
_STOPS = (Kind.PREEMPTED, Kind.RECLAIMED, Kind.MIGRATED)
_REASONS = (Kind.WAITING, Kind.UNSCHEDULABLE, Kind.GIVEN_UP)


@dataclass(frozen=True, slots=True)
class PlannedPlace(Amounts):
    """What a job gets on one node for the replicas of one role there, all of them together.

    `shares` are (GPU number, thousandths) of all that the job gets on the node, if the node's GPUs can be shared.
    """

    node: str
    role: str
    replicas: int
    gpu_milli: int
    cores: int
    shares: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """When a job starts, in seconds after the snapshot: the median, and the range that holds in 8 of 10 cases.

    Infinity: beyond the horizon of the forecast. `of_unknown`: it waits only for jobs whose remaining time is unknown,
    so that the figures mean nothing. `after` are jobs whose end makes room, the last to end first.
    """

    seconds: float
    p10_seconds: float
    p90_seconds: float
    of_unknown: bool = False
    after: tuple[str, ...] = ()


NOW = PlannedStart(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A waiting job: its place in the order from 1 on, and where it would start now, or why not.

    `order` is None for a job that can never run. Without `places`, `code`, `detail` and `remedy` are the reason as
    `cotenant explain` gives it. `start` is None if no forecast was made: for a job that can never run or that the queue
    policy gives up, beyond the first `WAITING_MAX` jobs of the order, or if the time was spent.
    """

    id: str
    order: int | None
    places: tuple[PlannedPlace, ...] = ()
    code: str = ""
    detail: str = ""
    remedy: str = ""
    start: PlannedStart | None = None

    @property
    def starts(self) -> bool:
        """Whether it starts now."""
        return bool(self.places)


@dataclass(frozen=True, slots=True)
class PlannedStop:
    """A running job that stops for others: `preempted`, `reclaimed` (what was lent to it) or `migrated` to `places`."""

    id: str
    kind: str
    starts: tuple[str, ...] = ()
    places: tuple[PlannedPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The plan of one cycle at the time of a snapshot: its waiting jobs in order, and the running jobs that stop first.

    `policies` are the names by group that made it. `draws` counts the runs of the forecast; 0 if there was none.
    `notes` say what is not known, for users.
    """

    taken_seconds: float
    policies: Mapping[str, str]
    jobs: tuple[PlannedJob, ...] = ()
    stops: tuple[PlannedStop, ...] = ()
    draws: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The largest snapshot that is planned, and for how long at most its forecast is made."""

    nodes_max: int = 5_000
    jobs_max: int = 20_000
    seconds_max: float = 30.0

    def check(self, snapshot: Snapshot, name: str = SOURCE) -> None:
        """Check a snapshot against the limits.

        Raises:
            BadSnapshot: names every limit that it exceeds.
        """
        counts = ("nodes", len(snapshot.nodes), self.nodes_max), ("jobs", len(snapshot.jobs), self.jobs_max)
        if over := [f"{what}: {count:,}, more than {most:,}" for what, count, most in counts if count > most]:
            raise BadSnapshot("\n  ".join([f"{name} is too large:", *over]))


@dataclass(frozen=True, slots=True)
class Choices:
    """Other policies than those of the snapshot: a profile, then single ones by group, and options by group and key.

    Policies know what those of the snapshot knew: the estimates of the jobs stay.
    """

    profile: str = ""
    policies: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def applied_to(self, scenario: Scenario) -> Scenario:
        """Return a scenario with these policies.

        Raises:
            UnknownProfile, BadOption: the message says what there is.
        """
        if self.profile:
            scenario = scenario.deciding_by(profiles.find(self.profile))
        if unknown := [group for group in self.policies if group not in DECIDING]:
            what = f"of {', '.join(DECIDING)}"
            faults = [Violation(one, f"no group {what}{did_you_mean(one, DECIDING)}") for one in unknown]
            raise BadOption(faults, dict.fromkeys(DECIDING, "…"))
        return scenario.choosing(self.policies, self.options)


AS_TAKEN = Choices()  # the policies of the snapshot


def plan_snapshot(
    snapshot: Snapshot,
    choices: Choices = AS_TAKEN,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    spent: Callable[[], bool] = lambda: False,
) -> SnapshotPlan:
    """Return what the scheduler would do with a snapshot now; the same arguments give the same plan.

    For each waiting job: its place in the order, the nodes, GPUs and cores that it gets, or the reason why it gets
    none, and a forecast of its start with `draws` samples of the run times. The forecast ends early once `spent`.
    Use `PlanLimits.check` first for a snapshot from elsewhere, and `snapshots.read` or `snapshots.parse` to get one.

    Raises:
        UnknownProfile, UnknownPolicy, BadOption: the choices are invalid; the message says why.
        PolicyFailed: a policy raised an error, or returned an invalid answer.
    """
    scenario = replace(choices.applied_to(Scenario.of_taken(snapshot, SOURCE)), seed=seed)
    if not snapshot.jobs:
        return SnapshotPlan(snapshot.taken_seconds, {group: getattr(scenario, group) for group in DECIDING})
    recorder = _Recorder()
    trace = trace_of_snapshot(snapshot, SOURCE)
    prepared = scenario.prepare(trace, cluster_of_snapshot(snapshot, SOURCE), recorder)
    rest_of = _RemainingTimes(snapshot)
    order = _order(prepared, rest_of)
    prepared.simulation.step()
    foreseen = _forecast(prepared, rest_of, draws, seed, spent)
    jobs = tuple(_jobs(snapshot, prepared, recorder, order, foreseen))
    return SnapshotPlan(
        snapshot.taken_seconds,
        {group: prepared.names[group] for group in DECIDING},
        jobs,
        tuple(_stops(snapshot, prepared, recorder)),
        foreseen.draws if foreseen else 0,
        (*trace.notes, *_beyond(len(order))),
    )


def _beyond(waiting: int) -> Iterator[str]:
    if waiting > WAITING_MAX:
        yield f"the forecast considers the first {WAITING_MAX:,} of {waiting:,} waiting jobs"


class _RemainingTimes:
    """The remaining run time of each job of a snapshot, by id."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._now, self._jobs = snapshot.taken_seconds, {job.id: job for job in snapshot.jobs}
        totals = [job.known.total_seconds if job.known else job.expected_seconds for job in snapshot.jobs]
        told = sorted(total for total in totals if total is not None)
        self._usual_seconds = told[len(told) // 2] if told else RUN_SECONDS_UNKNOWN

    def __call__(self, job_id: str) -> RemainingTime:
        job = self._jobs[job_id]
        ran = job.ran_seconds(self._now)
        return remaining_time_of(
            _estimate(job, ran), ran, expected_seconds=job.expected_seconds, usual_seconds=self._usual_seconds
        )


def _estimate(job: Job, ran_seconds: float) -> Estimate:
    if not job.known or job.known.total_seconds <= ran_seconds:
        return UNKNOWN
    early, late = job.known.total_p10_seconds, job.known.total_p90_seconds
    return Estimate(
        predictable=True,
        confidence=job.known.confidence,
        remaining_seconds=job.known.total_seconds - ran_seconds,
        remaining_p10_seconds=None if early is None else max(0.0, early - ran_seconds),
        remaining_p90_seconds=None if late is None else max(0.0, late - ran_seconds),
    )


def _order(prepared: Prepared, rest_of: _RemainingTimes) -> dict[str, int]:
    """Return the place in the order of each waiting job, from 1 on."""
    if not prepared.simulation.sim_jobs:  # none can ever run
        return {}
    waiters = prepared.simulation.queue_snapshot(rest_of).waiters
    return {waiter.gang.job_id: place for place, waiter in enumerate(waiters, start=1)}


def _forecast(
    prepared: Prepared, rest_of: _RemainingTimes, draws: int, seed: int, spent: Callable[[], bool]
) -> Forecast | None:
    """Return when the jobs that still wait will start; None if none does, or the time is spent."""
    if spent() or all(sim_job.running or sim_job.over for sim_job in prepared.simulation.sim_jobs):
        return None
    state = prepared.simulation.queue_snapshot(rest_of)
    state = replace(state, waiters=state.waiters[:WAITING_MAX])
    return forecast(state, prepared.policies.placement, np.random.default_rng(seed), draws=draws, spent=spent)


@dataclass(slots=True)
class _Recorder:
    """The events of a cycle: starts and stops by job, and the last reason by job, or by class for all of its jobs."""

    starts: dict[str, Event] = field(default_factory=dict)
    stops: dict[str, Event] = field(default_factory=dict)
    _reasons: dict[str | int, tuple[int, Event]] = field(default_factory=dict)

    def record(self, event: Event) -> None:
        """Keep an event."""
        if event.kind is Kind.STARTED:
            self.starts[event.job_id] = event
        elif event.kind in _STOPS:
            self.stops[event.job_id] = event
        elif event.kind in _REASONS:
            self._reasons[event.job_id or event.shape or 0] = len(self._reasons), event

    def reason(self, job_id: str, shape: int | None) -> Event | None:
        """Return the last reason of a job or its class."""
        found = [self._reasons[key] for key in (job_id, shape) if key is not None and key in self._reasons]
        return max(found, key=lambda one: one[0])[1] if found else None


def _jobs(
    snapshot: Snapshot, prepared: Prepared, recorder: _Recorder, order: Mapping[str, int], foreseen: Forecast | None
) -> Iterator[PlannedJob]:
    """Yield the waiting jobs in order; those that can never run come last."""
    classes = {sim_job.job.id: sim_job.job_class.code for sim_job in prepared.simulation.sim_jobs}
    places = _Places(snapshot, prepared)
    waiting = [job.id for job in snapshot.jobs if job.running_since_seconds is None]
    for job_id in sorted(waiting, key=lambda one: order.get(one, math.inf)):
        if started := recorder.starts.get(job_id):
            yield PlannedJob(job_id, order.get(job_id), places.of(started), start=NOW)
            continue
        reason = recorder.reason(job_id, classes.get(job_id))
        expected = foreseen.expected.get(job_id) if foreseen else None
        yield PlannedJob(
            job_id,
            order.get(job_id),
            code=reason.code if reason else "",
            detail=reason.detail if reason else "",
            remedy=reason.remedy if reason else "",
            start=_start(expected) if expected else None,
        )


def _start(expected: ExpectedStart) -> PlannedStart:
    return PlannedStart(
        expected.seconds, expected.p10_seconds, expected.p90_seconds, expected.of_unknown, expected.ends
    )


def _stops(snapshot: Snapshot, prepared: Prepared, recorder: _Recorder) -> Iterator[PlannedStop]:
    places = _Places(snapshot, prepared)
    ran = {job.id for job in snapshot.jobs if job.running_since_seconds is not None}
    for job_id, event in recorder.stops.items():
        if job_id in ran:
            again = recorder.starts.get(job_id)
            moved = places.of(again) if event.kind is Kind.MIGRATED and again else ()
            yield PlannedStop(job_id, event.kind.value, event.by, moved)


class _Places:
    """The places of started jobs, with the nodes by id."""

    def __init__(self, snapshot: Snapshot, prepared: Prepared) -> None:
        self._ids = [node.id for node in snapshot.nodes]
        self._holdings = {sim_job.job.id: sim_job.holdings for sim_job in prepared.simulation.sim_jobs}

    def of(self, started: Event) -> tuple[PlannedPlace, ...]:
        """Return the places of one job."""
        shares: dict[int, tuple[tuple[int, int], ...]] = {}
        for holding in self._holdings.get(started.job_id, ()):
            shares[holding.node] = _merged((*shares.get(holding.node, ()), *holding.shares))
        return tuple(
            PlannedPlace(
                self._ids[place.node],
                place.role,
                place.replicas,
                place.gpu_milli,
                place.cores,
                shares.get(place.node, ()),
                **amounts_of(place),
            )
            for place in started.nodes
        )


def _merged(shares: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return shares with one entry per GPU."""
    milli: dict[int, int] = {}
    for gpu, part in shares:
        milli[gpu] = milli.get(gpu, 0) + part
    return tuple(sorted(milli.items()))
