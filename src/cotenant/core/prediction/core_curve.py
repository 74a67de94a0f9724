"""How a job's rate grows with its CPU cores, learned from a few noisy points, with the uncertainty.

The form is that of Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018) [P]: S(C) = P₀·log C +
P₁·C below θ cores, and P₂ from θ on. Two to five points hardly determine four figures, so priors say what is plausible
[R]: the curve never falls, is about linear below θ (P₀ near 0), and reaches its plateau with hardly a jump. Then a rate
curve that is monotone and meets its plateau is a sum of three shapes, none of which may have a negative share:

    log C / log θ,    (C − log C) / (θ − log θ),    0;    each of them 1 from θ on,

so that P₂ is the sum of the shares. For each θ the best shares are least squares with few unknowns, solved for all θ at
once by trying every set of shapes; errors are relative to the rate, because rates are measured that way. How well each
θ explains the points, Occam's factor included, gives a distribution over θ, and from it the estimate and its interval.
Real curves bend more softly than the form, so the useful cores may be somewhat more than the bend.

No result depends on the order of the points or on the unit of the rate; figures are rounded to nine digits, so that
machines with different arithmetic agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cotenant.core.prediction.curve_priors import SHAPES, TINY, Floats, hypotheses, shapes_of

SUBSETS = tuple(list(subset) for size in range(1, SHAPES + 1) for subset in combinations(range(SHAPES), size))
WITHIN = 0.15  # confidence is the chance that a rate is at most this far off; beyond it, it would be measured again [R]
TAIL = 0.05  # of the distribution of θ, cut off at each end of its interval
SPREADS_MAX = 256  # cached per curve
CURVES_MAX = 512  # cached by their points


@dataclass(frozen=True, slots=True)
class Point:
    """The mean rate at a number of cores, the number of windows, and their relative spread (standard deviation)."""

    cores: int
    rate: float
    windows: int = 1
    spread: float = 0.0


class Windows:
    """The latest rates measured at each number of cores; both are bounded, and the oldest are dropped.

    >>> windows = Windows(rates_max=2, counts_max=2)
    >>> for cores, rate in ((1, 9.0), (2, 5.0), (2, 7.0), (2, 5.0), (4, 8.0)):
    ...     windows.add(cores, rate)
    >>> [(point.cores, point.rate, point.windows) for point in windows.points()]
    [(2, 6.0, 2), (4, 8.0, 1)]
    """

    __slots__ = ("_rates", "counts_max", "rates_max")

    def __init__(
        self, rates: Mapping[int, Sequence[float]] = MappingProxyType({}), *, rates_max: int = 16, counts_max: int = 32
    ) -> None:
        self.rates_max, self.counts_max = rates_max, counts_max
        self._rates: dict[int, list[float]] = {}
        for cores, seen in rates.items():
            for rate in seen:
                self.add(cores, rate)

    def add(self, cores: int, rate: float) -> None:
        """Add the rate of a window.

        Raises:
            ValueError: the rate or the cores are invalid; nothing is kept.
        """
        if cores < 1 or not 0 < rate < math.inf:
            raise ValueError(f"a rate must be positive and finite, on 1 core or more, not {rate:g} on {cores}")
        seen = self._rates.pop(cores, [])  # the latest count comes last
        self._rates[cores] = [*seen, rate][-self.rates_max :]
        if len(self._rates) > self.counts_max:
            del self._rates[next(iter(self._rates))]

    def __len__(self) -> int:
        return sum(len(seen) for seen in self._rates.values())

    @property
    def rates(self) -> Mapping[int, Sequence[float]]:
        """The rates by cores, the oldest of each first; the latest count comes last."""
        return MappingProxyType(self._rates)

    def points(self) -> list[Point]:
        """Return their means, by cores."""
        return [_mean(cores, [Point(cores, rate) for rate in self._rates[cores]]) for cores in sorted(self._rates)]


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Priors, before anything was measured; all relative to the rate or the plateau [R].

    noise: the standard deviation of one window's rate.
    form: how far a real curve departs from the form.
    bend: the standard deviation of θ·P₀/P₂, which is 0 for a linear rise.
    jump: the standard deviation of the jump at θ.
    knee: the useful cores may exceed the bend by this factor, because real curves bend softly.
    flat: the chance that more cores do not help at all.
    """

    noise: float = 0.02
    form: float = 0.045
    bend: float = 1.5
    jump: float = 0.15
    knee: float = 1.25
    flat: float = 0.1


