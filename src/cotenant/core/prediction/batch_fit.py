"""Batch times, τ(b) = αb + τ₀, fitted to measurements of which a few may be far off.

The slope is the median of the slopes through all pairs of points (Theil 1950, Sen 1968): it holds with up to 29 % wild
points. Weighting each pair by its distance keeps neighboring sizes, whose slopes are all noise, from deciding [R].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cotenant.core.prediction.batch_queueing import BatchTime

Floats = npt.NDArray[np.float64]

SIZES_MIN = 2  # a line needs two
POINTS_HALF = 4.0  # beyond the two that any line fits, this many give half confidence
MAD_TO_SIGMA = 1.4826
SPREAD_HALF = 0.25  # a median distance from the line of this share halves the confidence


@dataclass(frozen=True, slots=True)
class BatchFit:
    """A line through batch times.

    size_max: the largest measured batch; beyond it the line is a guess.
    per_request_error: the standard error of α.
    confidence: from the number of points and their distance from the line, from 0 to 1 [R].
    """

    batch: BatchTime
    size_max: int
    per_request_error: float
    confidence: float


def fit(points: Sequence[tuple[int, float]]) -> BatchFit | None:
    """Return a line fitted to (batch size, seconds); None if there are too few sizes to separate α from τ₀.

    >>> fit([(1, 0.012), (4, 0.018), (8, 0.026), (8, 9.9), (2, 0.014)]).batch
    BatchTime(per_request=0.002, fixed=0.01)
    """
    sizes = np.array([size for size, _ in points], dtype=np.float64)
    seconds = np.array([took for _, took in points], dtype=np.float64)
    if len(set(sizes.tolist())) < SIZES_MIN:
        return None
    slope = max(_slope(sizes, seconds), 0.0)
    fixed = float(np.median(seconds - slope * sizes))
    if fixed < 0:  # impossible: fit a line through the origin
        slope, fixed = float(np.median(seconds / sizes)), 0.0
    batch = BatchTime(_rounded(slope), _rounded(fixed))
    expected = slope * sizes + fixed
    off = float(np.median(np.abs(seconds - expected) / expected)) * MAD_TO_SIGMA
    scatter = float(np.median(np.abs(seconds - expected))) * MAD_TO_SIGMA
    error = scatter / math.sqrt(float(((sizes - sizes.mean()) ** 2).sum()))
    extra = len(points) - 2
    return BatchFit(batch, int(sizes.max()), error, extra / (extra + POINTS_HALF) / (1 + (off / SPREAD_HALF) ** 2))


def _slope(sizes: Floats, seconds: Floats) -> float:
    """Return the median of the slopes through all pairs, weighted by the distance of their sizes."""
    first, second = np.triu_indices(len(sizes), 1)
    apart = sizes[second] - sizes[first]
    first, second, apart = first[apart != 0], second[apart != 0], apart[apart != 0]
    slopes, weights = (seconds[second] - seconds[first]) / apart, np.abs(apart)
    order = np.argsort(slopes, kind="stable")
    sums = np.cumsum(weights[order])
    return float(slopes[order][int(np.searchsorted(sums, sums[-1] / 2))])


def _rounded(figure: float) -> float:
    return float(f"{figure:.9g}")
