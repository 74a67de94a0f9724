"""Least attained service first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.options import written
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, gpus_charged, soonest


class Las:
    """Run the jobs with the least attained service: short jobs finish soon, and no prediction is needed.

    Discretized two-dimensional LAS as in Tiresias (Gu et al., NSDI 2019), the reference of AITurbo [D]. Service is
    executed time × GPUs. Each threshold that a job's service reaches takes it one level down; within a level running
    jobs come before waiting jobs, then first in, first out. Few levels mean few preemptions.

    A waiting job returns to the top once it has waited `promote_knob` × its executed time, or `starvation_seconds`, and
    is then ranked by the service of its new run alone. Unlike Tiresias' own code we count a wait from the last stop and
    not from the last promotion, because the job table does not record promotions [R].

    A job without GPUs is charged its cores, `cores_per_gpu` of them like one GPU [R].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> for number, job_id in enumerate(["new", "old"]):
    ...     table.add(JobRow(job_id, arrival_seconds=0, sequence=number, gpu_milli=2000))
    >>> table.attain("old", run_seconds=2000)
    >>> table.start("new", now=0)
    >>> order = Las().order(table.jobs(now=25), now=25)
    >>> order.level.tolist(), order.valid_seconds
    ([0, 1], 1600.0)
    """

    name = "las"
    api_version = 1
    preemptive = True
    strict = False
    running_first = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """Where levels end, and which jobs return to the top.

        thresholds: GPU-seconds of service at which a job falls to the next level, ascending.
        promote_knob: a job returns to the top when it has waited this many times its executed time; 0 disables this.
        starvation_seconds: a stopped job returns to the top when it has waited this long; 0 disables this.
        cores_per_gpu: number of cores of a job without GPUs that count as one GPU.
        """

        thresholds: tuple[float, ...] = (3250.0, 7200.0)
        promote_knob: float = 0.0
        starvation_seconds: float = 0.0
        cores_per_gpu: float = 3.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            finite = all(math.isfinite(threshold) and threshold > 0 for threshold in self.thresholds)
            if not finite or list(self.thresholds) != sorted(set(self.thresholds)):
                yield Violation("thresholds", f"must be positive and ascending, not {written(self.thresholds)}")
            if not 0 <= self.promote_knob < math.inf:
                yield Violation("promote_knob", f"must be 0 or more, not {self.promote_knob:g}")
            if not 0 <= self.starvation_seconds < math.inf:
                yield Violation("starvation_seconds", f"must be 0 or more, not {self.starvation_seconds:g}")
            if not 0 < self.cores_per_gpu < math.inf:
                yield Violation("cores_per_gpu", f"must be more than 0, not {self.cores_per_gpu:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._thresholds = np.array(self.options.thresholds, dtype=np.float64)
        self.fixed_while_waiting = not (self.options.promote_knob or self.options.starvation_seconds)

    def order(self, jobs: Jobs, now: float) -> Order:
        """Return the level of each job's service; arrival decides within a level."""
        speed = gpus_charged(jobs, self.options.cores_per_gpu)
        seconds, promoted, due = jobs.attained_seconds, None, None
        if self.options.promote_knob or self.options.starvation_seconds:
            seconds, promoted, due = self._promote(jobs, now)
        service = seconds * speed
        level = np.searchsorted(self._thresholds, service + speed * CROSSING_SECONDS, side="right").astype(np.int64)
        if promoted is not None:
            level[promoted & ~jobs.running] = 0
        running = np.flatnonzero(jobs.running)
        valid_seconds = soonest(self._seconds_to_crossing(service[running], speed[running], level[running]))
        if due is not None:
            valid_seconds = min(valid_seconds, soonest(due[~jobs.running & (level > 0)]))
        return Order(level, jobs.arrival_seconds.copy(), valid_seconds)

    def _promote(self, jobs: Jobs, now: float) -> tuple[Floats, Flags, Floats]:
        """Return the run times that count, which jobs are promoted, and when other jobs will be."""
        this_run = np.where(jobs.running, now - jobs.running_since, 0.0)
        before = np.maximum(0.0, jobs.attained_seconds - this_run)
        waited = np.where(jobs.running, jobs.running_since, now) - jobs.waiting_since
        by_knob, starved = self.options.promote_knob * before, self.options.starvation_seconds
        due = np.minimum(by_knob if self.options.promote_knob else math.inf, starved or math.inf) - waited
        promoted = (before > 0) & (due <= CROSSING_SECONDS)
        return np.where(promoted & jobs.running, this_run, jobs.attained_seconds), promoted, due

    def _seconds_to_crossing(self, service: Floats, speed: Floats, level: Ints) -> Floats:
        ends = np.append(self._thresholds, math.inf)[level]
        crossing: Floats = np.divide(ends - service, speed, out=np.full(len(speed), math.inf), where=speed > 0)
        return crossing