DEFAULTS = Beliefs()


def ladder(cores_max: int) -> list[int]:
    """Return core counts worth distinguishing: each, then in steps of at most a quarter.

    >>> ladder(24)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 24]
    """
    rungs, cores = [], 1
    while cores < cores_max:
        rungs.append(cores)
        cores += max(1, cores // 4)
    return [*rungs, cores_max]


@dataclass(frozen=True)
class Curve:
    """A distribution over curves: for each θ its weight, the shares of the shapes and their covariance.

    `rate` and the parameters are those of the likeliest curve; `cores_useful` is the median of the useful cores.
    """

    points: tuple[Point, ...]
    beliefs: Beliefs
    scale: float  # the best measured rate; shares are relative to it
    thetas: NDArray[np.int64]
    weights: Floats
    shares: Floats  # by θ and shape
    covariances: Floats  # by θ, shape and shape
    _spreads: dict[int, float] = field(default_factory=dict)  # a cache: each is requested again and again

    @cached_property
    def theta(self) -> int:
        """The bend of the likeliest curve."""
        return int(self.thetas[self._best])

    @cached_property
    def parameters(self) -> tuple[float, float, float]:
        """P₀, P₁ and P₂ of the likeliest curve, in steps per second."""
        log, rest, jump = (float(share) * self.scale for share in self.shares[self._best])
        theta = self.theta
        if theta == 1:
            return 0.0, _rounded(rest), _rounded(log + rest + jump)
        linear = rest / (theta - math.log(theta))
        return _rounded(log / math.log(theta) - linear), _rounded(linear), _rounded(log + rest + jump)

    def rate(self, cores: int) -> float:
        """Return the expected rate, in steps per second; never above the plateau, and never falling."""
        return self.parameters[2] if cores >= self.theta else self._below[cores - 1]

    @cached_property
    def _below(self) -> list[float]:
        """The rates on 1, 2, … cores below θ: the form, corrected towards nearby measurements.

        A real curve departs from the form, similarly at neighboring counts. So a measured departure, less the part that
        is probably noise, counts there, and fades with log C to the next point, or to θ [R].
        """
        log_term, linear_term, plateau = self.parameters
        cores = np.arange(1, self.theta)
        form = np.maximum(log_term * np.log(cores) + linear_term * cores, TINY * plateau)
        known = [point for point in self.points if point.cores < self.theta]
        real = self.beliefs.form**2 / errors_of(known, self.beliefs) ** 2
        departures = [point.rate / form[point.cores - 1] - 1 for point in known]
        places = np.log([*(point.cores for point in known), self.theta])
        drawn = form * (1 + np.interp(np.log(cores), places, [*np.multiply(real, departures), 0.0]))
        return [_rounded(rate) for rate in np.minimum(np.maximum.accumulate(drawn), plateau).tolist()]

    def spread(self, cores: int) -> float:
        """Return the relative standard deviation of the rate; infinity if the rate is 0."""
        if cores not in self._spreads:
            if len(self._spreads) == SPREADS_MAX:
                self._spreads.clear()
            self._spreads[cores] = self._spread(cores)
        return self._spreads[cores]

    def _spread(self, cores: int) -> float:
        rate = self.rate(cores) / self.scale
        if rate <= 0:
            return math.inf
        shapes = shapes_of(np.array([cores]), self.thetas)[:, 0]
        off = np.einsum("ti,ti->t", shapes, self.shares) - rate
        own = np.einsum("ti,tij,tj->t", shapes, self.covariances, shapes)
        share = max(0.0, float(self.weights @ (off**2 + own)))  # rounding may bring it below 0
        return _rounded(math.sqrt(share / rate**2 + self.beliefs.form**2))

    def confidence(self, cores: int) -> float:
        """Return the chance that the rate is within 15 % of the expected one."""
        return confidence_of(self.spread(cores))

    @cached_property
    def cores_useful(self) -> int:
        """The cores beyond which more do not help, as likely too many as too few."""
        return self._quantile(0.5)

    @cached_property
    def interval(self) -> tuple[int, int]:
        """The interval that contains θ with a chance of 90 %."""
        return self._quantile(TAIL), self._quantile(1 - TAIL)

    @cached_property
    def theta_confidence(self) -> float:
        """The chance that the useful cores are at most one step of the ladder from `cores_useful`."""
        rungs = ladder(int(self.thetas[-1]))
        at = int(np.searchsorted(rungs, self.cores_useful))
        low, high = rungs[max(at - 1, 0)], rungs[min(at + 1, len(rungs) - 1)]
        near = (self.thetas >= low) & (self.thetas <= high)
        return min(1.0, _rounded(float(self.useful_weights[near].sum())))

    @cached_property
    def levels_off(self) -> bool:
        """Whether the rate was measured to level off: False if it may still rise at the most cores measured."""
        return self.interval[1] < self.points[-1].cores

    @cached_property
    def useful_weights(self) -> Floats:
        """The probability of each θ, including the softness of the knee, which ends where the plateau was measured."""
        spread_out = np.zeros(len(self.thetas))
        measured = np.array([point.cores for point in self.points])
        for at, theta in enumerate(self.thetas):
            above = measured[measured >= theta]
            highest = min(theta * self.beliefs.knee, above[0] if len(above) else math.inf) if theta > 1 else 1
            reached = slice(at, max(at + 1, int(np.searchsorted(self.thetas, highest, side="right"))))
            spread_out[reached] += self.weights[at] / len(spread_out[reached])
        return spread_out

    @cached_property
    def _best(self) -> int:
        return int(np.argmax(np.round(self.weights, 9)))

    def _quantile(self, share: float) -> int:
        below = np.round(np.cumsum(self.useful_weights), 9)
        return int(self.thetas[min(int(np.searchsorted(below, share)), len(below) - 1)])


def fit(points: Iterable[Point], cores_max: int = 0, beliefs: Beliefs = DEFAULTS) -> Curve:
    """Return a curve fitted to points; θ is searched up to `cores_max`, or the most cores measured.

    >>> curve = fit([Point(1, 10.0), Point(2, 20.0), Point(4, 39.0), Point(16, 60.0)])
    >>> curve.cores_useful, curve.interval, round(curve.rate(3)), round(curve.rate(12))
    (6, (5, 7), 30, 60)

    Raises:
        ValueError: no point, or a point with invalid figures.
    """
    known = merged(points)
    return _learnt(known, max(cores_max, known[-1].cores), beliefs)


@lru_cache(maxsize=CURVES_MAX)
def _learnt(merged: tuple[Point, ...], cores_max: int, beliefs: Beliefs) -> Curve:
    """Fit once for the same points: planning measurements requests the same curve again and again."""
    curve, strain = _fitted(merged, cores_max, beliefs)
    if strain > 1:  # the form does not suit these points: everything becomes less certain by this factor
        wider = replace(beliefs, noise=beliefs.noise * strain, form=beliefs.form * strain)
        curve, _ = _fitted(merged, cores_max, wider)
    return curve


def _fitted(merged: tuple[Point, ...], cores_max: int, beliefs: Beliefs) -> tuple[Curve, float]:
    """Fit once; also return the distance of the points from the nearest curve, in expected errors."""
    scale = max(point.rate for point in merged)
    counts = tuple([point.cores for point in merged])
    before = hypotheses(counts, cores_max, beliefs.bend, beliefs.jump, beliefs.flat)
    rates = np.array([point.rate / scale for point in merged])
    weights = 1 / (rates * errors_of(merged, beliefs))
    rows = before.shapes * weights[None, :, None]
    normal = np.einsum("tmi,tmj->tij", rows, rows) + before.normal
    volume = np.linalg.slogdet(normal)[1]
    if not np.isfinite(volume).all():  # rates many powers of ten apart determine only one shape, beyond float precision
        normal = normal * (1 + TINY * np.eye(normal.shape[-1]))
        volume = np.linalg.slogdet(normal)[1]
    against = np.einsum("tmi,m->ti", rows, rates * weights)
    shares, gained = _non_negative(normal, against)
    misfit = float(np.sum((rates * weights) ** 2)) - gained
    odds = -0.5 * misfit - 0.5 * volume + before.volume + before.log_prior
    likely = np.exp(odds - odds.max())
    curve = Curve(merged, beliefs, scale, before.thetas, likely / likely.sum(), shares, np.linalg.inv(normal))
    return curve, round(math.sqrt(max(0.0, float(misfit.min())) / len(merged)), 6)


def errors_of(points: Sequence[Point], beliefs: Beliefs) -> Floats:
    """Return the relative standard error of each mean rate."""
    noise = np.array([max(beliefs.noise, point.spread) / math.sqrt(point.windows) for point in points])
    return np.asarray(np.hypot(noise, beliefs.form))


def confidence_of(spread: float) -> float:
    """Return the chance that a figure is within 15 % of the truth, given its relative standard deviation.

    >>> confidence_of(0.05), confidence_of(0.15), confidence_of(math.inf)
    (0.997, 0.683, 0.0)
    """
    return round(math.erf(WITHIN / (spread * math.sqrt(2))), 3) if spread > 0 else 1.0


def merged(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return one point for each number of cores, in order.

    Raises:
        ValueError: no point, or a point with invalid figures.
    """
    by_cores: dict[int, list[Point]] = {}
    for point in points:
        if point.cores < 1 or point.windows < 1 or not (0 < point.rate < math.inf and 0 <= point.spread < math.inf):
            raise ValueError(f"a point needs cores, windows and a finite rate above 0: {point}")
        by_cores.setdefault(point.cores, []).append(point)
    if not by_cores:
        raise ValueError("a curve needs at least one point")
    return tuple(_mean(cores, by_cores[cores]) for cores in sorted(by_cores))


def _mean(cores: int, points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    windows = sum(point.windows for point in points)
    rate = math.fsum(point.rate * point.windows for point in points) / windows
    within = math.fsum(point.windows * (point.rate * point.spread) ** 2 for point in points)
    between = math.fsum(point.windows * (point.rate - rate) ** 2 for point in points)
    return Point(cores, rate, windows, math.sqrt((within + between) / windows) / rate)


def _non_negative(normal: Floats, against: Floats) -> tuple[Floats, Floats]:
    """Return least-squares solutions without negative shares, for each θ, and how much each lowers the misfit.

    With three unknowns, trying every set of those that are not 0 is exact, and faster than searching.
    """
    shares, gained = np.zeros_like(against), np.full(len(against), -np.inf)
    for subset in SUBSETS:
        part = normal[:, subset][:, :, subset]
        part = part * (1 + TINY * np.eye(len(subset)))
        solved = np.linalg.solve(part, against[:, subset][:, :, None])[:, :, 0]
        gain = np.einsum("ti,ti->t", solved, against[:, subset])
        better = (solved >= 0).all(axis=1) & (gain > gained)
        gained[better] = gain[better]
        shares[better] = 0
        for at, shape in enumerate(subset):
            shares[better, shape] = solved[better, at]
    return shares, gained


def _rounded(figure: float) -> float:
    """Return the figure with nine digits.

    >>> _rounded(1 / 3)
    0.333333333
    """
    return float(f"{figure:.9g}")
