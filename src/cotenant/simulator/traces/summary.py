"""The figures of a trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.simulator.traces import Trace, TraceJob

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a trace. A job's GPUs and cores are those of all its replicas; work is at reference speed.

    `span_seconds` is from the first submission to the last. `sizes` counts jobs by GPUs, in order of size.
    `cores_asked` counts the jobs that request a number of cores, `cores_auto` those that leave it to the allocator.
    """

    source: str
    format: str
    jobs: int
    skipped_rows: int
    kinds: Mapping[str, int]
    span_seconds: float
    gpu_hours: float
    core_hours: float
    sizes: Mapping[str, int]
    work_seconds: Mapping[str, float]
    cores_asked: int
    cores_auto: int
    tenants: int
    users: int
    models: Mapping[str, int]
    priorities: Mapping[str, int]
    deadlines: int
    ended: Mapping[str, int]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}


def summary_of(trace: Trace) -> Summary:
    """Return the figures of a trace."""
    jobs = trace.jobs
    work = np.array([job.work_seconds for job in jobs], dtype=np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(work, (50, 90, 99)))
    return Summary(
        source=trace.source,
        format=trace.format,
        jobs=len(jobs),
        skipped_rows=len(trace.skipped),
        kinds=_counts(job.kind.value for job in jobs),
        span_seconds=jobs[-1].submitted_seconds - jobs[0].submitted_seconds,
        gpu_hours=math.fsum(_gpu_milli(job) * job.work_seconds for job in jobs) / WHOLE_GPU_MILLI / SECONDS_PER_HOUR,
        core_hours=math.fsum(_cores(job) * job.work_seconds for job in jobs) / SECONDS_PER_HOUR,
        sizes={
            f"{milli / WHOLE_GPU_MILLI:g}": count for milli, count in sorted(Counter(map(_gpu_milli, jobs)).items())
        },
        work_seconds={
            "min": float(work.min()),
            "mean": math.fsum(work) / len(jobs),
            "median": p50,
            "p90": p90,
            "p99": p99,
            "max": float(work.max()),
        },
        cores_asked=sum(_cores(job) > 0 for job in jobs),
        cores_auto=sum(any(role.request.cores is None for role in job.roles) for job in jobs),
        tenants=len({job.tenant for job in jobs}),
        users=len({job.user for job in jobs if job.user}),
        models=_counts(job.model for job in jobs if job.model),
        priorities={str(level): count for level, count in sorted(Counter(job.priority for job in jobs).items())},
        deadlines=sum(job.deadline_seconds is not None for job in jobs),
        ended=_counts(job.ended.value for job in jobs if job.ended),
        notes=trace.notes,
    )


def _counts(words: Iterable[str]) -> dict[str, int]:
    """Count words, the most frequent first."""
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _gpu_milli(job: TraceJob) -> int:
    return sum(role.replicas * role.request.gpu_milli for role in job.roles)


def _cores(job: TraceJob) -> int:
    return sum(role.replicas * (role.request.cores or 0) for role in job.roles)
