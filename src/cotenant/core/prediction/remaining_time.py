"""Remaining times of jobs: known, guessed, and sampled.

A job about which nothing is known is expected to run for as long again as it has run (ADR 0010). The chance that it
runs for more than another x after it has run for a is then a / (a + x), the heavy tail of which that median is one
point: in 9 of 10 cases it is more than a ninth of a, and in 1 of 10 more than nine times a [R].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.estimate import Estimate

RUN_SECONDS_UNKNOWN = 3600.0  # if nothing is known about this job or any other
UNKNOWN_SPREAD = 9.0  # for unknown jobs: from the median to the 10th and 90th percentile

_SHARES = np.array([0.0, 0.1, 0.5, 0.9, 1.0])


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """How long a job will still run, in seconds: the median, and the range that holds in 8 of 10 cases.

    Not `known`: nothing is known about the job, and the figures are only good for simulating a schedule.
    """

    seconds: float
    p10_seconds: float
    p90_seconds: float
    known: bool = True

    @property
    def certain(self) -> bool:
        """Whether there is nothing to sample."""
        return self.p10_seconds == self.seconds == self.p90_seconds

    def at_most(self, seconds: float) -> RemainingTime:
        """Return the remaining time of a job that is stopped after so many seconds.

        >>> RemainingTime(90, 10, 810).at_most(60)
        RemainingTime(seconds=60, p10_seconds=10, p90_seconds=60, known=True)
        """
        most = max(0.0, seconds)
        return RemainingTime(min(self.seconds, most), min(self.p10_seconds, most), min(self.p90_seconds, most))


def certain_time(seconds: float) -> RemainingTime:
    """Return a remaining time that is known, or assumed to be."""
    return RemainingTime(seconds, seconds, seconds)


def remaining_time_of(
    estimate: Estimate,
    ran_seconds: float,
    *,
    expected_seconds: float | None = None,
    usual_seconds: float = RUN_SECONDS_UNKNOWN,
) -> RemainingTime:
    """Return the remaining time of a job that has run for this long in total.

    The predictor's estimate comes first, then the run time that its user expects; a job that outlived that is unknown.
    An unknown job is expected to run for as long again as it has run; one that has not run, as long as other jobs
    usually do.

    >>> remaining_time_of(Estimate(), ran_seconds=90)
    RemainingTime(seconds=90, p10_seconds=10.0, p90_seconds=810.0, known=False)
    >>> remaining_time_of(Estimate(), ran_seconds=90, expected_seconds=100).seconds
    10
    """
    if estimate.predictable and estimate.remaining_seconds:
        middle = estimate.remaining_seconds
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        return RemainingTime(
            middle, middle if low is None else min(low, middle), middle if high is None else max(high, middle)
        )
    if expected_seconds is not None and expected_seconds > ran_seconds:
        return certain_time(expected_seconds - ran_seconds)
    middle = ran_seconds or usual_seconds
    return RemainingTime(middle, middle / UNKNOWN_SPREAD, middle * UNKNOWN_SPREAD, known=False)


def sample_run_times(rests: Sequence[RemainingTime], rng: np.random.Generator, draws: int) -> NDArray[np.float64]:
    """Return sampled run times, one row per sample; the first row is the medians, and the only one if all are certain.

    Logarithms are linear between the quantiles, and extend as far beyond them as they are from the median.
    """
    quantiles = np.array([(rest.p10_seconds, rest.seconds, rest.p90_seconds) for rest in rests]).reshape(-1, 3)
    medians = quantiles[:, 1]
    if all(rest.certain for rest in rests):
        return medians[None, :]
    low, middle, high = np.log1p(quantiles.T)
    knots = np.column_stack([np.maximum(0.0, 2 * low - middle), low, middle, high, 2 * high - middle])
    at = rng.random((draws, len(rests)))
    place = np.clip(np.searchsorted(_SHARES, at, side="right") - 1, 0, len(_SHARES) - 2)
    rows = np.arange(len(rests))
    below, above = knots[rows, place], knots[rows, place + 1]
    along = (at - _SHARES[place]) / (_SHARES[place + 1] - _SHARES[place])
    return np.vstack([medians, np.expm1(below + along * (above - below))])
