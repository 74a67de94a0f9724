"""Who holds what at one moment of a simulation, for policies that look at more than what is free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.cluster_view import Resident, Scene, Stay
from cotenant.simulator.job import Life


class Occupants:
    """Those that run: what each holds, and who is on a node; kept as they start and end."""

    def __init__(self) -> None:
        self.stays: dict[str, Stay] = {}
        self._lives: dict[str, Life] = {}
        self._on: dict[int, dict[int, Life]] = {}  # by node and sequence

    def __getitem__(self, job_id: str) -> Life:
        return self._lives[job_id]

    def enter(self, life: Life) -> None:
        """A job has started, or holds something else than before."""
        if life.job.id in self.stays:
            self.leave(life)
        stay = Stay(life.shape.gpu_milli, life.holdings, life.running_since, life.reclaimable)
        self.stays[life.job.id], self._lives[life.job.id] = stay, life
        for holding in stay.holdings:
            self._on.setdefault(holding.node, {})[life.sequence] = life

    def leave(self, life: Life) -> None:
        """A job runs no more."""
        del self._lives[life.job.id]
        for holding in self.stays.pop(life.job.id).holdings:
            self._on[holding.node].pop(life.sequence, None)

    def on(self, node: int) -> list[Life]:
        """Give those on a node, as they were submitted."""
        return [life for _, life in sorted(self._on.get(node, {}).items())]


class Moment(Scene):
    """The running jobs at a moment, made only when somebody looks. `row` says where a job is in the table `jobs`."""

    def __init__(
        self,
        lives: Mapping[int, Life],
        occupants: Occupants,
        jobs: Jobs,
        row: Callable[[str], int],
        stop_cost_seconds: Callable[[Life, float], float],
        now: float,
    ) -> None:
        self.now = now
        self._lives, self._occupants, self._jobs, self._row = lives, occupants, jobs, row
        self._stop_cost_seconds = stop_cost_seconds
        self._met: dict[int, Resident] = {}

    def residents(self) -> Mapping[str, Resident]:
        """Give all jobs that run, by id."""
        return self._residents

    def on(self, node: int) -> Sequence[Resident]:
        """Give those that run on a node."""
        return [self._met_as(life) for life in self._occupants.on(node)]

    def resident(self, job_id: str) -> Resident:
        """Give one that runs."""
        return self._met_as(self._occupants[job_id])

    def stays(self) -> Mapping[str, Stay]:
        """Say of all what they hold."""
        return self._occupants.stays

    @cached_property
    def _residents(self) -> dict[str, Resident]:
        return {life.job.id: self._met_as(life) for life in self._lives.values() if life.running}

    def _met_as(self, life: Life) -> Resident:
        if life.sequence not in self._met:
            self._met[life.sequence] = self._resident(life)
        return self._met[life.sequence]

    def _resident(self, life: Life) -> Resident:
        rest = float(self._jobs.remaining_seconds[self._row(life.job.id)])
        estimate = life.estimate if math.isnan(rest) else _as_of_now(life.estimate, rest)
        return Resident(
            life.gang(self.now, estimate),
            life.holdings,
            life.running_since,
            preemptible=life.job.preemptible,
            stop_cost_seconds=self._stop_cost_seconds(life, self.now),
            reclaimable=life.reclaimable,
        )


def _as_of_now(given: Estimate, rest: float) -> Estimate:
    """Tell what is left; the spread is that of what was told at first."""
    less = 0.0 if given.remaining_seconds is None else given.remaining_seconds - rest
    early, late = given.remaining_p10_seconds, given.remaining_p90_seconds
    return replace(
        given,
        predictable=True,
        remaining_seconds=rest,
        remaining_p10_seconds=None if early is None else min(rest, max(0.0, early - less)),
        remaining_p90_seconds=None if late is None else max(rest, late - less),
    )
