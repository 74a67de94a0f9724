"""Predictable and unpredictable jobs in one order: ranks are summed up, and few levels keep the peace.

How it works. Each job has a *service*, its time × what it holds, and an *expectation* of the service that it still
needs: what the predictor says, and where that says nothing, about as much again as the job has had, for run times are
heavy-tailed. A prediction that was outlived is a heavy tail of its own: of the overrun, about as much again is
expected. So a job that was to be done long ago counts as a long one, and not as one that is about to finish.

Levels are a geometric scale of that expectation. A job that runs stands a level better than it would if it waited, so
that it is only stopped for one that is expected to need several times less, wherever the levels happen to end. Inside a
level, which holds jobs that are about alike, a Borda count of two votes decides: the least expected service, and the
longest time in the system. The second vote keeps what a prediction got wrong by a third from deciding who waits for
weeks.

The clock of all this ticks every `cadence_seconds`: levels see service as it was at the last tick, so that between
ticks only arrivals and ends change the order. Nothing is remembered between calls: another leader of the queue that
looks at the same jobs at the same moment gives the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.options import written
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, attained_at, soonest

SERVICE_MAX = 1e13  # levels end here, at 20,000 years of a GPU
LEVELS_MAX = 300  # the finest scale gets that far


class BordaMlfq:
    """Run the jobs that are expected to need the least, whether that is predicted or only guessed, in few levels.

    The Borda-count multi-level feedback queue of AITurbo (Zhao et al., HPDC 2021): unpredictable jobs by attained
    service, predictable ones also by what they would gain, in one order [P]. `literal` is that order: ranks from 1 up,
    ties averaged; an unpredictable job scores twice its rank by attained service, a predictable one that rank plus its
    rank among the predictable by predicted remaining service, which stands in for the benefit of re-sizing where jobs
    are rigid [R]; three levels by score. `expected`, the default, is our own improvement of it [R]: see the module,
    and docs/borda-mlfq.md for what each brings. Service is 10 per GPU and 5 per replica for each second [D].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, job_id in enumerate(["unknown", "long", "short"]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=1000))
    ...     table.attain(job_id, run_seconds=1000)
    >>> table.update("long", predicted_seconds=90_000, confidence=0.9)
    >>> table.update("short", predicted_seconds=1100, confidence=0.9)
    >>> BordaMlfq().order(table.jobs(now=2400), now=2400).level.tolist()
    [5, 11, 3]
    """

    name = "borda-mlfq"
    api_version = 1
    preemptive = True
    strict = False
    running_first = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """Which order, what it takes for predictable, and how often it looks.

        variant: `expected` ranks all jobs by the service that they are expected to need; `literal` is the paper's sum.
        confidence_min: from this confidence on a prediction counts.
        cadence_seconds: time between two looks at how far running jobs are; arrivals and ends are seen at once.
        gpu_weight: service units that one GPU gives in a second.
        replica_weight: service units that one replica (worker or parameter server) gives in a second.
        level_seconds: `expected`: run time of a job with one GPU in one replica that the first level holds.
        level_factor: `expected`: each level holds jobs that need up to this many times more than the one before.
        hold_levels: `expected`: so many levels better does a job stand while it runs.
        error: `expected`: the rest of a predictable job is at least this share of what was predicted for all of it.
        starvation_seconds: a job that has waited so long comes first, until a run of it has lasted as long; 0 is never.
        quantiles: `literal`: where levels end, as shares of the highest score possible, ascending.
        thresholds: `literal`: where levels end, as scores, ascending; counts instead of the quantiles where given,
            such as 30,180 or 15,30 for small clusters [D].
        """

        variant: Literal["expected", "literal"] = "expected"
        confidence_min: float = 0.5
        cadence_seconds: float = 240.0
        gpu_weight: float = 10.0
        replica_weight: float = 5.0
        level_seconds: float = 60.0
        level_factor: float = 2.0
        hold_levels: int = 1
        error: float = 0.25
        starvation_seconds: float = 0.0
        quantiles: tuple[float, ...] = (0.25, 0.5)
        thresholds: tuple[float, ...] = ()

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("confidence_min", "error"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")
            for name, least in (("cadence_seconds", 1.0), ("level_seconds", 1.0), ("level_factor", 1.1)):
                if not least <= getattr(self, name) <= 1e9:
                    yield Violation(name, f"must be from {least:g} to 1e9, not {getattr(self, name):g}")
            if not 0 <= self.hold_levels <= LEVELS_MAX:
                yield Violation("hold_levels", f"must be from 0 to {LEVELS_MAX}, not {self.hold_levels}")
            for name in ("gpu_weight", "replica_weight", "starvation_seconds"):
                if not 0 <= getattr(self, name) <= 1e9:
                    yield Violation(name, f"must be from 0 to 1e9, not {getattr(self, name):g}")
            if not self.gpu_weight + self.replica_weight > 0:
                yield Violation("replica_weight", "must be more than 0 where gpu_weight is 0")
            for name, most in (("quantiles", 1.0), ("thresholds", math.inf)):
                ends = getattr(self, name)
                if not all(0 < end < most for end in ends) or list(ends) != sorted(set(ends)):
                    below = " and below 1" if most == 1.0 else ""
                    yield Violation(name, f"must be ascending, above 0{below}, not {written(ends)}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        first = self.options.level_seconds * (self.options.gpu_weight + self.options.replica_weight)
        with np.errstate(over="ignore"):  # what is beyond all numbers is no end of a level
            ends = first * self.options.level_factor ** np.arange(LEVELS_MAX, dtype=np.float64)
        self._ends = ends[ends < SERVICE_MAX]

    def order(self, jobs: Jobs, now: float) -> Order:
        """Give jobs their level and score as of the last tick; what happened since counts only as who is here."""
        cadence = self.options.cadence_seconds
        tick = math.floor((now + CROSSING_SECONDS) / cadence) * cadence
        predicted = (jobs.confidence >= self.options.confidence_min) & np.isfinite(jobs.predicted_seconds)
        if self.options.variant == "literal":
            level, score = self._literal(jobs, attained_at(jobs, now, tick), predicted)
            changes = tick if jobs.running.any() else math.inf
        else:
            level, score, changes = self._expected(jobs, now, tick, predicted)
        if self.options.starvation_seconds:
            first, turns = self._starved(jobs, tick)
            level, changes = np.where(first, -1, level), min(changes, turns)
        ticks = math.ceil((changes - CROSSING_SECONDS - tick) / cadence) if changes < math.inf else math.inf
        return Order(level.astype(np.int64), score, tick + max(1, ticks) * cadence - now)

    def _starved(self, jobs: Jobs, tick: float) -> tuple[Flags, float]:
        """Say who has waited too long, now or before this run began, and when that is next to change."""
        patience = self.options.starvation_seconds
        waited = np.where(jobs.running, jobs.running_since, tick) - jobs.waiting_since
        begun = np.where(jobs.running, jobs.running_since, jobs.waiting_since)
        late = waited >= patience - CROSSING_SECONDS
        first = late & (~jobs.running | (tick - begun < patience - CROSSING_SECONDS))
        return first, soonest((begun + patience)[first == jobs.running])

    def _service_per_second(self, jobs: Jobs) -> Floats:
        units = self.options.gpu_weight * jobs.gpu_milli / 1000 + self.options.replica_weight * jobs.replicas
        return np.maximum(units, 1e-3)  # a job that costs nothing still has to come after another

    # The paper's order -------------------------------------------------------------------------------------------

    def _literal(self, jobs: Jobs, attained: Floats, predicted: Flags) -> tuple[Ints, Floats]:
        speed = self._service_per_second(jobs)
        by_attained = average_ranks(attained * speed)
        rest = np.maximum(0.0, jobs.predicted_seconds[predicted] - attained[predicted]) * speed[predicted]
        score = 2 * by_attained
        score[predicted] = by_attained[predicted] + average_ranks(rest)
        if self.options.thresholds:
            return np.searchsorted(self.options.thresholds, score, side="right"), score
        ends = np.array(self.options.quantiles) * 2 * len(jobs)
        return np.searchsorted(ends, score, side="right"), score

    # Ours --------------------------------------------------------------------------------------------------------

    def _expected(self, jobs: Jobs, now: float, tick: float, predicted: Flags) -> tuple[Ints, Floats, float]:
        speed = self._service_per_second(jobs)
        total = np.where(predicted, jobs.predicted_seconds, 0.0)
        attained = attained_at(jobs, now, tick)
        level = np.searchsorted(self._ends, self._rest(total, attained) * speed, side="right")
        running = np.flatnonzero(jobs.running)
        before = attained.copy()
        before[running] = attained_at(jobs, now, -math.inf, running)
        score = average_ranks(self._rest(total, before) * speed) + average_ranks(jobs.arrival_seconds, jobs.by_arrival)
        stands = level.copy()
        stands[running] = np.maximum(0, level[running] - self.options.hold_levels)
        begun = np.maximum(jobs.running_since[running], tick) - attained[running]
        leaves = self._leaves(total[running], attained[running], level[running], speed[running])
        return stands, score, soonest(begun + leaves)

    def _rest(self, total: Floats, attained: Floats) -> Floats:
        """Expect a rest: of the prediction, of its usual error, of an overrun as much again, whichever is most.

        A job of which nothing is predicted has overrun from its first second.
        """
        return np.maximum(np.abs(total - attained), self.options.error * total)

    def _leaves(self, total: Floats, attained: Floats, level: Ints, speed: Floats) -> Floats:
        """Say at which run time a job that runs comes to another level."""
        up = total + np.append(self._ends, math.inf)[level] / speed  # by its overrun
        lower = np.append(0.0, self._ends)[level] / speed
        down = np.where(lower > self.options.error * total, total - lower, math.inf)
        return np.where(down >= attained, np.minimum(down, up), up)


def average_ranks(values: Floats, ascending: Ints | None = None) -> Floats:
    """Rank values from 1 up; equal ones share the average of their ranks. `ascending` sorts them, where that is known.

    >>> average_ranks(np.array([30.0, 10.0, 30.0, 20.0])).tolist()
    [3.5, 1.0, 3.5, 2.0]
    """
    if ascending is None:
        ascending = np.argsort(values)
    ordered = values[ascending]
    apart = ordered[1:] != ordered[:-1]
    ranks = np.empty(len(ordered))
    if apart.all():
        ranks[ascending] = np.arange(1.0, len(ordered) + 1)
        return ranks
    begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
    ends = np.append(begins[1:], len(ordered))
    ranks[ascending] = np.repeat((begins + 1 + ends) / 2, ends - begins)
    return ranks
