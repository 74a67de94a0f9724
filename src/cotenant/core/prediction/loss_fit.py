"""When a loss will be reached: ℓ(k) = 1/(β₀k + β₁) + β₂, fitted to the steps and losses that a job reports.

The form is that of Optimus (Peng et al., EuroSys 2018), also used by AITurbo (Zhao et al., HPDC 2021 [P]): gradient
descent approaches its best loss β₂ as 1/k. We write it A/(1 + k/c) + β₂, for which A and β₂ follow from c by linear
least squares, so that only one unknown is searched. Everything else here is ours [R].

- *Outliers.* Least squares are reweighted repeatedly by Tukey's biweight, so that a spike counts for nothing.
- *Breaks.* Where the loss jumps, as after a cut of the learning rate, another curve begins; only what follows the last
  break is fitted. A loss that falls in many jumps follows no curve.
- *Confidence.* The step at which a goal is reached is computed from the fit, from fits to the first parts of the points
  (is the forecast still moving?), and from rival forms that fit as well (exponential, slower power): the distance
  between these, and what the residuals leave open, is the relative error of the forecast, and that the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cotenant.core.model.loss_goal import LossGoal

Floats = npt.NDArray[np.float64]

POINTS_MIN = 12  # fewer do not determine a curve with three unknowns
CONFIDENT_ERROR = 0.075  # a relative error for which the confidence is a half
BEND_MIN = 0.5  # of its scale must be visible: before it bends it could be any curve
SHARE_SURE = 0.2  # of the way must be visible for full confidence in the forecast

GRID, ZOOM_GRID, ZOOMS = 32, 12, 3  # scales tried, and tried again between the neighbours of the best
SCALE_MIN, SCALE_MAX = 0.005, 20.0  # of the observed range; a larger scale is a straight line
SCALES = np.geomspace(SCALE_MIN, SCALE_MAX, GRID)
ZOOM = np.linspace(-1, 1, ZOOM_GRID)
REWEIGHTS = 4
TUKEY = 4.685  # Tukey's constant: 95 % efficiency where the noise is normal
MAD_TO_SIGMA = 1.4826
NEAR, SPIKE_MADS = 7, 10.0  # neighbors by which a spike is detected, and its distance from them
ROUNDING = 1e-9  # of the range of the losses: less is not noise

RIVALS = (0.5, 32.0)  # exponents of rival forms: a slower power, and all but an exponential
RIVAL_WINS = 8.0  # log-likelihood difference from which another form is preferred
LIKELY_MIN = 0.01  # a rival less likely than this is ignored
PARTS = (0.7, 0.85)  # first parts of the points, whose forecasts are compared
DRIFT_COUNTS = 0.7  # a forecast is expected to move by this share of its past movement

BREAKS_MAX = 2  # a learning rate is cut once or twice; a loss with more jumps follows no curve
WINDOW = 6  # points on either side of a jump
JUMP_ERRORS = 6.0  # a jump is at least this many standard errors
JUMP_SHARE = 0.01  # and at least this share of the range of the losses: less hardly changes a forecast
JUMP_TRENDS = 3.0  # and this many times the loss's own trend on either side
NUDGE = 1e-3  # of a standard error, for slopes


@dataclass(frozen=True, slots=True)
class Curve:
    """A·(1 + k/(p·c))^(-p) + floor, with k counted from `origin`. The exponent p is 1 except for rival forms.

    >>> curve = Curve(amplitude=2.0, scale=100.0, floor=0.5)
    >>> curve.loss(300.0), curve.step_of(1.0)
    (1.0, 300.0)
    """

    amplitude: float
    scale: float
    floor: float
    origin: float = 0.0
    exponent: float = 1.0

    @property
    def betas(self) -> tuple[float, float, float]:
        """β₀, β₁ and β₂ of ℓ(k) = 1/(β₀k + β₁) + β₂."""
        return 1 / (self.amplitude * self.scale), (1 - self.origin / self.scale) / self.amplitude, self.floor

    def loss(self, step: float) -> float:
        """Return the loss at a step."""
        fallen = math.pow(1 + (step - self.origin) / (self.exponent * self.scale), -self.exponent)
        return self.amplitude * fallen + self.floor

    def step_of(self, loss: float) -> float:
        """Return the step at which a loss is reached: k(ℓ) = (1/(ℓ − β₂) − β₁)/β₀; infinity if it never is."""
        if loss <= self.floor:
            return math.inf
        try:
            ratio = math.pow(self.amplitude / (loss - self.floor), 1 / self.exponent)
        except OverflowError:
            return math.inf
        return self.origin + self.exponent * self.scale * (ratio - 1)

    def falls_less(self, steps: int, least: float) -> float:
        """Return the step from which this many further steps lower the loss by less than `least`."""
        below, above = self.origin, self.origin + self.scale
        if self.loss(below) - self.loss(below + steps) < least:
            return below
        while self.loss(above) - self.loss(above + steps) >= least:
            below, above = above, self.origin + 2 * (above - self.origin)
        for _ in range(100):
            middle = (below + above) / 2
            if self.loss(middle) - self.loss(middle + steps) >= least:
                below = middle
            else:
                above = middle
        return above

    def done_at(self, goal: LossGoal) -> float:
        """Return the step at which a goal is reached, by the first of its rules to be met; infinity if it never is."""
        at = math.inf if goal.target is None else self.step_of(goal.target)
        if goal.by_fall:
            at = min(at, self.falls_less(goal.fall_steps, goal.fall_min))
        return at


Points = tuple[Floats, Floats, Floats]  # steps, losses, and the number of points of each


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and how well it fits."""

    curve: Curve
    points: Points
    weights: Floats  # the final weight of each point; 0 for a spike
    residuals: Floats

    @property
    def squares(self) -> float:
        """The weighted sum of squares of the residuals."""
        return float((self.weights * self.residuals**2).sum())


