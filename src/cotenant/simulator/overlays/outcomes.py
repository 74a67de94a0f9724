"""`outcomes=philly`: the outcome of each training job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import JobKind
from cotenant.simulator.overlays.port import Setting, one_of
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.trace_job import Ended

# Shares of Philly's jobs, and of their GPU time, by outcome (ATC'19, table 6 [P]).
OF_JOBS = {Ended.KILLED: 0.135, Ended.FAILED: 0.172}
OF_GPU_TIME = {Ended.KILLED: 0.3769, Ended.FAILED: 0.1776}
LARGE = 0.25  # the share of jobs that hold nearly all GPU time


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Draws passed, killed or failed so as to match Philly's shares of jobs and of GPU time approximately.

    Killed jobs are 13.5 % of Philly's jobs and 37.7 % of its GPU time: long jobs are killed more often. So the quarter
    of the training jobs with the most GPU time is drawn with the shares of GPU time, since it holds nearly all of it,
    and the others with the remainder of the shares of jobs [C]. Shares by number of GPUs are published only as a plot
    and are not used. A job's run time stays that of the trace: killed and failed jobs end there.
    """

    key: ClassVar[str] = "outcomes"
    form: ClassVar[str] = "philly"

    @classmethod
    def parse(cls, value: str) -> Outcomes:
        """Parse the source of the shares."""
        one_of(value, ("philly",))
        return cls()

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the outcomes."""
        drawn = rng.random(len(jobs)).tolist()
        seconds = {job.id: _gpu_seconds(job) for job in setting.trace.jobs if job.kind is JobKind.TRAINING}
        sizes = sorted(seconds.values())
        large = sizes[len(sizes) - math.ceil(LARGE * len(sizes))] if sizes else math.inf
        return [
            replace(job, ended=_ended(chance, seconds[job.id] >= large)) if job.id in seconds else job
            for job, chance in zip(jobs, drawn, strict=True)
        ]


def _ended(chance: float, large: bool) -> Ended:
    below = 0.0
    for ended in (Ended.KILLED, Ended.FAILED):
        below += OF_GPU_TIME[ended] if large else (OF_JOBS[ended] - LARGE * OF_GPU_TIME[ended]) / (1 - LARGE)
        if chance < below:
            return ended
    return Ended.PASSED


def _gpu_seconds(job: TraceJob) -> float:
    return sum(role.replicas * role.request.gpu_milli for role in job.roles) / 1000 * job.work_seconds
