"""Who holds what at one moment of a simulation, for policies that look at more than what is free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from cotenant.core.estimates import Estimate
from cotenant.core.scenes import Resident
from cotenant.core.table import Jobs
from cotenant.simulator.lives import Life


class Moment:
    """The running jobs at a moment, made only when somebody looks. `row` says where a job is in the table `jobs`."""

    def __init__(
        self,
        lives: Mapping[int, Life],
        jobs: Jobs,
        row: Callable[[str], int],
        stop_cost_seconds: Callable[[Life, float], float],
        now: float,
    ) -> None:
        self.now = now
        self._lives, self._jobs, self._row = lives, jobs, row
        self._stop_cost_seconds = stop_cost_seconds
        self._met: dict[int, Resident] = {}

    def residents(self) -> Mapping[str, Resident]:
        """Give all jobs that run, by id."""
        return self._residents

    def on(self, node: int) -> Sequence[Resident]:
        """Give those that run on a node."""
        return [self._at(sequence) for sequence in self._by_node.get(node, ())]

    @cached_property
    def _residents(self) -> dict[str, Resident]:
        return {life.job.id: self._at(life.sequence) for life in self._lives.values() if life.running}

    @cached_property
    def _by_node(self) -> dict[int, list[int]]:
        """The sequences of those who run, by node."""
        by_node: dict[int, list[int]] = {}
        for life in self._lives.values():
            for node in {holding.node for holding in life.holdings}:
                by_node.setdefault(node, []).append(life.sequence)
        return by_node

    def _at(self, sequence: int) -> Resident:
        if sequence not in self._met:
            self._met[sequence] = self._resident(self._lives[sequence])
        return self._met[sequence]

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
