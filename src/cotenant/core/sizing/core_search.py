"""Hill climbing over core counts: which to try next, and where to stop.

Theory of operation. CODA (ICDCS 2020, section 1 of its reconstruction [R]) finds N*, the fewest cores that keep a job
at full speed, while the job runs: try a few cores more, go on while that gains, else try fewer while nothing is lost.
The search has no state of its own: what to try follows from what was measured, in whatever order and by whomever, so
that a restart loses nothing and a job goes on where those of its kind stopped. Steps double while they lead on, and the
last gap is halved [R]; with steps of one core alone, eight of them do not reach far.

Rates are noisy. A curve never falls, so points that do are pooled; and a gain counts only beyond the noise that the
number of windows leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cotenant.core.model.refusal import plural
from cotenant.core.prediction.core_curve import Point


@dataclass(frozen=True, slots=True)
class Climb:
    """How a search goes, all relative to the rate.

    `tolerance`: a gain below it is none, and a loss below it none either. `noise`: standard deviation of one window's
    rate. `step`: cores of the first step. `counts_max`: core counts that one job tries.
    """

    tolerance: float = 0.02
    noise: float = 0.02
    step: int = 1
    counts_max: int = 8


CLIMB = Climb()


@dataclass(frozen=True, slots=True)
class Trial:
    """The cores to hold next. `found`: they are the fewest of full speed, as far as there were cores to try."""

    cores: int
    found: bool
    reason: str


def rising(points: Sequence[Point]) -> list[Point]:
    """Pool neighbours that fall, weighted by their windows: a curve never does. Points come one for each count.

    >>> [round(point.rate, 1) for point in rising([Point(1, 5.0), Point(2, 9.0), Point(3, 8.0), Point(4, 9.5)])]
    [5.0, 8.5, 8.5, 9.5]
    """
    return list(_rising(tuple(points)))


@lru_cache(maxsize=1024)
def _rising(points: tuple[Point, ...]) -> tuple[Point, ...]:
    pools: list[tuple[float, int, list[Point]]] = []
    for point in sorted(points, key=lambda one: one.cores):
        rate, windows, members = point.rate, point.windows, [point]
        while pools and pools[-1][0] > rate:
            before_rate, before_windows, before = pools.pop()
            rate = (rate * windows + before_rate * before_windows) / (windows + before_windows)
            windows, members = windows + before_windows, before + members
        pools.append((rate, windows, members))
    return tuple([replace(member, rate=rate) for rate, _, members in pools for member in members])


def climb(
    points: Sequence[Point], start: int, highest: int, how: Climb = CLIMB, *, tried: int = 0, lowest: int = 1
) -> Trial:
    """Say which cores to try, given what was measured at which; `tried` counts are this job's own.

    >>> flat = [Point(3, 10.0, 9)]
    >>> climb(flat, 3, 6).cores, climb([*flat, Point(4, 10.0, 9)], 3, 6).cores
    (4, 1)
    >>> trial = climb([Point(1, 10.0, 9), Point(3, 10.0, 9), Point(4, 10.0, 9)], 3, 6)
    >>> trial.cores, trial.found
    (1, True)
    """
    known = rising(points)
    if not known:
        cores = min(max(start, lowest), highest)
        return Trial(cores, False, f"{plural(cores, 'core')} to begin with: nothing was measured yet")
    best, enough = known[-1], _enough(known, how)
    top = best.cores
    at = known.index(enough)
    if enough.cores > highest:
        return Trial(highest, True, f"{plural(highest, 'core')} of the {enough.cores} it could use: no more are free")
    if enough.cores == top < highest:
        stride = how.step if at == 0 else 2 * (top - known[at - 1].cores)
        cores = min(highest, top + max(stride, how.step))
        return Trial(cores, False, f"{plural(cores, 'core')} on trial: {top} gained over fewer")
    if tried < how.counts_max:
        if at == 0 and enough.cores > lowest:
            stride = 2 * (known[1].cores - enough.cores) if len(known) > 1 else how.step
            cores = max(lowest, enough.cores - max(stride, how.step))
            return Trial(cores, False, f"{plural(cores, 'core')} on trial: more than {enough.cores} gain nothing")
        if at > 0 and (gap := enough.cores - known[at - 1].cores) > how.step:
            cores = enough.cores - gap // 2
            return Trial(cores, False, f"{plural(cores, 'core')} on trial, between what is too few and what is enough")
    return Trial(enough.cores, True, f"{plural(enough.cores, 'core')}: more gain less than {how.tolerance:.0%}")


def _enough(known: Sequence[Point], how: Climb) -> Point:
    """Find the fewest cores whose rate is as good as the best."""
    best = known[-1]
    for point in known:
        unsure = how.noise * math.sqrt(1 / point.windows + 1 / best.windows)
        if point.rate >= best.rate * (1 - max(how.tolerance, unsure)):
            return point
    return best


def expected(points: Sequence[Point], cores: int) -> float:
    """Read the rate at a core count: linear between points and from 0; beyond the last as steep as before it.

    Whoever tries cores that were never measured hopes so. Nothing measured: one core is worth 1.

    >>> expected([Point(2, 10.0), Point(4, 16.0)], 3), expected([Point(2, 10.0), Point(4, 16.0)], 5)
    (13.0, 19.0)
    """
    known = [Point(0, 0.0), *rising(points)]
    if len(known) == 1:
        return float(cores)
    at = next((number for number, point in enumerate(known) if point.cores >= cores), len(known) - 1)
    at = max(at, 1)
    low, high = known[at - 1], known[at]
    return high.rate + (cores - high.cores) * (high.rate - low.rate) / (high.cores - low.cores)
