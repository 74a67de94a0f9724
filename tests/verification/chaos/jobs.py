"""The jobs that users of a chaos run submit: all kinds, drawn from a seed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from benchmarks.kill_mesh import JOB

from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job import JobKind, JobSpec, OpenReplicas, Qos, Request, Role
from cotenant.core.model.job_array import ArraySpec, IndexRange

LONG, ALONE, ARRAY, DAEMON, ELASTIC, SERVICE, AFTER = 0.1, 0.05, 0.18, 0.3, 0.25, 0.05, 0.12
OPEN = 0.5  # of services
STOP_AFTER_SECONDS = 10.0  # without the control plane, for jobs that must never run twice: the minimum allowed
SECONDS, LONG_SECONDS, ALONE_SECONDS, SERVICE_SECONDS = (0.05, 0.8), (2.0, 7.0), (8.0, 18.0), (3600.0, 3600.0)
SMALL_ARRAY, LARGE_ARRAY, LARGE = (1, 3), (60, 130), 0.2  # last index; large arrays take several transactions
ARRAY_SECONDS = (0.05, 3.0)  # so that some still run when the array is changed
RETRIES_MAX, FRAGILE = 1000, 0.3  # share of jobs without retries: only an injected kill may fail them
OBJECTIVE = Qos(latency_seconds=0.1, latency_percentile=99.0, arrivals_per_second=10.0)


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A job, and what the checks need to know about it.

    `replicas` is the number of its processes, 0 if open; `alone` means two of its attempts must never overlap, and
    `service` that it runs until cancelled.
    """

    spec: JobSpec
    replicas: int
    alone: bool = False
    service: bool = False
    after: dict[str, str] = field(default_factory=dict)  # conditions by job


def draw_job(directory: Path, rng: Random, earlier: Sequence[str] = ()) -> DrawnJob:
    """Draw a job; some depend on one of `earlier`."""
    if rng.random() < SERVICE:
        return _service(directory, rng)
    replicas, gpus = rng.choice([(1, 1), (1, 1), (1, 0), (1, 0), (2, 1), (3, 1), (2, 0)])
    alone = rng.random() < ALONE
    last = rng.randint(*(LARGE_ARRAY if rng.random() < LARGE else SMALL_ARRAY))
    array = ArraySpec((IndexRange(0, last),)) if rng.random() < ARRAY and replicas == 1 else None
    elastic = gpus > 0 and rng.random() < ELASTIC
    long = elastic or rng.random() < LONG
    usual = ARRAY_SECONDS if array else SECONDS
    seconds = rng.uniform(*(ALONE_SECONDS if alone else LONG_SECONDS if long else usual))
    after = {rng.choice(earlier): rng.choice(list(Condition))} if earlier and rng.random() < AFTER else {}
    spec = JobSpec(
        name="victim",
        kind=JobKind.TRAINING if gpus else JobKind.CPU,
        roles=(Role(replicas=replicas, request=Request(gpu_milli=1000 * gpus, cores=None if elastic else 1)),),
        command=_command(directory, seconds, daemon=rng.random() < DAEMON, elastic=elastic),
        grace_seconds=2.0,
        retries_max=0 if rng.random() < FRAGILE else RETRIES_MAX,
        array=array,
        dependencies=tuple(Dependency(job_id, condition) for job_id, condition in after.items()),
        stop_after_disconnected_seconds=STOP_AFTER_SECONDS if alone else None,
    )
    return DrawnJob(spec, replicas, alone, after={job_id: str(condition) for job_id, condition in after.items()})


def _service(directory: Path, rng: Random) -> DrawnJob:
    """Draw a service that runs until cancelled; some leave their number of replicas open."""
    replicas = 0 if rng.random() < OPEN else rng.randint(1, 2)
    role = Role(replicas=max(1, replicas), request=Request(gpu_milli=1000, cores=1))
    spec = JobSpec(
        name="service",
        kind=JobKind.INFERENCE,
        roles=(role if replicas else replace(role, open=OpenReplicas(1, 2)),),
        command=_command(directory, rng.uniform(*SERVICE_SECONDS), daemon=False, elastic=False),
        grace_seconds=2.0,
        retries_max=RETRIES_MAX,
        qos=OBJECTIVE,
    )
    return DrawnJob(spec, replicas, service=True)


def _command(directory: Path, seconds: float, *, daemon: bool, elastic: bool) -> tuple[str, ...]:
    words = (str(directory / "job.py"), str(directory), f"{seconds:.3f}", "daemon" if daemon else "alone", "apart")
    return (sys.executable, "-I", "-S", *words, *(["elastic"] if elastic else []))


def prepare(directory: Path) -> None:
    """Write the programs of the jobs."""
    (directory / "held").mkdir()
    (directory / "job.py").write_text(JOB)
