"""Profile planning: selects jobs to profile, at most one per job class at a time, with backoff after failures.

A job is profiled if its class is new or the rates of its class are stale. The request is part of the answer to an
observation of the job; the queue then plans and starts the profile, and reports the measured rates and the end. If that
yields nothing, the class is not profiled for a time that doubles with each failure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.codec import specs
from cotenant.core.model.estimate import TRAINING, Observation
from cotenant.core.model.job import JobKind
from cotenant.core.prediction import experiment_design
from cotenant.core.prediction.core_curve import Point
from cotenant.internal.v1 import observation_service_pb2 as pb
from cotenant.services.predictor.codec import JobClass, job_class_of
from cotenant.services.predictor.profiling.profile_store import ProfileStore, key_of
from cotenant.v1 import job_pb2

STEPS_MIN, STEPS_MAX = 10, 50  # per core count; Xiao et al. use some tens [P]
KINDS_MAX = 10_000
FAILURES_MAX = 30
BEGIN_SECONDS = 60.0  # in which a requested profile should start, and an ended one be reported


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """Limits on the cost of profiles [R].

    seconds: total time per job; 0 disables profiling.
    share: fraction of a job's run time, if that is known.
    back_off_seconds: how long a class is not profiled after a fruitless profile; doubled each time.
    """

    seconds: float = 300.0
    share: float = 0.1
    back_off_seconds: float = 600.0
    back_off_seconds_max: float = 6 * 3600.0


RULES = ProfileRules()


@dataclass(slots=True)
class _ProfileLease:
    """A requested profile: no other job of its class is profiled before it ends or expires."""

    job_id: str
    until: float
    windows: int = 0


@dataclass(slots=True)
class _ClassState:
    """The profiling state of a job class on a GPU type."""

    lease: _ProfileLease | None = None
    failures: int = 0
    not_before: float = -math.inf
    spent_seconds: float = 0.0  # on the present profile, over all its plans
    enough_for: set[int] = field(default_factory=set)  # maximum core counts that need no more measurements


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """A planned profile: core counts, steps at each, the reason, and the time budget."""

    cores: tuple[int, ...]
    steps: int
    reason: str
    budget_seconds: float


class ProfilePlanner:
    """Tracks the running profiles and the outcomes of the last ones. All times are on one clock, of any kind."""

    def __init__(self, profile_store: ProfileStore, rules: ProfileRules = RULES, kinds_max: int = KINDS_MAX) -> None:
        self._profile_store, self._rules, self._kinds_max = profile_store, rules, kinds_max
        self._states: OrderedDict[tuple[str, str], _ClassState] = OrderedDict()

    def should_profile(self, message: pb.Observation, observation: Observation, now: float) -> bool:
        """Return whether the job of an observation should be profiled now; call it after recording the observation.

        Only one job per class is requested, and no other before its profile has ended.
        """
        kind, held = job_class_of(message.spec), observation.allocation
        state = self._of(kind, held.gpu_type)
        lease = state.lease if state.lease and state.lease.job_id == observation.job_id else None
        if message.profiled and not message.profile_done:
            if lease:
                lease.windows += 1
                lease.until = max(lease.until, now + BEGIN_SECONDS)
                state.spent_seconds += observation.window_seconds
            return False
        over = lease is not None and (message.profile_done or observation.run_seconds is not None)
        if state.lease and now < state.lease.until and not over:
            return False
        self._end(state, now)
        if now < state.not_before or not self._eligible(message, observation):
            return False
        if not self._needs_points(state, kind, held.gpu_type, held.cores):
            return False
        if not self._worthwhile(message.spec, kind, held.gpu_type):
            if state.spent_seconds:
                self._back_off(state, now)
            return False
        state.lease = _ProfileLease(observation.job_id, now + BEGIN_SECONDS)
        return True

    def invalidate(self, kind: JobClass, gpu_type: str) -> None:
        """Discard the knowledge that a class needs no more measurements, because its rates are stale."""
        self._of(kind, gpu_type).enough_for.clear()

    def plan(self, spec: job_pb2.JobSpec, gpu_type: str, cores_max: int, now: float) -> ProfileOrder:
        """Return what to measure of a job that holds so many cores per replica.

        Raises:
            ValueError: the spec is invalid; the text has the reason.
        """
        kind = job_class_of(spec)
        points = self._profile_store.at(kind, gpu_type)
        planned = experiment_design.plan(points, cores_max)
        budget = self._budget_seconds(spec, points)
        state = self._states.get((key_of(kind), gpu_type))
        if state and state.lease:
            budget = max(0.0, budget - state.spent_seconds)
            state.lease.until = now + budget + BEGIN_SECONDS
        steps = STEPS_MAX
        if points and planned.cores:
            fastest = points[-1]
            slowest = fastest.rate * min(planned.cores) / max(cores_max, fastest.cores)  # a lower bound in practice
            steps = max(STEPS_MIN, min(STEPS_MAX, int(budget * slowest / len(planned.cores))))
        stale = self._profile_store.stale(kind, gpu_type)
        reason = f"its profile is stale: {stale}; {planned.reason}" if stale else planned.reason
        return ProfileOrder(planned.cores, steps, reason, budget)

    def _of(self, kind: JobClass, gpu_type: str) -> _ClassState:
        key = key_of(kind), gpu_type
        state = self._states.setdefault(key, _ClassState())
        self._states.move_to_end(key)
        if len(self._states) > self._kinds_max:
            self._states.popitem(last=False)
        return state

    def _end(self, state: _ClassState, now: float) -> None:
        """End the present profile, if there is one; back off if it measured nothing."""
        lease, state.lease = state.lease, None
        if lease and lease.windows:
            state.failures = 0
        elif lease:
            self._back_off(state, now)

    def _back_off(self, state: _ClassState, now: float) -> None:
        pause = self._rules.back_off_seconds * 2**state.failures
        state.not_before = now + min(pause, self._rules.back_off_seconds_max)
        state.failures = min(state.failures + 1, FAILURES_MAX)
        state.spent_seconds = 0.0

    def _eligible(self, message: pb.Observation, observation: Observation) -> bool:
        """Return whether a job may be profiled at all: its cores are open, and a node can take some away."""
        spec, held = message.spec, observation.allocation
        return (
            self._rules.seconds > 0
            and specs.may_be_profiled(spec)
            and observation.run_seconds is None
            and observation.phase == TRAINING
            and bool(observation.rate_per_second or message.profile_done)
            and observation.submission.kind in ("", JobKind.TRAINING.value)
            and len(spec.roles) == 1
            and spec.roles[0].resources.gpu_milli > 0
            and not spec.roles[0].resources.HasField("cores")
            and held.nodes == 1
            and held.cores > 1
        )

    def _needs_points(self, state: _ClassState, kind: JobClass, gpu_type: str, cores_max: int) -> bool:
        if cores_max in state.enough_for:
            return False
        points = self._profile_store.at(kind, gpu_type)
        if (
            len(points) < experiment_design.POINTS_MIN or experiment_design.plan(points, cores_max).cores
        ):  # planning takes milliseconds
            return True
        state.spent_seconds = 0.0
        state.enough_for.add(cores_max)
        self._profile_store.mark_fresh(kind, gpu_type)
        return False

    def _worthwhile(self, spec: job_pb2.JobSpec, kind: JobClass, gpu_type: str) -> bool:
        """Return whether the job's time budget allows at least some steps at one core count."""
        points = self._profile_store.at(kind, gpu_type)
        rate = points[-1].rate if points else 0.0
        left = self._budget_seconds(spec, points) - self._of(kind, gpu_type).spent_seconds
        return left * rate >= 2 * STEPS_MIN

    def _budget_seconds(self, spec: job_pb2.JobSpec, points: Sequence[Point]) -> float:
        """Return the time budget of a job's profile: a share of its run time, if its steps or its user give that."""
        expected = math.inf
        if spec.steps_total and points:
            expected = spec.steps_total / max(point.rate for point in points)
        elif spec.HasField("expected_duration"):
            expected = spec.expected_duration.ToMilliseconds() / 1000
        return min(self._rules.seconds, max(0.0, self._rules.share * expected))
