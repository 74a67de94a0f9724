"""Gittins' index over attained service."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Floats, Ints, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Ended, Order
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, gpus_charged, soonest

EDGES = 40  # doublings of the quantum: no job gets that far
TAKEN_MIN = 1e-6  # GPU-seconds: jobs that took nothing are worth much, but not without end


class Gittins:
    """Run the jobs that, by what history says of jobs that got as far, pay most for the GPU time they still take.

    Discretised two-dimensional Gittins index as in Tiresias (Gu et al., NSDI 2019, section 3.3 [P]). Service is time ×
    GPUs; S is the whole service of a job, by the jobs that have ended so far. A job that has had a is worth
    G(a) = max over Δ of P(S - a ≤ Δ | S > a) / E[min(S - a, Δ) | S > a]:
    how likely it ends within Δ more, over what that is expected to take. It needs no prediction of any one job.

    The service that a job has had counts in steps, from nothing to one quantum and then doubling [R]: each step has its
    index and so its level, and a job's place changes only from step to step. With Δ ending at a step too, all that must
    be kept of history is how many jobs ended in each step and their service in sum: its size is fixed, and the index is
    exact. Inside a level running jobs come before waiting ones, then first in, first out. Steps of one index, such as
    those of which history knows nothing, come in the order of service; before `history_min` jobs have ended that is
    all, and the order is least attained service.

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, job_id in enumerate(["new", "old"]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=1000))
    >>> table.attain("old", run_seconds=1000)
    >>> policy = Gittins(Gittins.Options(quantum_gpu_seconds=1000, history_min=2))
    >>> policy.order(table.jobs(now=0), now=0).level.tolist()
    [0, 1]
    >>> for seconds in (1100.0, 9000.0, 1200.0):  # few end early, but of those that got to 1,000 s most end soon
    ...     policy.learn(Ended(1000, 0, 1, attained_seconds=seconds, attained_gpu_seconds=seconds))
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
        """How finely service is told apart, and when history is believed.

        quantum_gpu_seconds: GPU-seconds of service in the first step; each further step ends at twice as much.
        history_min: jobs that must have ended before the index counts; until then, least attained service.
        cores_per_gpu: so many cores of a job without GPUs count as one GPU.
        """

        quantum_gpu_seconds: float = 600.0
        history_min: int = 100
        cores_per_gpu: float = 3.0

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
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
        self._levels: Ints | None = np.arange(EDGES + 1)  # of each step; None: history grew

    def learn(self, ended: Ended) -> None:
        """Count a job in the step in which it ended."""
        by_cores = ended.attained_seconds * ended.cores / self.options.cores_per_gpu
        service = ended.attained_gpu_seconds if ended.gpu_milli else by_cores
        step = np.searchsorted(self._edges, service, side="left")  # one that ends at an edge ends within the step
        self._counts[step] += 1
        self._sums[step] += service
        self._levels = None

    def order(self, jobs: Jobs, now: float) -> Order:
        """Give jobs the level of the step up to which they have been served; arrival decides inside a level."""
        gpus = gpus_charged(jobs, self.options.cores_per_gpu)
        service = jobs.attained_seconds * gpus
        step = np.searchsorted(self._edges, service + gpus * CROSSING_SECONDS, side="right")
        left = np.append(self._edges, math.inf)[step] - service
        until: Floats = np.divide(left, gpus, out=np.full(len(jobs), math.inf), where=gpus > 0)
        if self._levels is None:
            self._levels = self._ranked_steps()
        return Order(self._levels[step], jobs.arrival_seconds.copy(), soonest(until[jobs.running]))

    def _ranked_steps(self) -> Ints:
        """Number the steps, that with the highest index first."""
        index = np.zeros(EDGES + 1)
        if int(self._counts.sum()) >= self.options.history_min:
            index = np.array([self._index(step) for step in range(EDGES + 1)])
        levels = np.empty(EDGES + 1, dtype=np.int64)
        levels[np.lexsort((np.arange(EDGES + 1), -index))] = np.arange(EDGES + 1)
        return levels

    def _index(self, step: int) -> float:
        """Gittins' index of a job that has come to the beginning of a step, Δ ending with this step or a later one."""
        begin = self._edges[step - 1] if step else 0.0
        ended = np.cumsum(self._counts[step:])
        if not ended[-1]:
            return 0.0
        taken = np.cumsum(self._sums[step:]) - ended * begin  # by those who end within Δ
        ends = np.append(self._edges, self._edges[-1])[step:]  # the last step has no end, and no others
        taken += (ended[-1] - ended) * (ends - begin)  # by the others
        worth = float((ended / np.maximum(taken, TAKEN_MIN)).max())
        return float(f"{worth:.9g}")  # so that the order never hangs on the last bit of a sum
