"""What is plausible about a curve before any rate is known: the θ to try, the shapes, and their priors [R].

This depends only on the core counts of the measurements, and on priors, not on any rate. The same few counts are
measured again and again, so it is cached: half of a fit's time went there. The form is that of `core_curve`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHAPES = 3
EVERY_COUNT_UP_TO = 64  # cores; beyond, θ is searched in steps of 1/32
TINY = 1e-12
KEPT_MAX = 256  # cached sets of counts


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """By θ: the shapes at each count, the priors' part of the normal equations and of Occam's factor, and the odds."""

    thetas: NDArray[np.int64]
    shapes: Floats  # by θ, count and shape
    normal: Floats  # by θ, shape and shape
    volume: Floats
    log_prior: Floats


@lru_cache(maxsize=KEPT_MAX)
def hypotheses(counts: tuple[int, ...], cores_max: int, bend: float, jump: float, flat: float) -> Hypotheses:
    """Return what is plausible for measurements at some core counts, with θ at most `cores_max`.

    `bend`, `jump` and `flat` are those of `core_curve.Beliefs`. The result is shared and read-only.
    """
    thetas = _thetas(counts, cores_max)
    priors, volume = _priors(thetas, bend, jump)
    made = Hypotheses(
        thetas,
        shapes_of(np.array(counts), thetas),
        np.einsum("tmi,tmj->tij", priors, priors),
        volume,
        _log_prior(thetas, flat),
    )
    for array in (made.thetas, made.shapes, made.normal, made.volume, made.log_prior):
        array.setflags(write=False)
    return made


def shapes_of(cores: NDArray[np.int64], thetas: NDArray[np.int64]) -> Floats:
    """Return the three shapes, by θ, cores and shape."""
    below = cores[None, :] < thetas[:, None]
    log, log_theta = np.log(cores)[None, :], np.log(np.maximum(thetas, 2))[:, None]
    rest = (cores[None, :] - log) / (np.maximum(thetas, 2)[:, None] - log_theta)
    return np.stack([np.where(below, log / log_theta, 1.0), np.where(below, rest, 1.0), np.where(below, 0.0, 1.0)], -1)


def _thetas(measured: Iterable[int], cores_max: int) -> NDArray[np.int64]:
    """Return where θ is searched: at each core count up to 64, then at steps of 3 %, and where rates were measured."""
    counts = {*range(1, min(cores_max, EVERY_COUNT_UP_TO) + 1), *measured, cores_max}
    cores = EVERY_COUNT_UP_TO
    while cores < cores_max:
        counts.add(cores)
        cores += cores // 32
    return np.array(sorted(counts))


def _priors(thetas: NDArray[np.int64], bend: float, jump: float) -> tuple[Floats, Floats]:
    """Return the priors, as rows beside the points' rows, and their part of Occam's factor, by θ.

    At θ = 1 there is only one shape, and the rows keep the others at 0.
    """
    theta = np.maximum(thetas, 2).astype(np.float64)
    log, rest = theta / np.log(theta), -theta / (theta - np.log(theta))
    rows = np.zeros((len(theta), 2, SHAPES))
    rows[:, 0, 0], rows[:, 0, 1], rows[:, 1, 2] = log / bend, rest / bend, 1 / jump
    volume = np.log((log - rest) / bend / jump)  # of the change from shares to plateau, bend and jump
    rows[thetas == 1] = np.eye(SHAPES)[[0, 2]] / TINY**0.5
    volume[thetas == 1] = math.log(1 / TINY)
    return rows, volume


def _log_prior(thetas: NDArray[np.int64], flat: float) -> Floats:
    """Return the log prior of θ: every ratio of θ is equally likely; a flat curve has its own chance."""
    prior = np.log(np.diff(np.log(np.append(thetas, thetas[-1] + 1.0))))
    if len(thetas) > 1:
        rising = np.exp(prior[1:]).sum()
        prior[1:] += math.log((1 - flat) / rising)
        prior[0] = math.log(flat)
    return np.asarray(prior)
