"""Shortest waiting allowance first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import soonest, unpredictable

LATE_SECONDS = 0.001  # an allowance is used up when overdrawn by this much, so that no wake-up is due after 0 s
ROUNDING_SECONDS = 5e-7  # unix times have no finer resolution


class Swaf:
    """Start the jobs that can wait least if they are to meet their deadlines.

    Shortest waiting allowance first, the order of GENIE (Chen et al., TPDS 2020 [D]): a job may wait for A = deadline -
    now - T, where T is its remaining time. The smallest allowance comes first, then jobs without a deadline, first in,
    first out. A job with A < 0 can no longer meet its deadline: so that such jobs delay no others, they come last,
    first in, first out, or are given up (`lost`) [R]. Running jobs stay.

    For jobs without a prediction, or that have outlived it, T is the run time attained so far: nothing for a new job.
    Such a job is therefore given up no sooner than at its deadline [R].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, (job_id, deadline) in enumerate([("none", np.inf), ("b", 70.0), ("a", 60.0), ("late", 20.0)]):
    ...     table.add(JobRow(job_id, arrival_seconds=number, sequence=number, deadline_seconds=deadline))
    ...     table.update(job_id, remaining_seconds=30.0)
    >>> order = Swaf().order(table.jobs(now=10), now=10)
    >>> order.level.tolist(), order.score.tolist(), round(order.valid_seconds, 3)
    ([1, 0, 0, 2], [0.0, 40.0, 30.0, 3.0], 20.001)
    """

    name = "swaf"
    api_version = 1
    preemptive = False
    running_first = False

    @dataclass(frozen=True, slots=True)
    class Options:
        """What happens to jobs that can no longer meet their deadline, and to jobs that find no room.

        lost: `tail` runs jobs that will miss their deadline after all others; `drop` gives them up.
        mode: `backfill` lets later jobs pass a job that finds no room; `strict` holds them back.
        """

        lost: Literal["tail", "drop"] = "tail"
        mode: Literal["strict", "backfill"] = "backfill"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.strict = self.options.mode == "strict"

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by the latest time at which they may start."""
        timed = np.isfinite(jobs.deadline_seconds)
        needed = np.where(unpredictable(jobs), jobs.attained_seconds, jobs.remaining_seconds)
        latest = np.where(timed, jobs.deadline_seconds, 0.0) - needed
        allowance = latest - now
        lost = timed & ~jobs.running & (allowance <= ROUNDING_SECONDS - LATE_SECONDS)
        level = np.where(lost, 2, np.where(timed, 0, 1))
        score = np.where(level == 0, latest, jobs.arrival_seconds)
        return Order(
            level.astype(np.int64),
            score,
            soonest(allowance[timed & ~lost & ~jobs.running]) + LATE_SECONDS,
            given_up=lost if self.options.lost == "drop" else None,
        )
