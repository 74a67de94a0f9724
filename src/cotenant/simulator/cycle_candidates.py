"""The gangs that a cycle tries to place, one by one; gangs whose answer is known are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from operator import le

import numpy as np

from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Ints, Jobs
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import NAMES
from cotenant.core.model.tenancy import Headroom
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.reservations import ReservationRules
from cotenant.simulator.free_resources import FreeResources
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.policy_set import CheckedPlacement
from cotenant.simulator.waiting_jobs import WaitingJobs

UNLIMITED = (math.inf,) * len(NAMES)  # more of each resource than any cluster has


class CycleCandidates:
    """Gangs of jobs in their order. A caller that requests the next gang has placed or refused the last one.

    The cycle decrements `headroom` as gangs start; this class decrements `free`.
    """

    def __init__(
        self,
        sim_jobs: Mapping[int, SimulatedJob],
        waiting: WaitingJobs,
        placement: CheckedPlacement,
        free: FreeResources,
        headroom: Headroom,
        now: float,
    ) -> None:
        self._now = now
        self._sim_jobs, self._waiting, self._placement = sim_jobs, waiting, placement
        self._free = FreeResources(free.now)
        self._headroom = headroom

    def until_first_refusal(self, sequences: Ints) -> Iterator[Gang]:
        """Yield gangs up to the first that finds no room; a gang over its tenant's limit holds no other back."""
        for sequence in sequences:
            sim_job = self._sim_jobs[int(sequence)]
            if self._over_limit(sim_job.job_class):
                continue
            if self._free.lacks(sim_job.job_class):
                return
            yield sim_job.gang(self._now)
            if self._placement.refusal:
                return
            self._free.take(sim_job.job_class)

    def placeable(self, sequences: Ints) -> Iterator[Gang]:
        """Yield gangs whose class was not refused since the last release, and that do not need more than is free."""
        job_classes, needs, codes = self._waiting.known, self._waiting.needs, self._waiting.codes[sequences]
        at, most = 0, UNLIMITED
        while True:
            free = self._free.now
            if not all(map(le, most, free)):  # for at least one of the classes, or one was refused
                placeable = self._waiting.unrefused & (needs <= free).all(axis=1)
                rest = placeable[codes[at:]]
                sequences, codes, at = sequences[at:][rest], codes[at:][rest], 0
                most = needs[placeable].max(axis=0, initial=0).tolist()
            if at == len(sequences):
                return
            code, sequence = int(codes[at]), int(sequences[at])
            job_class = job_classes[code]
            refusal = self._over_limit(job_class)
            if not refusal:
                yield self._sim_jobs[sequence].gang(self._now)
                refusal = self._placement.refusal
                if not refusal:
                    self._free.take(job_class)
                at += 1
            if refusal:
                self._waiting.refuse(job_class, refusal)
                most = UNLIMITED

    def placeable_or_starving(self, sequences: Ints, rule: ReservationRules) -> Iterator[Gang]:
        """Yield gangs that fit in the free resources, and the first starving gangs, which may get reservations."""
        lacks, codes = (
            np.array([self._free.lacks(job_class) for job_class in self._waiting.known]),
            self._waiting.codes[sequences],
        )
        tries = rule.tries
        for sequence, lacking in zip(sequences.tolist(), lacks[codes].tolist(), strict=True):
            sim_job = self._sim_jobs[sequence]
            if lacking and (not tries or self._now - sim_job.waiting_since < rule.after_seconds):
                continue
            tries -= lacking
            yield sim_job.gang(self._now)

    def _over_limit(self, job_class: JobClass) -> Refusal | None:
        """Return how one more gang of a class would exceed its tenant's limit; None if it would not."""
        return (
            self._headroom.refuse(job_class.tenant, job_class.gpu_milli, job_class.cores) if job_class.tenant else None
        )


def victims_of(
    sim_jobs: Mapping[int, SimulatedJob],
    jobs: Jobs,
    choice: cycle.Choice,
    stop_cost_seconds: Callable[[SimulatedJob, float], float],
    now: float,
) -> Iterator[cycle.Victim]:
    """Yield the jobs that may be stopped, with what they hold, and the cost of a stop if that matters."""
    ahead = choice.ahead().tolist()
    if choice.standings is None:
        for sequence, first in zip(jobs.sequence[choice.victims].tolist(), ahead, strict=True):
            sim_job = sim_jobs[sequence]
            yield cycle.Victim(sim_job.job.id, sim_job.holdings, first, sim_job.job_class.tenant)
        return
    standings = choice.standings.tolist()
    for sequence, first, standing in zip(jobs.sequence[choice.victims].tolist(), ahead, standings, strict=True):
        sim_job = sim_jobs[sequence]
        cost = stop_cost_seconds(sim_job, now)
        yield cycle.Victim(sim_job.job.id, sim_job.holdings, first, sim_job.job_class.tenant, standing, cost)
