"""The waiting jobs by class, and those that have waited long enough for another answer of the placement policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import replace

import numpy as np

from cotenant.core.model.job_table import Flags, Ints
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.resources import NAMES
from cotenant.core.scheduling.equivalence import ClassRefusals
from cotenant.core.scheduling.waiting_order import WaitingOrder
from cotenant.simulator.free_resources import FreeResources
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.policy_set import CheckedPlacement

ROUNDING_SECONDS = 1e-6
CLASSES_INITIAL = 64  # initial capacity
REFUSAL_SECONDS_MIN = 1.0  # a refusal is not retried sooner if nothing happens


class WaitingJobs:
    """The classes with waiting gangs. If the policy distinguishes waits, each class orders its jobs by wait.

    `known` are all classes that ever had a job, by code; `codes` holds each job's class, by sequence. `refusals` are
    those of classes, by code; they hold until something is released, or the first of them expires. `order` has each
    class in the order of the queue policy, if that is fixed while jobs wait and is all that a cycle needs to know.
    """

    def __init__(self, placement: CheckedPlacement, jobs: int, order: WaitingOrder | None = None) -> None:
        self.order = order
        self.known: list[JobClass] = []
        self.codes: Ints = np.zeros(jobs, dtype=np.int64)
        self.refusals = ClassRefusals[int]()
        self._needs: Ints = np.zeros((CLASSES_INITIAL, len(NAMES)), dtype=np.int64)
        self._unrefused: Flags = np.ones(CLASSES_INITIAL, dtype=np.bool_)
        self._placement = placement
        self._next_expiry = math.inf
        self._job_classes: dict[int, JobClass] = {}  # by code

    def __bool__(self) -> bool:
        return bool(self._job_classes)

    @property
    def job_classes(self) -> ValuesView[JobClass]:
        """The classes with waiting gangs."""
        return self._job_classes.values()

    @property
    def needs(self) -> Ints:
        """The needs of gangs by the code of their class, in the order of `resources.KINDS`."""
        return self._needs[: len(self.known)]

    @property
    def unrefused(self) -> Flags:
        """Whether a class has no refusal, by its code; follows later changes."""
        return self._unrefused[: len(self.known)]

    def any_placeable(self, free: FreeResources) -> bool:
        """Return whether any class with waiting gangs has no refusal and does not need more than is free."""
        refused = self.refusals.uniform
        return any(code not in refused and not free.lacks(one) for code, one in self._job_classes.items())

    def assign(self, sim_job: SimulatedJob, job_class: JobClass) -> None:
        """Assign a job to a class."""
        if job_class.code < 0:
            job_class.code = len(self.known)
            self.known.append(job_class)
            if len(self.known) > len(self._needs):
                self._needs = np.concatenate([self._needs, self._needs])
                self._unrefused = np.concatenate([self._unrefused, np.ones_like(self._unrefused)])
            self._needs[job_class.code] = job_class.needs
        sim_job.job_class = job_class
        self.codes[sim_job.sequence] = job_class.code

    def refuse(self, job_class: JobClass, refusal: Refusal) -> None:
        """Remember the refusal of a gang for all gangs of its class."""
        self.refusals.add_uniform(job_class.code, refusal)
        self._unrefused[job_class.code] = False

    def clear_refusals(self) -> None:
        """Clear all refusals, because something was released."""
        self.refusals.clear()
        self._unrefused[:] = True

    def expire_refusals(self, now: float) -> None:
        """Clear all refusals if one of them has expired."""
        if now >= self._next_expiry:
            self._next_expiry = math.inf
            self.clear_refusals()

    def next_expiry(self, refusals: Iterable[Refusal], now: float) -> float:
        """Return when the next refusal expires, including these.

        Refusals for fragmentation are tracked separately.
        """
        holds = [refusal.holds_seconds for refusal in refusals if refusal.code is not Code.FRAGMENTED]
        self._next_expiry = min([self._next_expiry, *(now + max(seconds, REFUSAL_SECONDS_MIN) for seconds in holds)])
        return self._next_expiry

    def add(self, sim_job: SimulatedJob) -> None:
        """Add a waiting gang to its class."""
        job_class = sim_job.job_class
        job_class.waiting += 1
        self._job_classes[job_class.code] = job_class
        if self.order:
            self.order.add(sim_job.job.id, job_class.code)
        if self._placement.discerns:
            job_class.line[sim_job.sequence] = sim_job

    def remove(self, sim_job: SimulatedJob) -> None:
        """Remove a gang that no longer waits, or leaves its class."""
        job_class = sim_job.job_class
        if self.order:
            self.order.remove(sim_job.job.id, job_class.code)
        job_class.line.pop(sim_job.sequence, None)
        job_class.waiting -= 1
        if not job_class.waiting:
            del self._job_classes[job_class.code]

    def resize_waiting(
        self, sim_jobs: Iterable[SimulatedJob], size: Callable[[SimulatedJob], JobClass | None], now: float
    ) -> Iterator[SimulatedJob]:
        """Move waiting jobs to the class that `size` returns, if any; yields the moved jobs.

        Their waits continue.
        """
        for sim_job in [sim_job for sim_job in sim_jobs if not sim_job.running]:
            if job_class := size(sim_job):
                waited = sim_job.fragmented_until(now)
                self.remove(sim_job)
                self.assign(sim_job, job_class)
                self.add(sim_job)
                sim_job.fragmented_mark = job_class.fragmented.read(now) - waited
                job_class.line = dict(sorted(job_class.line.items(), key=lambda one: -one[1].fragmented_until(now)))
                yield sim_job

    def advance_classes(self, now: float) -> Iterator[SimulatedJob]:
        """Move jobs that have waited long enough to the later class; yields the moved jobs."""
        job_classes = [job_class for job_class in self._job_classes.values() if job_class.until_seconds < math.inf]
        for job_class in job_classes:  # grows by the later classes, some of whose jobs may be due already
            before = len(job_classes)
            while job_class.line and _due(sim_job := next(iter(job_class.line.values())), now):
                later, waited = self._after(job_class, now), sim_job.fragmented_until(now)
                self.remove(sim_job)
                self.assign(sim_job, later)
                self.add(sim_job)
                sim_job.fragmented_mark = later.fragmented.read(now) - waited
                job_classes += [later] * (len(job_classes) == before)
                yield sim_job

    def _after(self, job_class: JobClass, now: float) -> JobClass:
        """Return the class that follows a class after its time."""
        if job_class.later is None:
            oldest = replace(job_class.gang(""), fragmented_seconds=job_class.until_seconds)
            job_class.later = job_class.later_class(self._placement.equivalence_seconds(oldest), now)
        return job_class.later

    def track_fragmentation(self, refusals: Mapping[str, Refusal], free: FreeResources, now: float) -> float:
        """Track which places are fragmented from now on; returns the time until the first job changes its class.

        `refusals` are those of the last cycle, by job, in addition to earlier refusals of classes. A gang that needs
        more than is `free` waits for that instead.
        """
        apart = {job_id for job_id, refusal in refusals.items() if refusal.code is Code.FRAGMENTED}
        for job_class in self._job_classes.values():
            refusal = self.refusals.uniform.get(job_class.code)
            known = refusal is not None and refusal.code is Code.FRAGMENTED
            refused = known or (bool(apart) and any(sim_job.job.id in apart for sim_job in job_class.line.values()))
            job_class.fragmented.switch(now, on=refused and not free.lacks(job_class))
        return min((job_class.changes_class_in(now) for job_class in self._job_classes.values()), default=math.inf)


def _due(sim_job: SimulatedJob, now: float) -> bool:
    """Return whether a job has waited too long for its class, within rounding."""
    return sim_job.fragmented_until(now) >= sim_job.job_class.until_seconds - ROUNDING_SECONDS
