"""Shortest remaining time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cotenant.core.model.job_table import Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.shortest_first import Unknown, bad_quantum, shortest_first


class Srtf:
    """Run the jobs that will be done soonest: with perfect knowledge hardly any order finishes jobs earlier on average.

    Shortest remaining processing time (Schrage, Operations Research 1968), optimal on one machine, and here greedy over
    a cluster: jobs in the order of their predicted rest, whoever fits runs, whoever falls makes room. The reference
    `SRTF` of AITurbo's comparison (Zhao et al., HPDC 2021 [D]).

    A job of which nothing is known, and one that has outlived its prediction, is treated as `unknown` says.

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

    @dataclass(frozen=True, slots=True)
    class Options:
        """What is thought of jobs whose rest is not known.

        unknown: `attained` expects about as much again as the job has had; `first` and `last` put it before or behind
            all others, by arrival.
        quantum_seconds: with `attained`, what a job may have before anything is expected of it; that then doubles.
        """

        unknown: Unknown = "attained"
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            yield from bad_quantum(self.quantum_seconds)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their rest in seconds."""
        return shortest_first(jobs, 1.0, self.options.unknown, self.options.quantum_seconds)
