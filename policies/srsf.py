"""Shortest remaining service first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cotenant.core.model.job_table import Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import gpus_charged
from cotenant.core.scheduling.shortest_first import Unknown, quantum_violations, shortest_first


class Srsf:
    """Run the jobs with the least remaining GPU time: a job costs others its remaining time × its size.

    Shortest remaining service first as in Tiresias (Gu et al., NSDI 2019, section 3.1 [P]): service is time × GPUs.
    With perfect knowledge it is the best order we know for the average completion time of gangs; of two jobs of equal
    length the smaller runs first. A job without GPUs is charged its cores, `cores_per_gpu` of them like one GPU [R].

    Jobs without a prediction, or that have outlived it, are treated as `unknown` says.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, (job_id, gpus, seconds) in enumerate([("large", 8, 10.0), ("long", 1, 70.0)]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=1000 * gpus))
    ...     table.update(job_id, remaining_seconds=seconds)
    >>> Srsf().order(table.jobs(now=9), now=9).score.tolist()
    [80.0, 70.0]
    """

    name = "srsf"
    api_version = 1
    preemptive = True
    strict = False
    running_first = False
    fixed_while_waiting = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """The treatment of jobs whose remaining time is unknown, and the weight of cores.

        unknown: `attained` expects as much service again as attained so far; `first` and `last` put such jobs before or
          after all others, by arrival.
        quantum_seconds: with `attained`, the initial quantum of the expected remaining time; it then doubles.
        cores_per_gpu: number of cores of a job without GPUs that count as one GPU.
        """

        unknown: Unknown = "attained"
        quantum_seconds: float = 60.0
        cores_per_gpu: float = 3.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            yield from quantum_violations(self.quantum_seconds)
            if not 0 < self.cores_per_gpu < math.inf:
                yield Violation("cores_per_gpu", f"must be more than 0, not {self.cores_per_gpu:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their remaining GPU-seconds."""
        gpus = gpus_charged(jobs, self.options.cores_per_gpu)
        return shortest_first(jobs, gpus, self.options.unknown, self.options.quantum_seconds)
