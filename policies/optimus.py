"""Resources by what they gain: Optimus' greedy rule, as far as gangs of a fixed size leave it a choice."""

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
from cotenant.core.scheduling.shortest_first import Unknown, bad_quantum, shortest_first


class Optimus:
    """Give the next resources to the job that gains most for each unit of the resource of which it takes the most.

    Optimus (Peng et al., EuroSys 2018 [P]) gives jobs one worker or parameter server more, again and again, each time
    to the job whose time to the end falls most for each unit of its dominant resource, and does so anew every 10
    minutes. A gang of a fixed size has no next worker: it runs whole or not at all. What is left of the rule is who
    runs [R]: a job that gets its gang shortens the sum of all completion times by one job for as long as that holds
    its resources, so its gain is 1 / (remaining time × dominant share), and the highest goes first. How many workers
    and servers a job has, the heart of the paper, is not decided here.

    Between two looks nothing is taken away for those who came since: they get what is free. A look is passed over where
    nobody came and nobody who runs can have fallen back: those who run only come nearer to their end.

    A job of which nothing is known, and one that has outlived its prediction, is treated as `unknown` says; Optimus
    itself takes all jobs for predictable.

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
        """How often it looks, and what is thought of jobs whose rest is not known.

        interval_seconds: time between two looks.
        unknown: `attained` expects about as much again as the job has had; `first` and `last` put it before or behind
            all others, by arrival.
        quantum_seconds: with `attained`, what a job may have before anything is expected of it; that then doubles.
        """

        interval_seconds: float = 600.0
        unknown: Unknown = "attained"
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            if not 1 <= self.interval_seconds <= 1e9:
                yield Violation("interval_seconds", f"must be from 1 to 1e9, not {self.interval_seconds:g}")
            yield from bad_quantum(self.quantum_seconds)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by remaining time × dominant share as of the last look, those that came since behind."""
        interval = self.options.interval_seconds
        look = math.floor((now + CROSSING_SECONDS) / interval) * interval
        then = _at(jobs, now, look)
        demands, capacity = demands_of(jobs)
        order = shortest_first(
            then, dominant_share(demands, capacity), self.options.unknown, self.options.quantum_seconds
        )
        came_since = jobs.arrival_seconds > look + CROSSING_SECONDS
        changes_seconds = 0.0 if came_since.any() else _changes_in(then, order)
        look_then = look + interval * np.maximum(1.0, np.ceil((changes_seconds - CROSSING_SECONDS) / interval))
        return Order(order.level + 2 * came_since, order.score, float(look_then) - now)


def _changes_in(then: Jobs, order: Order) -> float:
    """Say when somebody who runs may fall back, in seconds from a look; until then looks find the same ahead.

    Those who run and whose end is foreseen only come nearer to it, until one outlives what was foreseen.
    """
    rest = then.remaining_seconds[then.running & ~unpredictable(then)]
    return min(order.valid_seconds, soonest(rest))


def _at(jobs: Jobs, now: float, look: float) -> Jobs:
    """See jobs as they were at the last look."""
    attained: Floats = attained_at(jobs, now, look)
    rest = np.maximum(0.0, jobs.predicted_seconds - attained)
    return replace(
        jobs, attained_seconds=attained, remaining_seconds=np.where(np.isnan(rest), jobs.remaining_seconds, rest)
    )