def fit(points: Points, exponent: float = 1.0, weights: Floats | None = None) -> Fit | None:
    """Return a curve fitted by least squares that are robust to spikes; None if the loss does not fall.

    If weights are given, they are not changed.
    """
    steps, losses, counts = points
    span, spread = float(steps[-1] - steps[0]), float(np.ptp(losses))
    if span <= 0 or spread <= 0:
        return None
    scales = span * SCALES
    fallen = _fallen(steps, scales, exponent)
    robust = counts * ~_spiked(losses) if weights is None else weights
    found = _best(points, robust, scales, exponent, fallen)
    for _ in range(REWEIGHTS if weights is None else 0):
        if found is None:
            return None
        deviations = np.abs(found.residuals) * np.sqrt(counts)
        scatter = max(_median(deviations) * MAD_TO_SIGMA, ROUNDING * spread)
        robust = counts * np.clip(1 - (deviations / (TUKEY * scatter)) ** 2, 0, None) ** 2
        found = _best(points, robust, scales, exponent, fallen)
    for _ in range(ZOOMS):
        if found is None:
            return None
        ratio = (scales[-1] / scales[0]) ** (1 / (len(scales) - 1))
        scales = found.curve.scale * ratio**ZOOM
        found = _best(points, robust, scales, exponent, _fallen(steps, scales, exponent))
    return found


def _fallen(steps: Floats, scales: Floats, exponent: float) -> Floats:
    """Return the remaining fall at each step (across) for each scale (down): the expensive part of a fit, done once."""
    fallen: Floats = (1 + (steps - steps[0]) / (exponent * scales[:, None])) ** -exponent
    return fallen


def _median(figures: Floats) -> float:
    """Return the median, ten times faster than numpy for so few figures."""
    ordered = np.sort(figures)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _medians(windows: Floats) -> Floats:
    """Return the median of each row."""
    ordered, half = np.sort(windows, axis=1), windows.shape[1] // 2
    medians: Floats = ordered[:, half] if windows.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2
    return medians


