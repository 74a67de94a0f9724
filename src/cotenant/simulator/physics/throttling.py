"""The effect of throttles on a run, and the noise of its measured rate.

Assumed [R]: a job without GPUs is as fast as the scarcest resource that it has left: its cores, or its bandwidth.
Limiting it to half of its cores halves its speed and its traffic; limiting it to a share of the node's bandwidth
matters only if it would use more. Its cores are its own, so limiting it to otherwise idle CPU time costs it nothing. A
suspended job does nothing and keeps what it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.policy.protocols import FREE, Directive, Throttle
from cotenant.simulator.physics.rounding import steady

NOISE_STREAM = 6  # a stream of its own
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ThrottleEffect:
    """The throttle of a run, and the share of its speed and its memory traffic that it leaves, 0 to 1."""

    throttle: Throttle
    part: float

    def cores_used(self, cores: int, tasks: int) -> float:
        """Return how many of its cores on a node it uses."""
        if self.throttle.suspended:
            return 0.0
        return float(min(cores, self.throttle.cores * tasks) if self.throttle.cores else cores)


UNTHROTTLED = ThrottleEffect(FREE, 1.0)


def effect_of(directive: Directive, cores: int, tasks: int, demand: float, peak: float) -> ThrottleEffect:
    """Return the effect of a directive on a run with these cores and tasks on a node; traffic and peak in bytes/s.

    Without a throttle its share counts directly.

    >>> effect_of(Directive("cpu", 1, 0.3, ""), 8, 1, 0.0, 100e9).part
    0.3
    >>> effect_of(Directive("cpu", 1, 0.5, "", Throttle(bandwidth_percent=20, cores=4)), 8, 1, 50e9, 100e9).part
    0.4
    """
    if directive.throttle is None:
        return ThrottleEffect(Throttle(suspended=directive.share <= 0), steady(directive.share))
    throttle = directive.throttle
    if throttle.suspended:
        return ThrottleEffect(throttle, 0.0)
    of_cores = throttle.cores * tasks / cores if throttle.cores and cores else 1.0
    limited = throttle.bandwidth_percent < 100 and demand > 0
    of_bandwidth = throttle.bandwidth_percent / 100 * peak / demand if limited else 1.0
    return ThrottleEffect(throttle, steady(min(1.0, of_cores, of_bandwidth)))


class Noise:
    """Noise of measured rates: a normal factor for each run and time, independent of the order of queries."""

    def __init__(self, seed: int, spread: float) -> None:
        self.spread = spread
        self._seeded = _mixed(seed ^ NOISE_STREAM << 56)
        self._of_run: dict[int, tuple[int, int]] = {}  # by sequence: the last queried run, and its state

    def factor(self, sequence: int, run: int, now: float) -> float:
        """Return the factor of a measured rate; at least 0."""
        if not self.spread:
            return 1.0
        known = self._of_run.get(sequence)
        if known is None or known[0] != run:
            known = self._of_run[sequence] = run, _mixed(_mixed(self._seeded ^ sequence) ^ run)
        state = _mixed(known[1] ^ round(now * 1000))
        first, second = (state >> 32) + 1, _mixed(state) >> 32
        normal = math.sqrt(-2 * math.log(first / 2**32)) * math.cos(2 * math.pi * second / 2**32)
        return max(0.0, steady(1 + self.spread * normal))


def _mixed(state: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64, Steele et al., OOPSLA 2014 [P])."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
