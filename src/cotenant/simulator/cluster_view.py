"""The cluster view of a simulation: which jobs hold which resources, for policies that look beyond free resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.cluster_view import ClusterView, Occupancy, RunningJob
from cotenant.simulator.job import SimulatedJob


class RunningJobs:
    """The running jobs, what each holds, and the jobs on each node; updated as they start and end."""

    def __init__(self) -> None:
        self.occupancies: dict[str, Occupancy] = {}
        self._sim_jobs: dict[str, SimulatedJob] = {}
        self._on: dict[int, dict[int, SimulatedJob]] = {}  # by node and sequence

    def __getitem__(self, job_id: str) -> SimulatedJob:
        return self._sim_jobs[job_id]

    def enter(self, sim_job: SimulatedJob) -> None:
        """Add a job that has started, or whose holdings have changed."""
        if sim_job.job.id in self.occupancies:
            self.leave(sim_job)
        stay = Occupancy(sim_job.job_class.gpu_milli, sim_job.holdings, sim_job.running_since, sim_job.reclaimable)
        self.occupancies[sim_job.job.id], self._sim_jobs[sim_job.job.id] = stay, sim_job
        for holding in stay.holdings:
            self._on.setdefault(holding.node, {})[sim_job.sequence] = sim_job

    def leave(self, sim_job: SimulatedJob) -> None:
        """Remove a job that no longer runs."""
        del self._sim_jobs[sim_job.job.id]
        for holding in self.occupancies.pop(sim_job.job.id).holdings:
            self._on[holding.node].pop(sim_job.sequence, None)

    def jobs_on(self, node: int) -> list[SimulatedJob]:
        """Return the jobs on a node, in order of submission."""
        return [sim_job for _, sim_job in sorted(self._on.get(node, {}).items())]


class SimulatedClusterView(ClusterView):
    """The running jobs at one moment, built on demand; `jobs` has their rows."""

    def __init__(
        self,
        sim_jobs: Mapping[int, SimulatedJob],
        occupancy: RunningJobs,
        jobs: Jobs,
        stop_cost_seconds: Callable[[SimulatedJob, float], float],
        now: float,
    ) -> None:
        self.now = now
        self._sim_jobs, self._occupancy = sim_jobs, occupancy
        # A policy may ask between cycles, when the table has changed, and with it the views that `jobs` has.
        self._sequence, self._rest, running = jobs.sequence.copy(), jobs.remaining_seconds, jobs.running
        self._remaining_seconds = dict(zip(self._sequence[running].tolist(), self._rest[running].tolist(), strict=True))
        self._stop_cost_seconds = stop_cost_seconds
        self._cache: dict[int, RunningJob] = {}

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return all running jobs, by id."""
        return self._residents

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return the jobs on a node."""
        return [self._cached(sim_job) for sim_job in self._occupancy.jobs_on(node)]

    def running_job(self, job_id: str) -> RunningJob:
        """Return a running job."""
        return self._cached(self._occupancy[job_id])

    def occupancies(self) -> Mapping[str, Occupancy]:
        """Return what all running jobs hold."""
        return self._occupancy.occupancies

    @cached_property
    def _residents(self) -> dict[str, RunningJob]:
        return {sim_job.job.id: self._cached(sim_job) for sim_job in self._sim_jobs.values() if sim_job.running}

    def _cached(self, sim_job: SimulatedJob) -> RunningJob:
        if sim_job.sequence not in self._cache:
            self._cache[sim_job.sequence] = self._resident(sim_job)
        return self._cache[sim_job.sequence]

    def _resident(self, sim_job: SimulatedJob) -> RunningJob:
        rest = self._remaining_seconds.get(sim_job.sequence)
        if rest is None:  # it has started since
            found = np.flatnonzero(self._sequence == sim_job.sequence)
            rest = float(self._rest[found[0]]) if len(found) else math.nan
        estimate = sim_job.estimate if math.isnan(rest) else _remaining_estimate(sim_job.estimate, rest)
        return RunningJob(
            sim_job.gang(self.now, estimate),
            sim_job.holdings,
            sim_job.running_since,
            preemptible=sim_job.job.preemptible,
            stop_cost_seconds=self._stop_cost_seconds(sim_job, self.now),
            reclaimable=sim_job.reclaimable,
        )


def _remaining_estimate(given: Estimate, rest: float) -> Estimate:
    """Return an estimate of the remaining time; the spread is that of the initial estimate."""
    less = 0.0 if given.remaining_seconds is None else given.remaining_seconds - rest
    early, late = given.remaining_p10_seconds, given.remaining_p90_seconds
    return replace(
        given,
        predictable=True,
        remaining_seconds=rest,
        remaining_p10_seconds=None if early is None else min(rest, max(0.0, early - less)),
        remaining_p90_seconds=None if late is None else max(rest, late - less),
    )
