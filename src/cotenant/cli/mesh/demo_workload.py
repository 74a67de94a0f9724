"""The demo's workload: real processes of several kinds, and two jobs that must fail."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from cotenant.core.model.job import JobKind, JobSpec, Request, Role


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A job of the demo, when it is submitted, and what it demonstrates."""

    spec: JobSpec
    after_seconds: float
    shows: str


def workload(gpus: int, cores: int, scale: float) -> Sequence[DemoJob]:
    """Return the demo's jobs for a machine; `scale` stretches their work (1 is about 15 s on two cores)."""
    steps, packing = max(10, round(50 * scale)), f"{2 * scale:.2f}"
    wide = min(2, cores)
    jobs = [
        _job(
            "resnet-auto",
            "train",
            ["--steps", f"{steps}"],
            Request(1000),
            "cores chosen by the allocator",
            model="resnet",
        ),
        _job("pack-logs-1", "compress", ["--cpu-seconds", packing], Request(cores=1), "a CPU job next to it"),
        _job(
            "gang-of-2",
            "gang",
            ["--steps", f"{steps}"],
            Request(1000, 1),
            "two processes that start together or not at all",
            replicas=2,
        ),
        _job("pack-logs-2", "compress", ["--cpu-seconds", packing], Request(cores=1), "backfills while the gang waits"),
        _job(
            "resnet-wide",
            "train",
            ["--steps", f"{steps}"],
            Request(1000, wide),
            f"the same model on {wide} cores",
            model="resnet",
        ),
        _job("pack-logs-3", "compress", ["--cpu-seconds", packing], Request(cores=1), "one more CPU job"),
        _job("too-big", "train", [], Request((gpus + 5) * 1000, 1), "rejected at once: no node is large enough"),
        DemoJob(
            JobSpec(
                name="typo",
                kind=JobKind.CPU,
                roles=(Role(request=Request(cores=1)),),
                command=("pyhton3", "train.py"),
            ),
            0.0,
            "a command that does not exist: fails with its reason",
        ),
    ]
    if cores < 2:
        jobs = [job for job in jobs if job.spec.name != "gang-of-2"]
    return jobs


def _job(
    name: str,
    program: str,
    arguments: Sequence[str],
    request: Request,
    shows: str,
    *,
    model: str = "",
    replicas: int = 1,
) -> DemoJob:
    path = str(files("cotenant.cli.mesh.demo_programs").joinpath(f"{program}.py"))
    return DemoJob(
        JobSpec(
            name=name,
            kind=JobKind.TRAINING if request.gpu_milli else JobKind.CPU,
            roles=(Role(replicas=replicas, request=request),),
            command=(sys.executable, path, *arguments),
            model=model,
            grace_seconds=2.0,
        ),
        0.0,
        shows,
    )
