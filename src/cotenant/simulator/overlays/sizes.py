"""`sizes=FACTOR`: elastic training jobs, whose users asked for too many or too few replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, ReplicaRange
from cotenant.core.model.limits import REPLICAS_MAX
from cotenant.simulator.overlays.port import Setting, number, rounded
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.physics.scaling import speed
from cotenant.simulator.traces import TraceJob

FACTOR_MAX = 1024.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Multiplies the replicas of training jobs by a factor from 1/FACTOR to FACTOR, and makes the jobs elastic.

    The factor is log-uniform [R]. A job keeps its work: with fewer replicas than in the trace it runs longer, as
    `physics.scaling` says. It may have from one replica to as many as the cluster has GPUs for. With `sizes=1` requests
    stay as they are. Jobs of several roles or without whole GPUs stay rigid.
    """

    key: ClassVar[str] = "sizes"
    form: ClassVar[str] = "FACTOR"
    factor: float

    @classmethod
    def parse(cls, value: str) -> Sizes:
        """Parse the factor."""
        factor = number(value, 0, FACTOR_MAX)
        if factor < 1:
            raise ValueError(f"must be 1 or more, not {factor:g}")
        return cls(factor)

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the factors."""
        drawn = rounded(np.exp(math.log(self.factor) * (2 * rng.random(len(jobs)) - 1)))
        return [_sized(job, factor, setting.cluster.gpus) for job, factor in zip(jobs, drawn, strict=True)]


def _sized(job: TraceJob, factor: float, gpus: int) -> TraceJob:
    role = job.roles[0]
    each, part = divmod(role.request.gpu_milli, WHOLE_GPU_MILLI)
    most = min(gpus // each, REPLICAS_MAX) if each else 0
    if job.kind is not JobKind.TRAINING or len(job.roles) > 1 or part or role.replicas > most:
        return job
    replicas = max(1, min(most, round(role.replicas * factor)))
    sized = replace(role, replicas=replicas, elastic=ReplicaRange(1, most))
    seconds = steady(job.work_seconds * speed(role.replicas) / speed(replicas))
    return replace(job, roles=(sized,), work_seconds=job.work_seconds if replicas == role.replicas else seconds)
