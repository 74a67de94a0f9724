"""A model of one node with training and CPU jobs, in a closed loop with a contention policy.

Jobs share the memory bandwidth as in `cotenant.simulator.physics.bandwidth`: each CPU job demands bandwidth for each
core that it may use, and a training job waits for memory once the total demand exceeds the peak; demand beyond the
saturation of the node causes no further slowdown. Directives of the policy are applied before the next window.
Measured rates have seeded noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.policy.protocols import FREE, AttemptWindow, ContentionPolicy, Directive, NodeWindow, Throttle
from cotenant.simulator.physics import bandwidth

PEAK = 100e9
SENSITIVITY = bandwidth.SENSITIVITY


@dataclass(slots=True)
class Trainer:
    """A training job; `rate_per_second` is its rate without contention."""

    id: str = "dnn"
    rate_per_second: float = 10.0
    cores: int = 8
    demand: float = 10e9  # bytes/s
    expected: float | None = None
    reported: bool = True  # whether it reports its rate; else only its GPU utilization is known
    speed: float = 1.0


@dataclass(slots=True)
class CpuJob:
    """A CPU job that runs from `begin` to `end` seconds; `demand` is that of all its cores, in bytes/s."""

    id: str
    demand: float
    cores: int = 8
    begin: float = 0.0
    end: float = float("inf")
    best_effort: bool = False
    throttle: Throttle = FREE
    speed: float = 1.0
    moved: bool = False
    speeds: list[float] = field(default_factory=list)

    @property
    def speed_alone(self) -> float:
        """Its speed on an otherwise empty node."""
        return min(1.0, PEAK / self.demand) if self.demand else 1.0

    def runs(self, now: float) -> bool:
        """Return whether the job is on the node."""
        return self.begin <= now < self.end and not self.moved

    def wants(self, *, enforced: bool, peak: float) -> float:
        """Return its bandwidth demand under its throttle."""
        if self.throttle.suspended:
            return 0.0
        cores = min(self.cores, self.throttle.cores or self.cores)
        wants = self.demand * cores / self.cores
        percent = self.throttle.bandwidth_percent
        return min(wants, percent / 100 * peak) if enforced and percent < 100 else wants


def hog(slowdown: float, trainer: Trainer | None = None, id: str = "hog", **others: float) -> CpuJob:
    """Return a CPU job whose bandwidth demand slows a training job by `slowdown`."""
    over = 1 + slowdown / (1 - slowdown) / SENSITIVITY
    return CpuJob(id, over * PEAK - (trainer or Trainer()).demand, **others)  # type: ignore[arg-type]  # floats, by name


def saturator(id: str, demand: float, **others: float) -> CpuJob:
    """Return a CPU job of eight cores that demands `demand` times the peak bandwidth, less under a core limit."""
    return CpuJob(id, demand * PEAK, **others)  # type: ignore[arg-type]  # floats, by name


@dataclass(slots=True)
class ModelNode:
    """The node. `reported`: the hardware reports bandwidth; `enforced`: the hardware can limit a job to a share."""

    trainers: Sequence[Trainer]
    cpu_jobs: Sequence[CpuJob]
    seed: int = 0
    noise: float = 0.05
    reported: bool = True
    enforced: bool = False
    seconds: float = 5.0
    peak: float = PEAK
    saturation: float = math.inf  # of the peak
    now: float = 0.0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def window(self) -> NodeWindow:
        """Advance by one window and return it."""
        begin, self.now = self.now, self.now + self.seconds
        here = [job for job in self.cpu_jobs if job.runs(begin) or job.runs(self.now - 1e-9)]
        wants = {
            job.id: job.wants(enforced=self.enforced, peak=self.peak) * self._share_present(job, begin) for job in here
        }
        total = sum(wants.values()) + sum(trainer.demand for trainer in self.trainers)
        given = {id: bandwidth.granted(wish, total, self.peak) for id, wish in wants.items()}
        for trainer in self.trainers:
            trainer.speed = bandwidth.speed(min(total, self.saturation * self.peak), self.peak, SENSITIVITY)
        for job in here:
            cores = min(job.cores, job.throttle.cores or job.cores) / job.cores
            bound = given[job.id] / (job.demand * self._share_present(job, begin)) if job.demand else cores
            job.speed = 0.0 if job.throttle.suspended else min(cores, bound)
            job.speeds.append(job.speed)
        attempts = [
            *map(self._trainer_window, self.trainers),
            *(self._cpu_job_window(job, given[job.id], begin) for job in here),
        ]
        used = min(total, self.peak)
        return NodeWindow(
            "n1",
            self.now,
            self.seconds,
            tuple(attempts),
            memory_bandwidth_bytes_per_second=used if self.reported else None,
            memory_bandwidth_peak_bytes_per_second=self.peak if self.reported else None,
            bandwidth_enforced=self.enforced,
        )

    def _share_present(self, job: CpuJob, begin: float) -> float:
        """Return the share of the window in which a job was on the node."""
        return max(0.0, min(job.end, self.now) - max(job.begin, begin)) / self.seconds

    def _trainer_window(self, trainer: Trainer) -> AttemptWindow:
        measured = max(0.0, trainer.speed * (1 + self.noise * self.rng.gauss(0.0, 1.0)))
        return AttemptWindow(
            trainer.id,
            1,
            cpu_job=False,
            cores_used=float(trainer.cores),
            rate_per_second=trainer.rate_per_second * measured if trainer.reported else None,
            gpu_utilisation_percent=min(100.0, 80 * measured),
            memory_bandwidth_bytes_per_second=trainer.demand if self.reported else None,
            cores=trainer.cores,
            expected_rate_per_second=trainer.expected,
        )

    def _cpu_job_window(self, job: CpuJob, given: float, begin: float) -> AttemptWindow:
        cores = 0 if job.throttle.suspended else min(job.cores, job.throttle.cores or job.cores)
        return AttemptWindow(
            job.id,
            1,
            cpu_job=True,
            cores_used=cores * self._share_present(job, begin),
            memory_bandwidth_bytes_per_second=given if self.reported else None,
            cores=job.cores,
            throttle=job.throttle,
            best_effort=job.best_effort,
        )

    def apply(self, directives: Sequence[Directive]) -> None:
        """Apply the directives of a policy."""
        by_id = {job.id: job for job in self.cpu_jobs}
        for directive in directives:
            job = by_id[directive.job_id]
            job.throttle = directive.throttle or replace(FREE, suspended=directive.share <= 0)
            job.moved |= directive.move

    def run(self, policy: ContentionPolicy, windows: int) -> list[tuple[NodeWindow, list[Directive]]]:
        """Advance by `windows` windows under a policy; return the windows and directives."""
        story = []
        for _ in range(windows):
            window = self.window()
            directives = list(policy.judge(window))
            self.apply(directives)
            story.append((window, directives))
        return story
