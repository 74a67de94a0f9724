"""Gittins' index over attained service."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Floats, Ints, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import EndedJob, Order
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, gpus_charged, soonest

EDGES = 40  # doublings of the quantum: no job gets that far
TAKEN_MIN = 1e-6  # GPU-seconds: bounds the index of jobs that took nothing


class Gittins:
    """Run the jobs with the best chance of ending per GPU time, judged by earlier jobs that got as far.

    Discretized two-dimensional Gittins index as in Tiresias (Gu et al., NSDI 2019, section 3.3 [P]). Service is time ×
    GPUs; S is the total service of a job, distributed as in the jobs that have ended so far. The index of a job with
    attained service a is
        G(a) = max over Δ of P(S - a ≤ Δ | S > a) / E[min(S - a, Δ) | S > a]:
    the probability that it ends within Δ more, over the service that this is expected to take. No prediction of any
    single job is needed.

    Attained service counts in steps, from nothing to one quantum and then doubling [R]: each step has its index and so
    its level, and a job's place changes only between steps. Because Δ also ends at a step, the whole history reduces to
    the number of jobs that ended in each step and the sum of their service: its size is fixed, and the index is exact.
    Within a level running jobs come before waiting jobs, then first in, first out. Steps with equal indices, such as
    steps without any history, are ordered by service; until `history_min` jobs have ended, that is the whole order:
    least attained service.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, job_id in enumerate(["new", "old"]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=1000))
    >>> table.attain("old", run_seconds=1000)
    >>> policy = Gittins(Gittins.Options(quantum_gpu_seconds=1000, history_min=2))
    >>> policy.order(table.jobs(now=0), now=0).level.tolist()
    [0, 1]
    >>> for seconds in (1100.0, 9000.0, 1200.0):  # few end early, but of those that got to 1,000 s most end soon
    ...     policy.learn(EndedJob(1000, 0, 1, attained_seconds=seconds, attained_gpu_seconds=seconds))
    >>> policy.order(table.jobs(now=0), now=0).level.tolist()
    [2, 0]
    """

    name = "gittins"
    api_version = 1
    preemptive = True
    strict = False
    running_first = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """Granularity of service, and when history counts.

        quantum_gpu_seconds: GPU-seconds of service in the first step; each further step ends at twice as much.
        history_min: jobs that must have ended before the index counts; until then, least attained service.
        cores_per_gpu: number of cores of a job without GPUs that count as one GPU.
        """

        quantum_gpu_seconds: float = 600.0
        history_min: int = 100
        cores_per_gpu: float = 3.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if not 1 <= self.quantum_gpu_seconds <= 1e9:
                yield Violation("quantum_gpu_seconds", f"must be from 1 to 1e9, not {self.quantum_gpu_seconds:g}")
            if self.history_min < 1:
                yield Violation("history_min", f"must be 1 or more, not {self.history_min}")
            if not 0 < self.cores_per_gpu < math.inf:
                yield Violation("cores_per_gpu", f"must be more than 0, not {self.cores_per_gpu:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._edges: Floats = self.options.quantum_gpu_seconds * np.exp2(np.arange(EDGES))
        self._counts: Ints = np.zeros(EDGES + 1, dtype=np.int64)
        self._sums: Floats = np.zeros(EDGES + 1)
        self._levels: Ints | None = np.arange(EDGES + 1)  # of each step; None: history has grown

    def learn(self, ended: EndedJob) -> None:
        """Count a job in the step in which it ended."""
        by_cores = ended.attained_seconds * ended.cores / self.options.cores_per_gpu
        service = ended.attained_gpu_seconds if ended.gpu_milli else by_cores
        step = np.searchsorted(self._edges, service, side="left")  # a job that ends at an edge ends within the step
        self._counts[step] += 1
        self._sums[step] += service
        self._levels = None

    def order(self, jobs: Jobs, now: float) -> Order:
        """Return jobs at the level of their step of service; arrival decides within a level."""
        gpus = gpus_charged(jobs, self.options.cores_per_gpu)
        service = jobs.attained_seconds * gpus
        step = np.searchsorted(self._edges, service + gpus * CROSSING_SECONDS, side="right")
        left = np.append(self._edges, math.inf)[step] - service
        until: Floats = np.divide(left, gpus, out=np.full(len(jobs), math.inf), where=gpus > 0)
        if self._levels is None:
            self._levels = self._ranked_steps()
        return Order(self._levels[step], jobs.arrival_seconds.copy(), soonest(until[jobs.running]))

    def _ranked_steps(self) -> Ints:
        """Return the rank of each step, by decreasing index."""
        index = np.zeros(EDGES + 1)
        if int(self._counts.sum()) >= self.options.history_min:
            index = np.array([self._index(step) for step in range(EDGES + 1)])
        levels = np.empty(EDGES + 1, dtype=np.int64)
        levels[np.lexsort((np.arange(EDGES + 1), -index))] = np.arange(EDGES + 1)
        return levels

    def _index(self, step: int) -> float:
        """Return Gittins' index at the beginning of a step, with Δ ending at this step or a later step."""
        begin = self._edges[step - 1] if step else 0.0
        ended = np.cumsum(self._counts[step:])
        if not ended[-1]:
            return 0.0
        taken = np.cumsum(self._sums[step:]) - ended * begin  # by the jobs that end within Δ
        ends = np.append(self._edges, self._edges[-1])[step:]  # the last step has no end, and no later jobs
        taken += (ended[-1] - ended) * (ends - begin)  # by the other jobs
        worth = float((ended / np.maximum(taken, TAKEN_MIN)).max())
        return float(f"{worth:.9g}")  # so that the order never depends on the last bit of a sum
