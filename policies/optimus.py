"""Optimus' greedy rule: resources go where they gain most, as far as gangs of fixed size allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.model.job_table import Floats, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import (
    CROSSING_SECONDS,
    attained_at,
    demands_of,
    dominant_share,
    soonest,
    unpredictable,
)
from cotenant.core.scheduling.shortest_first import Unknown, quantum_violations, shortest_first


class Optimus:
    """Give the next resources to the job with the largest gain per unit of its dominant resource.

    Optimus (Peng et al., EuroSys 2018 [P]) repeatedly gives one more worker or parameter server to the job whose
    remaining time falls most per unit of its dominant resource, and repeats that every 10 minutes. A gang of fixed size
    has no next worker: it runs as a whole or not at all. What is left of the rule is which jobs run [R]: a job that
    gets its gang shortens the sum of all completion times by one job for as long as it holds its resources, so its gain
    is 1 / (remaining time × dominant share), and the highest gain goes first. The number of workers and servers of a
    job, the heart of the paper, is not decided here.

    Between two updates, jobs that arrived since take nothing from other jobs: they get what is free. An update is
    skipped if no job has arrived and no running job can have fallen back: running jobs only come nearer to their end.

    Jobs without a prediction, or that have outlived it, are treated as `unknown` says; Optimus itself assumes that all
    jobs are predictable.

    >>> from cotenant.core.model.job_table import Capacity, JobRow, JobTable
    >>> table = JobTable()
    >>> table.capacity = Capacity(gpu_milli=8000, cores=16)
    >>> for number, (job_id, gpus, cores, seconds) in enumerate([("a", 4, 4, 100.0), ("b", 1, 16, 60.0)]):
    ...     table.add(JobRow(job_id, 0, number, gpu_milli=1000 * gpus, cores=cores))
    ...     table.update(job_id, remaining_seconds=seconds)
    >>> Optimus().order(table.jobs(now=600), now=600).score.tolist()
    [50.0, 60.0]
    """

    name = "optimus"
    api_version = 1
    preemptive = True
    strict = False
    running_first = False

    @dataclass(frozen=True, slots=True)
    class Options:
        """Time between updates, and the treatment of jobs whose remaining time is unknown.

        interval_seconds: time between two updates.
        unknown: `attained` expects as much service again as attained so far; `first` and `last` put such jobs before or
          after all others, by arrival.
        quantum_seconds: with `attained`, the initial quantum of the expected remaining time; it then doubles.
        """

        interval_seconds: float = 600.0
        unknown: Unknown = "attained"
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if not 1 <= self.interval_seconds <= 1e9:
                yield Violation("interval_seconds", f"must be from 1 to 1e9, not {self.interval_seconds:g}")
            yield from quantum_violations(self.quantum_seconds)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by remaining time × dominant share as of the last update; later arrivals come last."""
        interval = self.options.interval_seconds
        look = math.floor((now + CROSSING_SECONDS) / interval) * interval
        then = _as_of(jobs, now, look)
        demands, capacity = demands_of(jobs)
        order = shortest_first(
            then, dominant_share(demands, capacity), self.options.unknown, self.options.quantum_seconds
        )
        came_since = jobs.arrival_seconds > look + CROSSING_SECONDS
        changes_seconds = 0.0 if came_since.any() else _next_change_seconds(then, order)
        look_then = look + interval * np.maximum(1.0, np.ceil((changes_seconds - CROSSING_SECONDS) / interval))
        return Order(order.level + 2 * came_since, order.score, float(look_then) - now)


def _next_change_seconds(then: Jobs, order: Order) -> float:
    """Return when a running job may next fall back, in seconds from an update; until then the order stays.

    A running job with a predicted end only comes nearer to it, until it outlives the prediction.
    """
    rest = then.remaining_seconds[then.running & ~unpredictable(then)]
    return min(order.valid_seconds, soonest(rest))


def _as_of(jobs: Jobs, now: float, look: float) -> Jobs:
    """Return the jobs as they were at the last update."""
    attained: Floats = attained_at(jobs, now, look)
    rest = np.maximum(0.0, jobs.predicted_seconds - attained)
    return replace(
        jobs, attained_seconds=attained, remaining_seconds=np.where(np.isnan(rest), jobs.remaining_seconds, rest)
    )
