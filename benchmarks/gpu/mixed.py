"""Twelve mixed jobs, live and simulated: four trainings, and eight CPU jobs of several sizes.

The simulator gets the same jobs at the same moments under the same policies; the work of each is the time that it held
its resources in the live run. What is compared is thus the waiting, and what the mesh needs between a submission and
the start, and between an end and the next start.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.gpu.machine import missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.harness import Row
from benchmarks.local_mesh import LocalMesh, MeshFailed

from cotenant import simulator
from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.model.node import NodeShape

POLICIES = {"queue": "borda-mlfq", "placement": "consolidate", "allocator": "requested", "predictor": "history"}
SETTINGS = "".join(f'{group} = "{name}"\n' for group, name in POLICIES.items()) + 'contention = "none"\n'
TRAININGS = (("text", 0.0), ("image", 1.0), ("audio", 2.0), ("text", 4.0))  # when each is submitted, in seconds
CPU_JOBS = tuple((1 + number % 3, 3.0 + number % 4, 0.5 * number) for number in range(8))  # cores, seconds, when
STEPS = {"text": 60, "image": 60, "audio": 200}
REHEARSED = 0.1  # of the steps and seconds
BUSY = """
import sys, time
end = time.process_time() + float(sys.argv[1])
while time.process_time() < end:
    sum(range(10_000))
"""
RATIO_MAX = 1.1


@dataclass(frozen=True, slots=True)
class MixedJob:
    """A job of the mix: when it is submitted after the first, what it requests, and its command."""

    after_seconds: float
    kind: JobKind
    gpus: int
    cores: int
    command: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Return the arguments of `cotenant submit`."""
        requested = ["--kind", self.kind.value, "--gpus", str(self.gpus), "--cpus", str(self.cores)]
        return [*requested, "--profile", "never", "--", *self.command]

    def role(self) -> Role:
        """Return its role in a simulation."""
        return Role("worker", 1, Request(1000 * self.gpus, self.cores))


@dataclass(frozen=True, slots=True)
class Ran:
    """When a job was submitted, was assigned its resources, and ended; unix seconds."""

    submitted: float
    assigned: float
    ended: float


def measure(run: PointRun) -> Iterator[Row]:
    """Run the jobs live, then simulate them."""
    jobs = mix(run)
    with closing(LocalMesh(run.directory, SETTINGS)) as up:
        (node,) = up.json("nodes")
        begin, ids = time.monotonic(), []
        for job in jobs:
            time.sleep(max(0.0, begin + job.after_seconds - time.monotonic()))
            ids.append(up.submit(*job.arguments()))
        views = [up.wait_for_end(id, max(1.0, run.left())) for id in ids]
    run.raw["jobs"] = views
    ran = [ran_of(view) for view in views]
    yield from compared(jobs, ran, NodeShape(node["gpus"], node["cores"]))


def mix(run: PointRun) -> list[MixedJob]:
    """Return the jobs in the order of their submission."""
    machine, scale = run.machine, REHEARSED if run.machine.rehearsal else 1.0
    cores = max(1, machine.cores // 4)
    jobs = []
    for number, (model, after) in enumerate(TRAININGS):
        log, steps = run.directory / f"{number}.steps", max(5, round(scale * STEPS[model]))
        command = machine.train(model, log, "--steps", steps, "--workers", cores)
        jobs.append(MixedJob(after, JobKind.TRAINING, 1, cores, tuple(command)))
    for wanted, seconds, after in CPU_JOBS:
        words = (sys.executable, "-c", BUSY, str(scale * seconds))
        jobs.append(MixedJob(after, JobKind.CPU, 0, min(wanted, machine.cores), words))
    return sorted(jobs, key=lambda job: (job.after_seconds, job.gpus, job.command))


def ran_of(view: dict[str, Any]) -> Ran:
    """Return the times of a job that succeeded.

    Raises:
        MeshFailed: it did not.
    """
    if view["phase"] != "succeeded":
        raise MeshFailed(f"job {view['id']} {view['phase']}: {view['phase_reason']}")
    times = view["create_time"], view["attempt"]["assign_time"], view["end_time"]
    return Ran(*(datetime.fromisoformat(text).timestamp() for text in times))


def compared(jobs: Sequence[MixedJob], ran: Sequence[Ran], shape: NodeShape) -> Iterator[Row]:
    """Simulate the jobs with the times for which they ran, and yield the average completion time and the makespan."""
    first = min(one.submitted for one in ran)
    trace = [
        simulator.TraceJob(str(number), one.submitted - first, one.ended - one.assigned, (job.role(),), job.kind)
        for number, (job, one) in enumerate(zip(jobs, ran, strict=True))
    ]
    result = simulator.simulate(
        simulator.Trace("mixed", "none", tuple(trace)),
        simulator.Cluster("this machine", (shape,), ("",)),
        queue=POLICIES["queue"],
        placement=POLICIES["placement"],
        allocator=POLICIES["allocator"],
        predictor=POLICIES["predictor"],
    )
    live = statistics.fmean(one.ended - one.submitted for one in ran)
    simulated = float(result.avg_jct_seconds or 0.0)
    ratio = max(live / simulated, simulated / live) if simulated else 0.0
    bar = f"within a factor of {RATIO_MAX:g}"
    yield Row("average completion time", live, "s", simulated, "simulated", bar, 0 < ratio <= RATIO_MAX)
    makespan = max(one.ended for one in ran) - first
    yield Row("makespan", makespan, "s", float(result.makespan_seconds or 0.0), "simulated")
    waited = statistics.fmean(one.assigned - one.submitted for one in ran)
    yield Row("average wait until the resources are assigned", waited, "s")
    yield Row("preemptions in the simulation", result.preemptions, "")


POINT = Point("mixed", 75.0, 45.0, measure, missing_gpu)