def _spiked(losses: Floats) -> npt.NDArray[np.bool_]:
    """Return which losses lie far from their neighbors: a first guess for the fit to start with."""
    padded = np.pad(losses, NEAR // 2, mode="reflect")
    off = np.abs(losses - _medians(np.lib.stride_tricks.sliding_window_view(padded, NEAR)))
    spiked: npt.NDArray[np.bool_] = off > SPIKE_MADS * _median(off) + ROUNDING * np.ptp(losses)
    return spiked


def _best(points: Points, weights: Floats, scales: Floats, exponent: float, fallen: Floats) -> Fit | None:
    """Return the fit of the scale with the least squares; amplitude and floor are the best for each scale."""
    steps, losses, _ = points
    total = weights.sum()
    if total <= 0:
        return None
    fallen_mean, loss_mean = fallen @ weights / total, float(losses @ weights / total)
    fallen_off, loss_off = fallen - fallen_mean[:, None], losses - loss_mean
    amplitudes = (fallen_off @ (weights * loss_off)) / np.maximum(fallen_off**2 @ weights, 1e-300)
    residuals = loss_off - amplitudes[:, None] * fallen_off
    squares = np.where(amplitudes > 0, residuals**2 @ weights, np.inf)
    best = int(np.argmin(squares))
    amplitude = float(amplitudes[best])
    if not (math.isfinite(squares[best]) and math.isfinite(amplitude)):
        return None
    floor = loss_mean - amplitude * float(fallen_mean[best])
    curve = Curve(amplitude, float(scales[best]), floor, float(steps[0]), exponent)
    return Fit(curve, points, weights, residuals[best])


@dataclass(frozen=True, slots=True)
class Forecast:
    """The step at which a goal will be reached, and the confidence in it.

    error: the relative error of the step, one standard deviation [R].
    confidence: a half if the error is `CONFIDENT_ERROR` [R]; 0 if there is no forecast, and then `why` says why.
    """

    step: float = math.inf
    error: float = math.inf
    confidence: float = 0.0
    why: str = ""
    curve: Curve | None = None


def forecast(cells: Sequence[tuple[float, float, int]], goal: LossGoal) -> Forecast:
    """Return when a goal will be reached, from cells of (step, loss, points)."""
    whole = np.array(cells, dtype=np.float64).reshape(-1, 3)
    points: Points = (whole[:, 0], whole[:, 1], whole[:, 2])
    for breaks in range(BREAKS_MAX + 2):
        if len(points[0]) < POINTS_MIN:
            since = f" since it jumped at step {points[0][0]:.0f}" if breaks else ""
            return Forecast(why=f"{len(points[0])} points{since} are too few for a curve")
        if breaks > BREAKS_MAX:
            return Forecast(why=f"the loss jumped {breaks} times or more")
        found = fit(points)
        if found is None:
            return Forecast(why="the loss does not fall")
        start = _last_jump(found)
        if not start:
            break
        points = (points[0][start:], points[1][start:], points[2][start:])
    assert found is not None  # the loop ends with a fit or returns
    return _judge(found, goal)


def _last_jump(found: Fit) -> int:
    """Return the index from which another curve holds; 0 if there is none.

    At a jump the residuals before and after are apart, by more than their noise and by more than they drift anyway: a
    curve that merely bends differently is not a jump.
    """
    if len(found.residuals) < 2 * WINDOW + 1:
        return 0
    z = found.residuals * np.sqrt(found.points[2])
    noise = _median(np.abs(np.diff(z))) * MAD_TO_SIGMA / math.sqrt(2)
    windows = np.lib.stride_tricks.sliding_window_view(found.residuals, WINDOW)
    medians = _medians(windows)
    half = WINDOW // 2
    drifts = np.abs(_medians(windows[:, half:]) - _medians(windows[:, :half]))
    counts = np.lib.stride_tricks.sliding_window_view(found.points[2], WINDOW)
    errors = 1.2533 * noise / np.sqrt(counts.sum(axis=1))  # of a median
    apart = np.abs(medians[WINDOW:] - medians[:-WINDOW])
    jump = apart / np.maximum(np.hypot(errors[WINDOW:], errors[:-WINDOW]), ROUNDING * np.ptp(found.points[1]))
    jump[apart < JUMP_TRENDS * np.maximum(drifts[WINDOW:], drifts[:-WINDOW])] = 0
    jump[apart < JUMP_SHARE * np.ptp(found.points[1])] = 0
    best = int(np.argmax(jump))
    return best + WINDOW if jump[best] > JUMP_ERRORS else 0


def _judge(found: Fit, goal: LossGoal) -> Forecast:
    curve = found.curve
    at, seen = curve.done_at(goal), float(found.points[0][-1])
    if not math.isfinite(at):
        return Forecast(why=f"the loss seems to level off at {curve.floor:.4g}, above its goal", curve=curve)
    if seen - curve.origin < BEND_MIN * curve.scale:
        return Forecast(at, why="the loss has not begun to level off", curve=curve)
    errors = [_open(found, goal, at), *_drifts(found, goal, at)]
    for exponent in RIVALS:
        error = _rival(found, goal, at, exponent)
        if error is None:
            return Forecast(at, why="another form of curve fits better than 1/step", curve=curve)
        errors.append(error)
    error = math.sqrt(math.fsum([one * one for one in errors]))
    way, seen_way = at - curve.origin, seen - curve.origin
    if way <= 0 or seen_way > way * (1 + error):
        return Forecast(at, error, why=f"the curve says that its goal was reached at step {at:.0f}", curve=curve)
    share = min(1.0, seen_way / (SHARE_SURE * way))
    return Forecast(at, error, share / (1 + (error / CONFIDENT_ERROR) ** 2), curve=curve)


def _effective(found: Fit) -> float:
    """Return the number of independent points that the fit rests on: fewer than there are if neighbors err alike."""
    z = found.residuals * np.sqrt(found.weights)
    squares = float((z**2).sum())
    alike = min(max(float((z[1:] * z[:-1]).sum()) / squares, 0.0), 0.95) if squares > 0 else 0.0
    used = int((found.weights > 0).sum())
    return max(used * (1 - alike) / (1 + alike), 1.0)


def _open(found: Fit, goal: LossGoal, at: float) -> float:
    """Return the relative standard error of the step that the residuals leave open."""
    curve, used = found.curve, found.weights > 0
    x = found.points[0] - curve.origin
    fallen = 1 / (1 + x / curve.scale)
    gradient = np.stack([fallen, np.ones_like(x), curve.amplitude * fallen**2 * x / curve.scale], axis=1)
    freedom = int(used.sum()) - 3
    if freedom < 1:
        return math.inf
    information = (gradient * found.weights[:, None]).T @ gradient
    inflation = int(used.sum()) / _effective(found)
    try:
        covariance = np.linalg.inv(information) * found.squares / freedom * inflation
    except np.linalg.LinAlgError:
        return math.inf
    nudges = np.sqrt(np.maximum(np.diag(covariance), 0))
    slopes = [_slope(curve, goal, at, index, float(nudge)) for index, nudge in enumerate(nudges)]
    if not all(math.isfinite(slope) for slope in slopes):
        return math.inf
    variance = float(np.array(slopes) @ covariance @ np.array(slopes))
    return math.sqrt(max(variance, 0.0)) / max(at - curve.origin, 1.0)


def _slope(curve: Curve, goal: LossGoal, at: float, index: int, nudge: float) -> float:
    """Return how the step changes with the amplitude, the floor or the logarithm of the scale, over a small nudge."""
    if nudge <= 0:
        return 0.0
    nudge *= NUDGE
    amplitude, floor, scale = curve.amplitude, curve.floor, curve.scale
    moved = (
        replace(curve, amplitude=amplitude + nudge),
        replace(curve, floor=floor + nudge),
        replace(curve, scale=scale * math.exp(min(nudge, 1.0))),
    )[index]
    return (moved.done_at(goal) - at) / nudge


def _drifts(found: Fit, goal: LossGoal, at: float) -> Iterator[float]:
    """Yield how far the forecast has moved while the last points came in."""
    steps, losses, counts = found.points
    for part in PARTS:
        size = max(POINTS_MIN, math.ceil(part * len(steps)))
        if size >= len(steps):
            continue
        early = fit((steps[:size], losses[:size], counts[:size]), weights=found.weights[:size])
        yield math.inf if early is None else DRIFT_COUNTS * _apart(early.curve.done_at(goal), at, found.curve.origin)


def _rival(found: Fit, goal: LossGoal, at: float, exponent: float) -> float | None:
    """Return how far a rival's forecast is from ours, weighted by its likelihood; None if it fits clearly better."""
    rival = fit(found.points, exponent, found.weights)
    if rival is None or found.squares <= 0:
        return 0.0
    better = _effective(found) / 2 * math.log(found.squares / max(rival.squares, 1e-300))
    if better > RIVAL_WINS:
        return None
    likely = 1 / (1 + math.exp(-better))
    return likely * _apart(rival.curve.done_at(goal), at, found.curve.origin) if likely > LIKELY_MIN else 0.0


def _apart(step: float, other: float, origin: float) -> float:
    if not (math.isfinite(step) and step > origin and other > origin):
        return math.inf
    return abs(math.log((step - origin) / (other - origin)))
