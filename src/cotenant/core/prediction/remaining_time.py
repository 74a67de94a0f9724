"""How long jobs run yet: what is known of it, what is guessed, and what is drawn.

Of a job of which nothing is known, as much again is expected as it ran (ADR 0010). With that the chance that it runs
on for more than x after it ran for a is a / (a + x), the heavy tail of which that median is one point: so nine times
out of ten it is more than a ninth of a, and once in ten more than nine times a [R].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.estimate import Estimate

RUN_SECONDS_UNKNOWN = 3600.0  # of a job of which nothing is known, nor of any other
UNKNOWN_SPREAD = (
    9.0  # of one that is expected to run for as much again, from the median to the 10th and 90th percentile
)

_SHARES = np.array([0.0, 0.1, 0.5, 0.9, 1.0])


@dataclass(frozen=True, slots=True)
class Rest:
    """How long a job will run yet, in seconds: the median, and between which times it lies in 8 of 10 cases."""

    seconds: float
    p10_seconds: float
    p90_seconds: float

    @property
    def certain(self) -> bool:
        """Whether there is nothing to draw."""
        return self.p10_seconds == self.seconds == self.p90_seconds


def exactly(seconds: float) -> Rest:
    """A rest that is known, or taken to be."""
    return Rest(seconds, seconds, seconds)


def rest_of(
    estimate: Estimate,
    ran_seconds: float,
    *,
    expected_seconds: float | None = None,
    usual_seconds: float = RUN_SECONDS_UNKNOWN,
) -> Rest:
    """Say how long a job will run yet that has run for so long in all.

    What the predictor says comes first, then the run time that its user expects; who outlived that is unknown. Of an
    unknown job as much again is expected as it ran, of one that has not run what is usual among the others.

    >>> rest_of(Estimate(), ran_seconds=90)
    Rest(seconds=90, p10_seconds=10.0, p90_seconds=810.0)
    >>> rest_of(Estimate(), ran_seconds=90, expected_seconds=100).seconds
    10
    """
    if estimate.predictable and estimate.remaining_seconds:
        middle = estimate.remaining_seconds
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        return Rest(middle, middle if low is None else min(low, middle), middle if high is None else max(high, middle))
    if expected_seconds is not None and expected_seconds > ran_seconds:
        return exactly(expected_seconds - ran_seconds)
    middle = ran_seconds or usual_seconds
    return Rest(middle, middle / UNKNOWN_SPREAD, middle * UNKNOWN_SPREAD)


def drawn(rests: Sequence[Rest], rng: np.random.Generator, draws: int) -> NDArray[np.float64]:
    """Draw run times, a row each time; the first row are the medians, and alone where nothing is uncertain.

    Logarithms are linear between the quantiles, and end as far beyond them as they are from the median.
    """
    told = np.array([(rest.p10_seconds, rest.seconds, rest.p90_seconds) for rest in rests]).reshape(-1, 3)
    medians = told[:, 1]
    if all(rest.certain for rest in rests):
        return medians[None, :]
    low, middle, high = np.log1p(told.T)
    knots = np.column_stack([np.maximum(0.0, 2 * low - middle), low, middle, high, 2 * high - middle])
    at = rng.random((draws, len(rests)))
    place = np.clip(np.searchsorted(_SHARES, at, side="right") - 1, 0, len(_SHARES) - 2)
    rows = np.arange(len(rests))
    below, above = knots[rows, place], knots[rows, place + 1]
    along = (at - _SHARES[place]) / (_SHARES[place + 1] - _SHARES[place])
    return np.vstack([medians, np.expm1(below + along * (above - below))])
