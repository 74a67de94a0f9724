"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import Order


class Fifo:
    """Run jobs in the order of their arrival: the baseline that everyone understands.

    No paper: a baseline. `strict` is the default because that is what the name promises and what published comparisons
    measure; a cluster of mixed job sizes is better served by `backfill`, where a gang that finds no room holds back no
    other job. Neither mode ever stops a running job.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> table.add(JobRow("late", arrival_seconds=7, sequence=1))
    >>> table.add(JobRow("early", arrival_seconds=3, sequence=0))
    >>> Fifo().order(table.jobs(now=9), now=9).score.tolist()
    [7.0, 3.0]
    """

    name = "fifo"
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
        """Score jobs by their arrival."""
        return Order(level=np.zeros(len(jobs), dtype=np.int64), score=jobs.arrival_seconds.copy())
