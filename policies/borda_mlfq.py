"""Predictable and unpredictable jobs in one order: ranks are summed, and few levels limit preemption.

Theory of operation of the variant `expected`; that of `robust` is in `policies/robust_order/order.py`. Each job has a
*service*, its time × what it holds, and an *expectation* of the service that it still needs: the prediction, or without
one the service attained so far, because run times are heavy-tailed. A prediction that a job has outlived is a heavy
tail of its own: the job is expected to need another overrun of the same length. An overdue job therefore counts as
long, not as almost finished.

Levels are a geometric scale of that expectation. A running job is placed a level better than a waiting job with the
same expectation, so it is preempted only for a job that is expected to need several times less, wherever the levels
happen to end. Within a level, which holds jobs that are about equal, a Borda count of two votes decides: the least
expected service, and the longest time in the system. With the second vote, a prediction that is wrong by a third cannot
make a job wait for weeks.

All of this advances every `cadence_seconds`: levels use the service as of the last tick, so between ticks only arrivals
and ends change the order. Nothing is remembered between calls but what jobs that ended have taught: another leader of
the queue that sees the same jobs at the same moment computes the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.options import written
from cotenant.core.policy.protocols import EndedJob, Order
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, attained_at, soonest
from cotenant.policies.robust_order.order import RobustOrder

SERVICE_MAX = 1e13  # levels end here, at 20,000 years of a GPU
LEVELS_MAX = 300  # the finest scale reaches that far
Votes = Callable[[int], Mapping[str, float]]


class BordaMlfq:
    """Run the jobs that are expected to need the least service, predicted or guessed, in few levels.

    The Borda-count multi-level feedback queue of AITurbo (Zhao et al., HPDC 2021): unpredictable jobs by attained
    service, predictable jobs also by what they would gain, in one order [P]. `literal` is that order: ranks from 1 up
    with ties averaged; an unpredictable job scores twice its rank by attained service, a predictable job that rank plus
    its rank among the predictable jobs by predicted remaining service, which replaces the benefit of resizing where
    jobs are rigid [R]; three levels by score. `expected` is our own improvement [R]: see the module docstring. Service
    is 10 per GPU and 5 per replica for each second [D]. `robust`, the default [R], learns from jobs that ended what a
    job's age says and what predictions are worth; docs/robust-order.md says what each brings.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, job_id in enumerate(["unknown", "long", "short"]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=1000))
    ...     table.attain(job_id, run_seconds=1000)
    >>> table.update("long", predicted_seconds=90_000, confidence=0.9)
    >>> table.update("short", predicted_seconds=1100, confidence=0.9)
    >>> BordaMlfq(BordaMlfq.Options(variant="expected")).order(table.jobs(now=2400), now=2400).level.tolist()
    [5, 11, 3]
    >>> policy = BordaMlfq()  # predictions have not been right yet
    >>> len(set(policy.order(table.jobs(now=2400), now=2400).level.tolist()))
    1
    """

    name = "borda-mlfq"
    api_version = 1
    preemptive = True
    strict = False
    running_first = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """Variant of the order, what counts as predictable, and how often levels are updated.

        variant: `robust` learns what ages and predictions are worth; `expected` ranks all jobs by the service that they
          are expected to need, if predictions are right; `literal` is the paper's sum.
        confidence_min: minimum confidence of a prediction that is used.
        cadence_seconds: time between two updates of running jobs' progress; arrivals and ends count at once.
        gpu_weight: `expected`, `literal`: service units of one GPU for one second.
        replica_weight: `expected`, `literal`: service units of one replica (worker or parameter server) for one second.
        level_seconds: `expected`: run time on one GPU in one replica that the first level holds.
        level_factor: `expected`: each level holds jobs that need up to this many times more than the previous level.
        hold_levels: `expected`: number of levels by which a running job is ranked better than when waiting.
        error: `expected`: minimum remaining time of a predictable job, as a share of its predicted total.
        starvation_seconds: a job that has waited this long runs first, until one run has lasted as long; 0 disables
          this.
        quantiles: `literal`: ends of the levels as shares of the highest possible score, ascending.
        thresholds: `literal`: ends of the levels as scores, ascending; replaces the quantiles, such as 30,180 or 15,30
          for small clusters [D].
        """

        variant: Literal["robust", "expected", "literal"] = "robust"
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
            """Yield a violation for each invalid option."""
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
        with np.errstate(over="ignore"):  # an overflow is infinite and therefore no end of a level
            ends = first * self.options.level_factor ** np.arange(LEVELS_MAX, dtype=np.float64)
        self._ends = ends[ends < SERVICE_MAX]
        self._robust = RobustOrder(self.options.confidence_min)

    def learn(self, ended: EndedJob) -> None:
        """Learn from a job that ended, for the robust order."""
        if self.options.variant == "robust":
            self._robust.learn(ended)

    def order(self, jobs: Jobs, now: float) -> Order:
        """Return levels and scores as of the last tick; later arrivals and ends are included."""
        cadence = self.options.cadence_seconds
        tick = math.floor((now + CROSSING_SECONDS) / cadence) * cadence
        if self.options.variant == "robust":
            level, changes, votes = self._robust.levels(jobs, now, tick)
            score = jobs.arrival_seconds.copy()
        elif self.options.variant == "literal":
            predicted = self._predicted(jobs)
            level, score, votes = self._literal(jobs, attained_at(jobs, now, tick), predicted)
            changes = tick if jobs.running.any() else math.inf
        else:
            level, score, changes, votes = self._expected(jobs, now, tick, self._predicted(jobs))
        if self.options.starvation_seconds:
            first, turns = self._starved(jobs, tick)
            level, changes = np.where(first, -1, level), min(changes, turns)
        ticks = math.ceil((changes - CROSSING_SECONDS - tick) / cadence) if changes < math.inf else math.inf
        return Order(level.astype(np.int64), score, tick + max(1, ticks) * cadence - now, votes=votes)

    def _predicted(self, jobs: Jobs) -> Flags:
        return (jobs.confidence >= self.options.confidence_min) & np.isfinite(jobs.predicted_seconds)

    def _starved(self, jobs: Jobs, tick: float) -> tuple[Flags, float]:
        """Return which jobs have waited too long, now or before the present run, and when that next changes."""
        patience = self.options.starvation_seconds
        waited = np.where(jobs.running, jobs.running_since, tick) - jobs.waiting_since
        begun = np.where(jobs.running, jobs.running_since, jobs.waiting_since)
        late = waited >= patience - CROSSING_SECONDS
        first = late & (~jobs.running | (tick - begun < patience - CROSSING_SECONDS))
        return first, soonest((begun + patience)[first == jobs.running])

    def _service_per_second(self, jobs: Jobs) -> Floats:
        units = self.options.gpu_weight * jobs.gpu_milli / 1000 + self.options.replica_weight * jobs.replicas
        return np.maximum(units, 1e-3)  # a job that holds nothing must still be ordered

    # The paper's order -------------------------------------------------------------------------------------------

    def _literal(self, jobs: Jobs, attained: Floats, predicted: Flags) -> tuple[Ints, Floats, Votes]:
        speed = self._service_per_second(jobs)
        by_attained = average_ranks(attained * speed)
        rest = np.maximum(0.0, jobs.predicted_seconds[predicted] - attained[predicted]) * speed[predicted]
        score = 2 * by_attained
        score[predicted] = by_attained[predicted] + average_ranks(rest)
        if self.options.thresholds:
            ends = np.array(self.options.thresholds)
        else:
            ends = np.array(self.options.quantiles) * 2 * len(jobs)

        def votes(row: int) -> Mapping[str, float]:
            second = "rank by predicted service" if predicted[row] else "the same again, without a prediction"
            return {"rank by attained service": by_attained[row], second: score[row] - by_attained[row]}

        return np.searchsorted(ends, score, side="right"), score, votes

    # Ours --------------------------------------------------------------------------------------------------------

    def _expected(self, jobs: Jobs, now: float, tick: float, predicted: Flags) -> tuple[Ints, Floats, float, Votes]:
        speed = self._service_per_second(jobs)
        total = np.where(predicted, jobs.predicted_seconds, 0.0)
        attained = attained_at(jobs, now, tick)
        level = np.searchsorted(self._ends, self._remaining(total, attained) * speed, side="right")
        running = np.flatnonzero(jobs.running)
        before = attained.copy()
        before[running] = attained_at(jobs, now, -math.inf, running)
        by_service = average_ranks(self._remaining(total, before) * speed)
        by_age = average_ranks(jobs.arrival_seconds, jobs.by_arrival)
        score = by_service + by_age
        stands = level.copy()
        stands[running] = np.maximum(0, level[running] - self.options.hold_levels)
        begun = np.maximum(jobs.running_since[running], tick) - attained[running]
        leaves = self._level_change_at(total[running], attained[running], level[running], speed[running])

        def votes(row: int) -> Mapping[str, float]:
            return {"rank by expected service": by_service[row], "rank by time in the system": by_age[row]}

        return stands, score, soonest(begun + leaves), votes

    def _remaining(self, total: Floats, attained: Floats) -> Floats:
        """Return the remaining time: by the prediction, its usual error, or the overrun, whichever is largest.

        A job without a prediction has been overrunning from its first second.
        """
        return np.maximum(np.abs(total - attained), self.options.error * total)

    def _level_change_at(self, total: Floats, attained: Floats, level: Ints, speed: Floats) -> Floats:
        """Return the run time at which each running job changes its level."""
        up = total + np.append(self._ends, math.inf)[level] / speed  # by its overrun
        lower = np.append(0.0, self._ends)[level] / speed
        down = np.where(lower > self.options.error * total, total - lower, math.inf)
        return np.where(down >= attained, np.minimum(down, up), up)


def average_ranks(values: Floats, ascending: Ints | None = None) -> Floats:
    """Return ranks from 1 up, ties averaged; `ascending` is the sort order, if known.

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
