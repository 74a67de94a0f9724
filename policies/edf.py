"""Earliest deadline first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import Order


class Edf:
    """Start the jobs with the earliest deadline; jobs without a deadline follow, first in, first out.

    A baseline: the order of Liu and Layland (JACM 1973) without its preemption: running jobs stay. Only the deadline
    counts, so a long job with little slack is behind a short job that is due sooner; `swaf` accounts for that. A missed
    deadline is still the earliest, so under overload jobs that are already late delay jobs that could still be on time;
    this is a known weakness of the order.

    >>> import numpy as np
    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, (job_id, deadline) in enumerate([("none", np.inf), ("b", 70.0), ("a", 60.0)]):
    ...     table.add(JobRow(job_id, arrival_seconds=number, sequence=number, deadline_seconds=deadline))
    >>> order = Edf().order(table.jobs(now=10), now=10)
    >>> order.level.tolist(), order.score.tolist()
    ([1, 0, 0], [0.0, 70.0, 60.0])
    """

    name = "edf"
    api_version = 1
    preemptive = False
    running_first = False
    fixed_while_waiting = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """What a job that finds no room does.

        mode: `strict` holds back all jobs behind it; `backfill` lets them pass.
        """

        mode: Literal["strict", "backfill"] = "strict"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.strict = self.options.mode == "strict"

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their deadline."""
        timed = np.isfinite(jobs.deadline_seconds)
        score = np.where(timed, jobs.deadline_seconds, jobs.arrival_seconds)
        return Order(np.where(timed, 0, 1).astype(np.int64), score)
