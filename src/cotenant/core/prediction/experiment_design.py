"""Which core counts to measure next, so that few points tell most about a job's curve.

Optimal experiment design chooses measurements that leave the least uncertainty; A-optimal is the design with the least
trace of the covariance of the unknowns (Pukelsheim 1993; Ernest, Venkataraman et al., NSDI 2016, chooses runs that way
[R]). Below θ the curve is linear in [log C, C], for which the trace is known before any measurement; but which counts
are below θ is itself unknown. So the trace is averaged over the distribution of θ that the points so far leave, and the
variance of log θ that would remain is added: for each θ that may be true, the rate that would be measured is compared
with what every other θ predicts. Everything is relative to the plateau, so that units do not matter.

The largest core count always comes first, because it bounds the gain of all others. Enough is known once the interval
of θ spans at most one step of the ladder, which takes at least two points; after five points planning ends in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.refusal import plural
from cotenant.core.prediction.core_curve import DEFAULTS, Beliefs, Curve, Point, fit, ladder
from cotenant.core.prediction.curve_priors import Floats, shapes_of

POINTS_MIN, POINTS_MAX = 2, 5
WEIGHT_MIN = 1e-3  # a less likely θ is ignored
RATE_MIN = 0.05  # of the plateau: errors of smaller rates count as at this share


@dataclass(frozen=True, slots=True)
class Plan:
    """Core counts to measure, the most informative first, and why these, or why none, in one sentence."""

    cores: tuple[int, ...]
    reason: str


def plan(points: Sequence[Point], cores_max: int, choices: Iterable[int] = (), beliefs: Beliefs = DEFAULTS) -> Plan:
    """Return which of `choices` to measure, by default of the ladder up to `cores_max`.

    Each count after the first is the best if the earlier ones turn out as expected; callers should preferably plan
    again after each measurement. Points above `cores_max` are ignored.

    >>> plan([], 32).cores[:3]
    (32, 1, 2)
    >>> print(plan([Point(32, 60.0), Point(1, 59.0)], 32).reason)
    more than 1 core does not help, as 2 measured core counts show
    """
    options = sorted({*(choices or ladder(cores_max)), cores_max})
    known = [point for point in points if point.cores <= cores_max]
    planned: list[int] = []
    while True:
        cores, reason = _next([*known, *_expected(known, planned, cores_max, beliefs)], options, beliefs)
        if cores is None:
            break
        planned.append(cores)
    return Plan(tuple(planned), reason if not planned else _why(known, planned, cores_max, beliefs))


def uncertainty_after(curve: Curve, choices: Sequence[int]) -> Floats:
    """Return the expected trace of the covariance of (P₀·log θ / P₂, P₁·θ / P₂, log θ) after one window per choice."""
    kept = curve.weights > WEIGHT_MIN
    thetas, weights = curve.thetas[kept], curve.weights[kept] / curve.weights[kept].sum()
    plateaus = curve.shares[kept].sum(axis=1)
    error = math.hypot(curve.beliefs.noise, curve.beliefs.form)
    rates, features = _predicted(curve, choices, kept)
    measured, known = _predicted(curve, [point.cores for point in curve.points], kept)
    rows = known / (error * np.maximum(measured, RATE_MIN))[:, :, None]
    information = np.einsum("tmi,tmj->tij", rows, rows) + np.eye(2)
    spread = np.einsum("tmi,tij,tmj->tm", features, np.linalg.inv(information), features)
    errors = error * np.maximum(rates, RATE_MIN)
    rows = features / errors[:, :, None]
    after = information[:, None] + rows[:, :, :, None] * rows[:, :, None, :]
    traces = np.where((thetas > 1)[:, None], np.trace(np.linalg.inv(after), axis1=2, axis2=3), 0.0)
    left = _theta_variance(np.log(thetas), weights, rates * plateaus[:, None], errors**2 + spread)
    return np.asarray(weights @ traces + left)


def _theta_variance(log_theta: Floats, weights: Floats, seen: Floats, variances: Floats) -> Floats:
    """Return the expected variance of log θ after each choice, given the rate that each θ predicts and its variance."""
    off = seen[None, :, :] - seen[:, None, :]  # by the true θ, the θ that is judged, and the choice
    odds = -0.5 * (off**2 / variances[None] + np.log(variances[None]))
    likely = weights[None, :, None] * np.exp(odds - odds.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    mean = np.einsum("sjc,j->sc", likely, log_theta)
    squares = np.einsum("sjc,j->sc", likely, log_theta**2)
    return np.asarray(weights @ (squares - mean**2))


def _predicted(curve: Curve, cores: Sequence[int], kept: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return rates relative to the plateau, and the rows of the design [log C / log θ, C / θ], 0 from θ on."""
    thetas, shares = curve.thetas[kept], curve.shares[kept]
    counts = np.array(cores)
    rates = np.einsum("tmi,ti->tm", shapes_of(counts, thetas), shares / shares.sum(axis=1, keepdims=True))
    below = counts[None, :] < thetas[:, None]
    logs = np.log(counts)[None, :] / np.log(np.maximum(thetas, 2))[:, None]
    return rates, np.stack([np.where(below, logs, 0.0), np.where(below, counts / thetas[:, None], 0.0)], -1)


def _next(points: Sequence[Point], options: Sequence[int], beliefs: Beliefs) -> tuple[int | None, str]:
    """Return the count to measure next, or why none."""
    measured = {point.cores for point in points}
    left = [cores for cores in options if cores not in measured]
    counts = plural(len(measured), "measured core count")
    if options[-1] not in measured:
        return options[-1], ""
    if not left:
        return None, "every distinguishable core count has been measured"
    curve = fit(points, options[-1], beliefs)
    low, high = curve.interval
    steps = int(np.searchsorted(options, high) - np.searchsorted(options, low))
    if len(measured) >= POINTS_MIN and steps <= 1:
        if high == 1:
            return None, f"more than 1 core does not help, as {counts} show"
        return None, f"θ is known within a step of the ladder: {_span(low, high)}, from {counts}"
    if len(measured) >= POINTS_MAX:
        return None, f"{counts} are as many as profiling may cost; θ is {_span(low, high)}"
    return left[int(np.argmin(np.round(uncertainty_after(curve, left), 9)))], ""


def _expected(known: Sequence[Point], planned: Sequence[int], cores_max: int, beliefs: Beliefs) -> list[Point]:
    """Return what the planned measurements would give on average; without points, any rate is as good as another."""
    if not planned:
        return []
    curve = fit(known or [Point(cores_max, 1.0)], cores_max, beliefs)
    shapes = shapes_of(np.array(planned), curve.thetas)
    rates = np.einsum("t,tmi,ti->m", curve.weights, shapes, curve.shares)
    return [Point(cores, max(float(rate), RATE_MIN) * curve.scale) for cores, rate in zip(planned, rates, strict=True)]


def _why(known: Sequence[Point], planned: Sequence[int], cores_max: int, beliefs: Beliefs) -> str:
    counts = plural(len({point.cores for point in known}), "core count")
    if planned[0] == cores_max:
        return f"the rate is known at {counts}; that on {plural(cores_max, 'core')} bounds what others can gain"
    low, high = fit(known, cores_max, beliefs).interval
    return f"the rate is known at {counts}, which leaves θ {_span(low, high)}; these are the most informative"


def _span(low: int, high: int) -> str:
    """Format an interval of core counts.

    >>> _span(3, 3), _span(4, 6)
    ('3', 'from 4 to 6')
    """
    return str(low) if low == high else f"from {low} to {high}"
