"""Elastic training jobs: what an allocator sees of them, and how many replicas it may give each.

Theory of operation. An allocator with `targets` sees every elastic job, running and waiting, and the room that they may
share; it returns a number of replicas for each. A running job keeps at least its minimum, and a waiting job may get 0.
What waiting rigid jobs need is taken out of the room before the allocator is asked (`room_for`), as far as elastic jobs
can give it by shrinking, so no allocator can starve them. A target is a wish: a running job is resized only if that
ends it earlier, the restart included, or if others need what it gives up (ADR 106).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cotenant.core.model.job import JobSpec, ReplicaRange, Role
from cotenant.core.model.resources import NOTHING, Resources, added


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """An elastic job that runs or waits.

    `replicas` is the number of replicas that it has now, 0 if it waits, and `needs` the resources of one of them.
    `rates` are its rates with each number of replicas in its range, in work per second; `remaining` is its remaining
    work, None if that is unknown, and `attained` the work done. A resize costs `restart_seconds`. `settled_seconds` is
    the time since it started or was resized; 0: it starts just now, and a change costs nothing.
    """

    job_id: str
    range: ReplicaRange
    replicas: int
    needs: Resources
    rates: tuple[float, ...]
    remaining: float | None = None
    attained: float = 0.0
    restart_seconds: float = 30.0
    settled_seconds: float = 0.0

    def rate(self, replicas: int) -> float:
        """Return the rate with a number of replicas; 0 without any."""
        return self.rates[replicas - self.range.least] if replicas else 0.0

    @property
    def held(self) -> Resources:
        """What its replicas hold now."""
        return self.needs * self.replicas


@runtime_checkable
class ResizesReplicas(Protocol):
    """An allocator that decides how many replicas elastic jobs have.

    A job that was started or resized less than `resize_interval_seconds` ago keeps its number, unless waiting jobs need
    what it gives up.
    """

    @property
    def resize_interval_seconds(self) -> float:
        """The minimum time between two changes of one job."""

    def targets(self, jobs: Sequence[ElasticJob], room: Resources, now: float) -> Mapping[str, int]:
        """Return the number of replicas of each job, by id; 0 only for waiting jobs.

        Running jobs never get less than their minimum. All together fit into the room, unless the minimum of the
        running jobs alone does not.
        """


def elastic_role(spec: JobSpec) -> tuple[int, Role] | None:
    """Return the role that is resized, with its number: the first that has a range of replicas."""
    number = spec.elastic_role
    return None if number is None else (number, spec.roles[number])


def room_for(jobs: Sequence[ElasticJob], free: Resources, rigid: Iterable[Resources]) -> Resources:
    """Return what elastic jobs may hold in total: what they hold and what is free, without what rigid jobs wait for.

    `rigid` are the needs of waiting jobs that are not elastic, in the queue's order. A job that would not get its
    resources even if all running elastic jobs had their minimum takes nothing out of the room.

    >>> job = ElasticJob("a", ReplicaRange(1, 8), 6, Resources(1000), (1.0,) * 8)
    >>> [room_for([job], Resources(2000), [Resources(4000) * count]).gpu_milli for count in (1, 2)]
    [4000, 8000]
    """
    room = free + added([NOTHING, *(job.held for job in jobs)])
    fewest = added([NOTHING, *(job.needs * job.range.least for job in jobs if job.replicas)])
    for needs in rigid:
        if (needs + fewest).fits(room):
            room -= needs
    return room


class TargetsFailed(Exception):
    """An allocator raised an error, or its targets are invalid."""


def ask_targets(
    allocator: ResizesReplicas, jobs: Sequence[ElasticJob], free: Resources, rigid: Iterable[Resources], now: float
) -> Mapping[str, int]:
    """Return an allocator's number of replicas for each job; `free` and `rigid` are as in `room_for`.

    Raises:
        TargetsFailed: the allocator raised an error, or returned an invalid answer.
    """
    needs = list(rigid)
    room = room_for(jobs, free, needs)
    try:
        targets = validated_targets(jobs, room, allocator.targets(jobs, room, now))
        crowded = bool(needs) or not all(job.replicas for job in jobs)
        return rate_limited(jobs, targets, allocator.resize_interval_seconds, crowded=crowded)
    except Exception as error:  # third-party code may raise anything
        raise TargetsFailed(f"{type(error).__name__}: {error}") from error


def rate_limited(
    jobs: Sequence[ElasticJob], targets: Mapping[str, int], interval_seconds: float, *, crowded: bool
) -> Mapping[str, int]:
    """Return an allocator's targets without changes that come too soon after the last one, whatever it asks for.

    A job that changed less than the interval ago does not grow. It shrinks only if jobs wait (`crowded`), or another
    one grows into what it gives up.

    >>> job = ElasticJob("a", ReplicaRange(1, 8), 4, NOTHING, (1.0,) * 8, settled_seconds=10.0)
    >>> [dict(rate_limited([job], {"a": count}, 60.0, crowded=False)) for count in (8, 2)]
    [{'a': 4}, {'a': 4}]
    """
    recent = [job for job in jobs if job.replicas and 0 < job.settled_seconds < interval_seconds]
    limited = {**targets, **{job.job_id: job.replicas for job in recent if targets[job.job_id] > job.replicas}}
    if not crowded and all(limited[job.job_id] <= job.replicas for job in jobs):
        limited |= {job.job_id: job.replicas for job in recent}
    return limited


class InvalidTargets(ValueError):
    """Targets outside of the jobs' ranges or beyond the room."""


def validated_targets(jobs: Sequence[ElasticJob], room: Resources, targets: Mapping[str, int]) -> Mapping[str, int]:
    """Return an allocator's targets after checking them.

    Raises:
        InvalidTargets: a target is missing or out of its range, or all of them need more than the room.
    """
    total = fewest = NOTHING
    for job in jobs:
        target = targets.get(job.job_id)
        allowed = range(job.range.least, job.range.most + 1)
        if target is None or not (target in allowed or (target == 0 and not job.replicas)):
            raise InvalidTargets(f"{target} replicas for {job.job_id}, which may have {job.range}")
        total += job.needs * target
        fewest += job.needs * (job.range.least if job.replicas else 0)
    if total != fewest and not total.fits(room):
        raise InvalidTargets(f"targets of {total.gpu_milli / 1000:g} GPUs in a room of {room.gpu_milli / 1000:g}")
    return targets
