"""Failures and repairs of nodes, each with its own clock, whatever runs there [R: exponential times].

A node's times are drawn from the seed and the node's number alone, so that all arms see the same outages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from cotenant.simulator.physics.rounding import steady

_STREAM = 3  # separate from the arms' errors and the jobs' outcomes
_SECONDS_MIN = 1e-3


class Outages:
    """When each node fails and is repaired. Without a mean time between failures, no node fails."""

    def __init__(self, nodes: int, seed: int, mtbf_hours: float | None = None, repair_hours: float = 1.0) -> None:
        self._means = (0.0, 0.0) if mtbf_hours is None else (mtbf_hours * 3600, repair_hours * 3600)
        self._rngs = [np.random.default_rng([seed, _STREAM, node]) for node in range(nodes if mtbf_hours else 0)]
        self._due: list[tuple[float, int, bool]] = [
            (self._draw(node, self._means[0]), node, False) for node in range(len(self._rngs))
        ]
        heapq.heapify(self._due)

    def next_seconds(self, *, idle: bool = False) -> float:
        """Return when a node next fails or is repaired; inf if never.

        `idle`: no job runs or is still to come, so that only a repair could change anything.
        """
        if idle:
            return min((at for at, _, back in self._due if back), default=math.inf)
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float, *, idle: bool = False) -> Iterator[tuple[int, bool]]:
        """Yield the nodes that have failed (False) or were repaired (True) by now, in order of time.

        A node that would fail while the cluster is idle never fails again: otherwise the simulation would wait forever
        for a job that finds no place.
        """
        while self._due and self._due[0][0] <= now:
            at, node, back = heapq.heappop(self._due)
            if idle and not back:
                continue
            heapq.heappush(self._due, (at + self._draw(node, self._means[0 if back else 1]), node, not back))
            yield node, back

    def _draw(self, node: int, mean_seconds: float) -> float:
        drawn = self._rngs[node].random()
        return max(_SECONDS_MIN, steady(-mean_seconds * math.log1p(-drawn)))
