"""Which jobs should be profiled now: at most one of a kind at a time, none in vain, and none again soon after that.

A job is worth it whose kind is new, or whose kind's rates no longer hold. It is asked for in the answer to what was
observed of it; whoever hears that plans and begins the profile, tells what is measured, and at last that it is over.
Where nothing comes of that, the kind is left alone for a time that doubles with each failure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.model.estimate import TRAINING, Observation
from cotenant.core.model.job import JobKind
from cotenant.core.prediction import experiment_design
from cotenant.core.prediction.core_curve import Point
from cotenant.services.predictor.codec import Kind, kind_of
from cotenant.services.predictor.profiling.profile_store import Measured, key_of
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as pb

STEPS_MIN, STEPS_MAX = 10, 50  # at each count; Xiao et al. take some tens [P]
KINDS_MAX = 10_000
FAILURES_MAX = 30
BEGIN_SECONDS = 60.0  # after which a profile that was asked for should have begun, and one that has ended been told


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """What profiles may cost [R].

    seconds: of one job, in all; 0: none is ever asked for.
    share: of a job's run time, where that can be told.
    back_off_seconds: how long a kind is left alone after a profile of which nothing came; doubled each time.
    """

    seconds: float = 300.0
    share: float = 0.1
    back_off_seconds: float = 600.0
    back_off_seconds_max: float = 6 * 3600.0


RULES = ProfileRules()


@dataclass(slots=True)
class _Lease:
    """A profile that was asked for: nobody else is, before its end is told or its time is over."""

    job_id: str
    until: float
    windows: int = 0


@dataclass(slots=True)
class _Told:
    """What is remembered of a kind on a GPU type."""

    lease: _Lease | None = None
    failures: int = 0
    not_before: float = -math.inf
    spent_seconds: float = 0.0  # for the present profile, over all plans that it took
    enough_for: set[int] = field(default_factory=set)  # the most cores for which nothing needs to be measured


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure: core counts, steps at each, why, and what that may take."""

    cores: tuple[int, ...]
    steps: int
    reason: str
    budget_seconds: float


class Profiler:
    """Remembers which profiles are under way and what came of the last ones. Times are on any one clock."""

    def __init__(self, measured: Measured, rules: ProfileRules = RULES, kinds_max: int = KINDS_MAX) -> None:
        self._measured, self._rules, self._kinds_max = measured, rules, kinds_max
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    def wanted(self, message: pb.Observation, observation: Observation, now: float) -> bool:
        """Say whether the job of an observation should be profiled now; the observation has been learnt from.

        That is asked of one job of a kind, and not again before its profile has ended.
        """
        kind, held = kind_of(message.spec), observation.allocation
        told = self._of(kind, held.gpu_type)
        lease = told.lease if told.lease and told.lease.job_id == observation.job_id else None
        if message.profiled and not message.profile_done:
            if lease:
                lease.windows += 1
                lease.until = max(lease.until, now + BEGIN_SECONDS)
                told.spent_seconds += observation.window_seconds
            return False
        over = lease is not None and (message.profile_done or observation.run_seconds is not None)
        if told.lease and now < told.lease.until and not over:
            return False
        self._end(told, now)
        if now < told.not_before or not self._may(message, observation):
            return False
        if not self._needs(told, kind, held.gpu_type, held.cores):
            return False
        if not self._pays(message.spec, kind, held.gpu_type):
            if told.spent_seconds:
                self._back_off(told, now)
            return False
        told.lease = _Lease(observation.job_id, now + BEGIN_SECONDS)
        return True

    def void(self, kind: Kind, gpu_type: str) -> None:
        """What was measured of a kind does not hold any more."""
        self._of(kind, gpu_type).enough_for.clear()

    def plan(self, spec: job_pb2.JobSpec, gpu_type: str, cores_max: int, now: float) -> Order:
        """Say what to measure of a job that holds so many cores per replica.

        Raises:
            ValueError: the spec cannot be taken; the text says why.
        """
        kind = kind_of(spec)
        points = self._measured.at(kind, gpu_type)
        planned = experiment_design.plan(points, cores_max)
        budget = self._budget_seconds(spec, points)
        told = self._told.get((key_of(kind), gpu_type))
        if told and told.lease:
            budget = max(0.0, budget - told.spent_seconds)
            told.lease.until = now + budget + BEGIN_SECONDS
        steps = STEPS_MAX
        if points and planned.cores:
            fastest = points[-1]
            slowest = fastest.rate * min(planned.cores) / max(cores_max, fastest.cores)  # hardly slower than that
            steps = max(STEPS_MIN, min(STEPS_MAX, int(budget * slowest / len(planned.cores))))
        stale = self._measured.stale(kind, gpu_type)
        reason = f"its profile is stale: {stale}; {planned.reason}" if stale else planned.reason
        return Order(planned.cores, steps, reason, budget)

    def _of(self, kind: Kind, gpu_type: str) -> _Told:
        key = key_of(kind), gpu_type
        told = self._told.setdefault(key, _Told())
        self._told.move_to_end(key)
        if len(self._told) > self._kinds_max:
            self._told.popitem(last=False)
        return told

    def _end(self, told: _Told, now: float) -> None:
        """Take the present profile as ended, if there is one; where nothing came of it, wait before the next."""
        lease, told.lease = told.lease, None
        if lease and lease.windows:
            told.failures = 0
        elif lease:
            self._back_off(told, now)

    def _back_off(self, told: _Told, now: float) -> None:
        pause = self._rules.back_off_seconds * 2**told.failures
        told.not_before = now + min(pause, self._rules.back_off_seconds_max)
        told.failures = min(told.failures + 1, FAILURES_MAX)
        told.spent_seconds = 0.0

    def _may(self, message: pb.Observation, observation: Observation) -> bool:
        """Whether a job may be profiled at all: its cores are ours to choose, and a node can take some from it."""
        spec, held = message.spec, observation.allocation
        return (
            self._rules.seconds > 0
            and not spec.not_profiled
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

    def _needs(self, told: _Told, kind: Kind, gpu_type: str, cores_max: int) -> bool:
        if cores_max in told.enough_for:
            return False
        points = self._measured.at(kind, gpu_type)
        if (
            len(points) < experiment_design.POINTS_MIN or experiment_design.plan(points, cores_max).cores
        ):  # to plan takes milliseconds
            return True
        told.spent_seconds = 0.0
        told.enough_for.add(cores_max)
        self._measured.renewed(kind, gpu_type)
        return False

    def _pays(self, spec: job_pb2.JobSpec, kind: Kind, gpu_type: str) -> bool:
        """Whether the job runs for long enough that some steps at one count can be paid for."""
        points = self._measured.at(kind, gpu_type)
        rate = points[-1].rate if points else 0.0
        left = self._budget_seconds(spec, points) - self._of(kind, gpu_type).spent_seconds
        return left * rate >= 2 * STEPS_MIN

    def _budget_seconds(self, spec: job_pb2.JobSpec, points: Sequence[Point]) -> float:
        """What the profile of such a job may take: a share of its run time, where its steps or its user tell that."""
        expected = math.inf
        if spec.steps_total and points:
            expected = spec.steps_total / max(point.rate for point in points)
        elif spec.HasField("expected_duration"):
            expected = spec.expected_duration.ToMilliseconds() / 1000
        return min(self._rules.seconds, max(0.0, self._rules.share * expected))
