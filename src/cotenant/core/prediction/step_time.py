"""Step times as sums of non-negative terms, learnt from few windows, and how sure that is.

A step's time is the sum of what it waits for: computing, communicating, serving parameters. Each term is a feature of
the allocation times an unknown that cannot be negative, so they are found by non-negative least squares (Lawson and
Hanson 1974), relative to the step times, for so they are measured. An unknown about which nothing was measured keeps
what is held plausible beforehand: that its term may be as long as a whole step [R]. So a prediction that rests on such
an unknown is unsure by itself, and no rule is needed for each case.
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
FEATURE_MIN = 1e-6  # a feature that was never larger was never measured


@dataclass(frozen=True)
class Terms:
    """The unknowns, their covariance, and how far the measured step times are from the form, relative to them."""

    values: Floats  # seconds
    covariance: Floats
    error: float
    misfit: float  # the sum of squared relative distances, in squared errors of `ERROR`

    def seconds(self, row: Sequence[float]) -> float:
        """The expected step time of an allocation with these features, to nine digits."""
        return float(f"{float(np.dot(row, self.values)):.9g}")

    def spread(self, row: Sequence[float]) -> float:
        """Its standard deviation relative to it; infinite where no time is expected."""
        seconds = self.seconds(row)
        if seconds <= 0:
            return math.inf
        features = np.array(row)
        variance = float(features @ self.covariance @ features)
        return float(f"{math.hypot(math.sqrt(max(0.0, variance)) / seconds, self.error):.9g}")


def fit_terms(rows: Sequence[Sequence[float]], seconds: Sequence[float], spreads: Sequence[float] = ()) -> Terms:
    """Find the terms of step times that were measured in allocations with these features.

    `spreads` are the relative standard deviations of the times, as far as they are known, beside `ERROR`.

    >>> terms = fit_terms([(1, 0), (1, 1), (1, 2)], [1.0, 1.25, 1.5])
    >>> [round(value, 3) for value in terms.values.tolist()], round(terms.seconds((1, 4)), 3)
    ([1.0, 0.25], 2.0)

    Raises:
        ValueError: no step time, or one that is not positive and finite.
    """
    if not seconds or not all(0 < one < math.inf for one in seconds):
        raise ValueError("step times must be positive and finite, and there must be one")
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
    """Times that are many powers of ten apart tell of fewer terms than there are, as far as floats hold."""
    try:
        return np.asarray(np.linalg.inv(known), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.inv(known * (1 + TINY * np.eye(len(known)))), dtype=np.float64)


def solve(rows: Floats, wanted: NDArray[np.float64]) -> Floats:
    """Least squares without negative unknowns."""
    from scipy.optimize import nnls  # takes a fifth of a second to import, which only those pay who fit

    return np.asarray(nnls(rows, wanted)[0], dtype=np.float64)
