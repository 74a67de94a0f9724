"""Step times as sums of non-negative terms, learned from few windows, with the uncertainty.

A step's time is the sum of what it waits for: computing, communicating, serving parameters. Each term is a feature of
the allocation times an unknown that cannot be negative, so the unknowns are found by non-negative least squares (Lawson
and Hanson 1974), relative to the step times, because they are measured that way. An unknown without measurements keeps
its prior: its term may be as long as a whole step [R]. So a prediction that depends on it is uncertain by itself, and
no special rules are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.prediction.curve_priors import Floats

ERROR = 0.05  # of a window's step time and of the form together, as a standard deviation relative to it [R]

TINY = 1e-12
FEATURE_MIN = 1e-6  # a feature that was never larger counts as never measured


@dataclass(frozen=True)
class Terms:
    """The unknowns, their covariance, and the relative distance of the measured step times from the form."""

    values: Floats  # seconds
    covariance: Floats
    error: float
    misfit: float  # the sum of squared relative distances, in squared errors of `ERROR`

    def seconds(self, row: Sequence[float]) -> float:
        """Return the expected step time of an allocation with these features, to nine digits."""
        return float(f"{float(np.dot(row, self.values)):.9g}")

    def spread(self, row: Sequence[float]) -> float:
        """Return its relative standard deviation; infinity if no time is expected."""
        seconds = self.seconds(row)
        if seconds <= 0:
            return math.inf
        features = np.array(row)
        variance = float(features @ self.covariance @ features)
        return float(f"{math.hypot(math.sqrt(max(0.0, variance)) / seconds, self.error):.9g}")


def fit_terms(rows: Sequence[Sequence[float]], seconds: Sequence[float], spreads: Sequence[float] = ()) -> Terms:
    """Return the terms of step times that were measured on allocations with these features.

    `spreads` are the relative standard deviations of the times, if known, in addition to `ERROR`.

    >>> terms = fit_terms([(1, 0), (1, 1), (1, 2)], [1.0, 1.25, 1.5])
    >>> [round(value, 3) for value in terms.values.tolist()], round(terms.seconds((1, 4)), 3)
    ([1.0, 0.25], 2.0)

    Raises:
        ValueError: there are no step times, or one is not positive and finite.
    """
    if not seconds or not all(0 < one < math.inf for one in seconds):
        raise ValueError("there must be at least one step time, and all must be positive and finite")
    order = sorted(range(len(seconds)), key=lambda at: (tuple(rows[at]), seconds[at]))
    features, times = np.array([rows[at] for at in order], dtype=float), np.array([seconds[at] for at in order])
    trust = ERROR / np.hypot(ERROR, [spreads[at] for at in order]) if spreads else np.ones(len(times))
    scale = float(times.max())
    relative = features * (trust * scale / times)[:, None]
    values = solve(relative, trust)
    off = relative @ values - trust
    misfit = float(np.sum(off**2)) / ERROR**2
    error = ERROR * max(1.0, math.sqrt(misfit / len(times)))
    largest = features.max(axis=0)
    prior = np.diag(np.where(largest > FEATURE_MIN, largest, 1.0) ** 2)
    covariance = _inverse(relative.T @ relative / error**2 + prior) * scale**2
    return Terms(values * scale, covariance, error, misfit)


def _inverse(known: Floats) -> Floats:
    """Return the inverse, regularized if step times many powers of ten apart make the matrix singular."""
    try:
        return np.asarray(np.linalg.inv(known), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.inv(known * (1 + TINY * np.eye(len(known)))), dtype=np.float64)


def solve(rows: Floats, wanted: NDArray[np.float64]) -> Floats:
    """Return the least-squares solution without negative unknowns."""
    from scipy.optimize import nnls  # takes 0.2 s to import, so only when fitting

    return np.asarray(nnls(rows, wanted)[0], dtype=np.float64)
