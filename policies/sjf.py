"""Shortest job first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import expected_by_attained, unpredictable
from cotenant.core.scheduling.shortest_first import Unknown, quantum_violations, scored


class Sjf:
    """Start the jobs with the shortest total run time; running jobs stay, and long jobs wait.

    No paper: a baseline, the textbook order for machines that cannot stop a job. The predicted total run time counts,
    including earlier attempts, so that a long job does not come to the front by being restarted.

    Jobs without a prediction are treated as `unknown` says. `last` is the default, unlike in the preemptive orders,
    because a job that turns out to be long cannot be stopped here [R].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, (job_id, seconds) in enumerate([("long", 90.0), ("short", 5.0)]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number))
    ...     table.update(job_id, remaining_seconds=seconds)
    >>> table.attain("short", run_seconds=100.0)
    >>> Sjf().order(table.jobs(now=200), now=200).score.tolist()
    [90.0, 105.0]
    """

    name = "sjf"
    api_version = 1
    preemptive = False
    running_first = False
    fixed_while_waiting = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """What a job that finds no room does, and the treatment of jobs of unknown length.

        mode: `strict` holds back all jobs behind it; `backfill` lets them pass.
        unknown: `last` and `first` put such jobs behind or before all others, by arrival; `attained` expects as much
          run time again as attained so far.
        quantum_seconds: with `attained`, the initial quantum of the expected remaining time; it then doubles.
        """

        mode: Literal["strict", "backfill"] = "strict"
        unknown: Unknown = "last"
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            yield from quantum_violations(self.quantum_seconds)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.strict = self.options.mode == "strict"

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their total run time in seconds."""
        again, _ = expected_by_attained(jobs.attained_seconds, self.options.quantum_seconds)
        unknown = unpredictable(jobs)
        rest = np.where(unknown, again, jobs.remaining_seconds)
        return scored(jobs, jobs.attained_seconds + rest, unknown, self.options.unknown, math.inf)
