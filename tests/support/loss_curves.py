"""Synthetic loss curves: some of the form 1/(β₀k + β₁) + β₂, and some of other forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cotenant.core.prediction.loss_points import LossPoints

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

STEPS = 10_000  # of a whole training
SEEN = 0.4  # of it
DROP = 2.0  # by which the loss would fall in the end
FLOOR = 0.5


@dataclass(frozen=True)
class Told:
    """The losses that a job has reported so far, and its loss at step `STEPS`."""

    steps: Floats
    losses: Floats
    goal: float

    @property
    def points(self) -> LossPoints:
        points = LossPoints()
        for step, loss in zip(self.steps.tolist(), self.losses.tolist(), strict=True):
            points.add(int(step), loss)
        return points


def hyperbola(steps: Floats | float, scale: float, floor: float = FLOOR, drop: float = DROP) -> Floats:
    """Return the form itself; the scale is a share of all steps."""
    return np.asarray(floor + drop / (1 + steps / (scale * STEPS)))


def following(rng: Rng, scale: float, noise: float, cut: bool = False) -> Told:
    """Return a curve of the form with noise (a share of the whole fall), spikes, and maybe a lower learning rate."""
    steps = _steps(rng)
    losses, goal = hyperbola(steps, scale), float(hyperbola(STEPS, scale))
    if cut:
        at = rng.uniform(0.05, 0.15) * STEPS
        before = float(hyperbola(at, scale))
        floor, drop = 0.3, 0.6 * (before - 0.3)
        losses = np.where(steps < at, losses, floor + drop / (1 + np.maximum(steps - at, 0) / (1.5 * scale * STEPS)))
        goal = floor + drop / (1 + (STEPS - at) / (1.5 * scale * STEPS))
    losses = losses + noise * DROP * rng.normal(size=len(steps))
    spiked = rng.random(len(steps)) < 0.02
    losses[spiked] += rng.uniform(1, 5, int(spiked.sum()))
    return Told(steps, losses, goal)


def _steps(rng: Rng) -> Floats:
    return np.unique(np.linspace(1, SEEN * STEPS, int(rng.integers(80, 1500))).round())


Made = tuple[Floats, float]  # losses by share of all steps, and a goal


def _oscillating(x: Floats, rng: Rng) -> Made:
    return 1.5 + rng.uniform(0.2, 1) * np.sin(x * rng.uniform(10, 200) + rng.uniform(0, 6)), 0.4


def _rising(x: Floats, rng: Rng) -> Made:
    return 0.5 + rng.uniform(1, 5) * x ** rng.uniform(0.5, 2), 0.4


def _turning(x: Floats, rng: Rng) -> Made:
    at, up = rng.uniform(0.05, 0.25), rng.uniform(3, 10)
    return hyperbola(x * STEPS, 0.05) + np.maximum(x - at, 0) * up, 0.55


def _constant(x: Floats, rng: Rng) -> Made:
    return np.full(len(x), 1.0), float(rng.choice([0.5, 0.9, 0.99]))


def _collapsed(x: Floats, rng: Rng) -> Made:
    to = float(rng.choice([0.0, 2.3]))
    return np.where(x < rng.uniform(0.02, 0.3), hyperbola(x * STEPS, 0.05), to), to - 0.1


def _not_a_number(x: Floats, rng: Rng) -> Made:
    return np.where(x < rng.uniform(0.1, 0.39), hyperbola(x * STEPS, 0.05), np.nan), 0.6


def _stairs(x: Floats, rng: Rng) -> Made:
    count = int(rng.integers(3, 9))
    heights = rng.uniform(0.1, 0.4, count)
    fallen = sum(height * (x > at) for height, at in zip(heights, np.sort(rng.uniform(0, 1, count)), strict=True))
    return np.asarray(2.5 - fallen), 2.5 - 0.9 * float(heights.sum())


def _exponential(x: Floats, rng: Rng) -> Made:
    scale = rng.uniform(0.05, 0.5)
    return FLOOR + DROP * np.exp(-x / scale), FLOOR + DROP * float(np.exp(-1 / scale))


def _slow_power(x: Floats, rng: Rng) -> Made:
    scale = rng.uniform(0.005, 0.05)
    return FLOOR + DROP * (1 + x / scale) ** -0.3, FLOOR + DROP * (1 + 1 / scale) ** -0.3


def _logarithm(x: Floats, rng: Rng) -> Made:
    scale = rng.uniform(0.005, 0.05)
    return 2.5 - 0.4 * np.log(1 + x / scale), 2.5 - 0.4 * float(np.log(1 + 1 / scale))


def _straight(x: Floats, rng: Rng) -> Made:
    return 2.5 - 2 * x, 0.5


def _wandering(x: Floats, rng: Rng) -> Made:
    losses = 2 + np.cumsum(rng.normal(size=len(x))) * 0.02
    return losses, float(losses.min() - 0.2)


def _noise(x: Floats, rng: Rng) -> Made:
    return 2 + rng.standard_t(2, size=len(x)) * 0.3, 1.0


BROKEN: Mapping[str, Callable[[Floats, Rng], Made]] = {
    "oscillating": _oscillating,
    "rising": _rising,
    "turning up again": _turning,
    "constant": _constant,
    "collapsed": _collapsed,
    "not a number": _not_a_number,
    "stairs": _stairs,
    "exponential": _exponential,
    "slow power": _slow_power,
    "logarithm": _logarithm,
    "straight": _straight,
    "wandering": _wandering,
    "nothing but noise": _noise,
}


def broken(rng: Rng, kind: str) -> Told:
    """Return a curve of another form, with some noise."""
    steps = _steps(rng)
    losses, goal = BROKEN[kind](steps / STEPS, rng)
    return Told(steps, losses + float(rng.choice([0.002, 0.01, 0.03])) * DROP * rng.normal(size=len(steps)), goal)
