"""Elastic jobs in a simulation: what the allocator is shown of them, and when it is asked.

It is asked before each cycle in which a job came or went or a limit on the rate of resizes ran out, for the sizes of
all elastic jobs; and after the cycle once more for running jobs, about what the cycle left free. A waiting job waits
with the number of replicas that it would start with, at least its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.model.job import Role
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import Resources
from cotenant.core.sizing.elastic import ElasticJob, ResizesReplicas, TargetsFailed, ask_targets, elastic_role
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.physics.scaling import speed
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.prediction_arms import Arm

ClassOf = Callable[[SimulatedJob, int], JobClass | Refusal]


@dataclass(slots=True)
class ReplicaFigures:
    """Totals of resizes: their number, and the GPU time that was lost to restarts."""

    resizes: int = 0
    lost_gpu_seconds: float = 0.0


class ReplicaResizing:
    """The elastic jobs of a simulation, and the next time the allocator is due to be asked."""

    def __init__(self, allocator: ResizesReplicas, arm: Arm, restart_seconds: float) -> None:
        self.figures = ReplicaFigures()
        self.changed = False  # a job came or went since the last question
        self.class_of: ClassOf | None = None  # set by the engine, which knows what can ever run
        self.restart_seconds = restart_seconds
        self._allocator, self._arm = allocator, arm
        self._due = math.inf
        self._most: dict[tuple[Role, ...], int] = {}

    def next_seconds(self) -> float:
        """Return when the allocator is due to be asked though nothing else happens."""
        return self._due

    def wanted(self, now: float) -> bool:
        """Return whether the allocator is due to be asked."""
        return self.changed or now >= self._due

    def targets(
        self, sim_jobs: Sequence[SimulatedJob], free: Resources, rigid: Iterable[Resources], now: float
    ) -> Mapping[str, int]:
        """Return the number of replicas of each job.

        Raises:
            PolicyFailed: the allocator raised an error, or returned an invalid answer.
        """
        self.changed = False
        jobs = [self._shown(sim_job, now) for sim_job in sim_jobs]
        try:
            return ask_targets(self._allocator, jobs, free, rigid, now)
        except TargetsFailed as error:
            raise PolicyFailed("allocation", self._allocator, f"{len(jobs)} elastic jobs", str(error)) from error

    def schedule(self, sim_jobs: Iterable[SimulatedJob], now: float) -> None:
        """Set when the first running job may change again."""
        free_at = (one.running_since + self._allocator.resize_interval_seconds for one in sim_jobs if one.running)
        self._due = min((at for at in free_at if at > now), default=math.inf)

    def _shown(self, sim_job: SimulatedJob, now: float) -> ElasticJob:
        number, role = elastic_of(sim_job)
        assert role.elastic
        least = role.elastic.least
        most = self._largest(sim_job, number, role)
        rates = tuple(speed(count) / speed(role.replicas) for count in range(least, most + 1))
        ran = now - sim_job.running_since if sim_job.running else 0.0
        total_seconds, _ = self._arm.expected(sim_job.sequence)
        rate = sim_job.rate if sim_job.running else sim_job.speed
        left = total_seconds - sim_job.attained_seconds - ran
        return ElasticJob(
            sim_job.job.id,
            type(role.elastic)(least, most),
            sim_job.job_class.parts[number].replicas if sim_job.running else 0,
            Resources.of(sim_job.job_class.parts[number].demand),
            rates,
            None if math.isnan(left) else max(0.0, left) * rate,
            (sim_job.attained_seconds + ran) * rate,
            self.restart_seconds if ran else 0.0,
            ran,
        )

    def _largest(self, sim_job: SimulatedJob, number: int, role: Role) -> int:
        """Return the largest number of replicas that could ever run, at most the job's maximum."""
        assert self.class_of
        assert role.elastic
        roles = sim_job.job.roles
        if roles not in self._most:
            counts = range(role.elastic.most, role.replicas, -1)
            fitting = (count for count in counts if not isinstance(self.class_of(sim_job, count), Refusal))
            self._most[roles] = next(fitting, role.replicas)
        return self._most[roles]

    def resized_class(self, sim_job: SimulatedJob, count: int) -> JobClass:
        """Return the class of a job with another number of replicas in its elastic role."""
        assert self.class_of
        found = self.class_of(sim_job, count)
        assert not isinstance(found, Refusal), f"{sim_job.job.id} can never run with {count} replicas: {found}"
        return found


def elastic_of(sim_job: SimulatedJob) -> tuple[int, Role]:
    """Return the elastic role of an elastic job, with its number."""
    found = elastic_role(sim_job.asked)
    assert found
    return found
