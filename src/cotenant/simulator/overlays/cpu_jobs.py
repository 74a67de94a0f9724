"""`cpu-jobs=openb[:SHARE]`: jobs without GPUs that share the cluster with the trace's jobs."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Request
from cotenant.core.model.validation import Violation
from cotenant.core.policy.options import BadOption
from cotenant.simulator.overlays.port import Setting, number, one_of, picks, rounded
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.openb import MEBIBYTE, NOT_PREEMPTED, PRIORITIES, whole_cores
from cotenant.simulator.traces.trace_job import replicas

SAMPLE = Path(__file__).parent.parent / "samples" / "openb_cpu_pods.csv"
SHARE_DEFAULT = 0.2
JOBS_MAX = 1_000_000
GIGABYTE = 1e9
# Memory traffic of a core, in GB/s, and how many of ten jobs have it: compute, ordinary, and streaming work [R].
BANDWIDTHS = ((0.5, 6), (2.0, 3), (6.0, 1))


class Pod(NamedTuple):
    """A CPU-only pod of the sample."""

    cores: int
    memory_bytes: int
    qos: str
    seconds: float


@cache
def sample() -> tuple[Pod, ...]:
    """Return the bundled pods: every fourth CPU-only pod of openb that ran for at most a day (ATC'23 [D])."""
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Pod(
                whole_cores(int(row["cpu_milli"])),
                int(row["memory_mib"]) * MEBIBYTE,
                row["qos"],
                float(row["duration_seconds"]),
            )
            for row in csv.DictReader(file)
        )


@dataclass(frozen=True, slots=True)
class CpuJobs:
    """Adds CPU-only jobs drawn from openb's pods, enough to request SHARE (0.2) of the cluster's core time.

    They arrive uniformly over the trace's span: from its first submission to its last, or for as long as its work takes
    on all of the cluster's GPUs if that is longer, as in traces whose jobs arrive all at once. Their cores × seconds
    add up, on average, to SHARE × the cluster's cores × that span. Only pods that fit the largest node are drawn, and
    memory is requested only if the cluster declares its nodes' memory.

    Cores, memory, seconds and QoS are the pod's [D]; times, SHARE and memory bandwidth are assumed [R]: 0.5, 2 or 6
    GB/s per core for 60, 30 and 10 % of the jobs.
    """

    key: ClassVar[str] = "cpu-jobs"
    form: ClassVar[str] = "openb[:SHARE]"
    share: float

    @classmethod
    def parse(cls, value: str) -> CpuJobs:
        """Parse the source of the jobs, and the share of the cores they request."""
        source, colon, share = value.partition(":")
        one_of(source, ("openb",))
        return cls(number(share, 0, 10) if colon else SHARE_DEFAULT)

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Add the jobs after those of the trace."""
        pods = _fitting(setting)
        begin, span = setting.trace.jobs[0].submitted_seconds, _span_seconds(setting)
        core_seconds = math.fsum(pod.cores * pod.seconds for pod in pods) / len(pods)
        count = max(1, round(self.share * setting.cluster.cores * span / core_seconds))
        if count > JOBS_MAX:
            raise _bad(f"{count} CPU jobs would be added; the maximum is {JOBS_MAX}")
        times = rounded(np.sort(rng.random(count)) * span)
        which = rng.integers(len(pods), size=count).tolist()
        drawn = picks(rng, count, [weight for _, weight in BANDWIDTHS])
        with_memory = setting.cluster.resources.memory_bytes > 0
        prefix = _unused("openb-cpu", jobs)
        added = [
            _job(f"{prefix}-{at + 1}", begin + times[at], pods[which[at]], BANDWIDTHS[drawn[at]][0], with_memory)
            for at in range(count)
        ]
        return [*jobs, *added]


def _span_seconds(setting: Setting) -> float:
    jobs, gpus = setting.trace.jobs, setting.cluster.gpus
    submitting = jobs[-1].submitted_seconds - jobs[0].submitted_seconds
    work = math.fsum(role.replicas * role.request.gpu_milli * job.work_seconds for job in jobs for role in job.roles)
    return max(submitting, work / (gpus * WHOLE_GPU_MILLI) if gpus else 0.0)


def _fitting(setting: Setting) -> list[Pod]:
    cluster = setting.cluster
    with_memory = cluster.resources.memory_bytes > 0
    fitting = [
        pod
        for pod in sample()
        if any(
            pod.cores <= shape.cores and (not with_memory or pod.memory_bytes <= shape.memory_bytes)
            for shape in set(cluster.shapes)
        )
    ]
    if not fitting:
        least = min(pod.cores for pod in sample())
        raise _bad(
            f"no node of the cluster {cluster.name} has room for any of openb's CPU jobs: at least {least} cores"
        )
    return fitting


def _job(job_id: str, submitted_seconds: float, pod: Pod, gigabytes_a_core: float, with_memory: bool) -> TraceJob:
    return TraceJob(
        id=job_id,
        submitted_seconds=submitted_seconds,
        work_seconds=pod.seconds,
        roles=replicas(1, Request(cores=pod.cores, memory_bytes=pod.memory_bytes if with_memory else 0)),
        kind=JobKind.CPU,
        priority=PRIORITIES[pod.qos],
        preemptible=pod.qos not in NOT_PREEMPTED,
        memory_bandwidth_bytes_per_second=gigabytes_a_core * GIGABYTE * pod.cores,
    )


def _unused(prefix: str, jobs: Sequence[TraceJob]) -> str:
    while any(job.id.startswith(prefix) for job in jobs):
        prefix += "+"
    return prefix


def _bad(why: str) -> BadOption:
    return BadOption([Violation("overlay cpu-jobs", why)], {CpuJobs.key: CpuJobs.form})
