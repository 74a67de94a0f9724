"""Shortest remaining time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cotenant.core.model.job_table import Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.shortest_first import Unknown, quantum_violations, shortest_first


class Srtf:
    """Run the jobs that will finish soonest: with perfect knowledge hardly any order is better on average.

    Shortest remaining processing time (Schrage, Operations Research 1968), optimal on one machine, and here greedy over
    a cluster: jobs are ordered by predicted remaining time; those that fit run, and jobs that fall behind make room.
    The reference `SRTF` of AITurbo's comparison (Zhao et al., HPDC 2021 [D]).

    Jobs without a prediction, or that have outlived it, are treated as `unknown` says.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, (job_id, seconds) in enumerate([("long", 90.0), ("short", 5.0)]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number))
    ...     table.update(job_id, remaining_seconds=seconds)
    >>> Srtf().order(table.jobs(now=9), now=9).score.tolist()
    [90.0, 5.0]
    """

    name = "srtf"
    api_version = 1
    preemptive = True
    strict = False
    running_first = False
    fixed_while_waiting = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """The treatment of jobs whose remaining time is unknown.

        unknown: `attained` expects as much run time again as attained so far; `first` and `last` put such jobs before
          or after all others, by arrival.
        quantum_seconds: with `attained`, the initial quantum of the expected remaining time; it then doubles.
        """

        unknown: Unknown = "attained"
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            yield from quantum_violations(self.quantum_seconds)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their remaining seconds."""
        return shortest_first(jobs, 1.0, self.options.unknown, self.options.quantum_seconds)
