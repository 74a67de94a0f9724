"""Core search: hill climbing over core counts, which to try next and where to stop.

Theory of operation. CODA (ICDCS 2020, section 1 of its reconstruction [R]) finds N*, the fewest cores that keep a job
at full speed, while the job runs: it tries a few more cores, continues while that helps, else tries fewer while nothing
is lost. The search is stateless: the next trial follows from the measurements, in any order and from any job of the
class, so that a restart loses nothing and a job continues where others of its class stopped. Steps double while they
help, and the last gap is halved [R]; single-core steps, limited to eight, would not reach far.

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
class SearchOptions:
    """Options of the search, relative to the rate.

    `tolerance`: smaller gains and losses count as none. `noise`: standard deviation of one window's rate. `step`: cores
    of the first step. `counts_max`: core counts that one job tries.
    """

    tolerance: float = 0.02
    noise: float = 0.02
    step: int = 1
    counts_max: int = 8


DEFAULT_SEARCH = SearchOptions()


@dataclass(frozen=True, slots=True)
class Trial:
    """The cores to hold next. `found`: they are the fewest at full speed, among the cores that were available."""

    cores: int
    found: bool
    reason: str


def rising(points: Sequence[Point]) -> list[Point]:
    """Return points with falling neighbors pooled, weighted by their windows: a curve never falls. One point per count.

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


def next_trial(
    points: Sequence[Point],
    start: int,
    highest: int,
    how: SearchOptions = DEFAULT_SEARCH,
    *,
    tried: int = 0,
    lowest: int = 1,
) -> Trial:
    """Return which cores to try, given the measurements; `tried` is the number of counts this job has tried.

    >>> flat = [Point(3, 10.0, 9)]
    >>> next_trial(flat, 3, 6).cores, next_trial([*flat, Point(4, 10.0, 9)], 3, 6).cores
    (4, 1)
    >>> trial = next_trial([Point(1, 10.0, 9), Point(3, 10.0, 9), Point(4, 10.0, 9)], 3, 6)
    >>> trial.cores, trial.found
    (1, True)
    """
    known = rising(points)
    if not known:
        cores = min(max(start, lowest), highest)
        return Trial(cores, False, f"{plural(cores, 'core')} to start with: nothing has been measured yet")
    best, enough = known[-1], _enough(known, how)
    top = best.cores
    at = known.index(enough)
    if enough.cores > highest:
        return Trial(highest, True, f"{plural(highest, 'core')} of the {enough.cores} it could use: no more are free")
    if enough.cores == top < highest:
        stride = how.step if at == 0 else 2 * (top - known[at - 1].cores)
        cores = min(highest, top + max(stride, how.step))
        return Trial(cores, False, f"{plural(cores, 'core')} on trial: {top} improved on fewer")
    if tried < how.counts_max:
        if at == 0 and enough.cores > lowest:
            stride = 2 * (known[1].cores - enough.cores) if len(known) > 1 else how.step
            cores = max(lowest, enough.cores - max(stride, how.step))
            return Trial(cores, False, f"{plural(cores, 'core')} on trial: more than {enough.cores} gain nothing")
        if at > 0 and (gap := enough.cores - known[at - 1].cores) > how.step:
            cores = enough.cores - gap // 2
            return Trial(cores, False, f"{plural(cores, 'core')} on trial, between too few and enough")
    return Trial(enough.cores, True, f"{plural(enough.cores, 'core')}: more cores gain less than {how.tolerance:.0%}")


def _enough(known: Sequence[Point], how: SearchOptions) -> Point:
    """Return the point with the fewest cores whose rate is as good as the best."""
    best = known[-1]
    for point in known:
        unsure = how.noise * math.sqrt(1 / point.windows + 1 / best.windows)
        if point.rate >= best.rate * (1 - max(how.tolerance, unsure)):
            return point
    return best


def expected(points: Sequence[Point], cores: int) -> float:
    """Return the rate at a core count: linear between points and from 0; beyond the last as steep as before it.

    This is optimistic for cores that were never measured. Without measurements, one core is worth 1.

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
