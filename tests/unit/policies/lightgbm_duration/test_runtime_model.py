"""The distribution that a model mixes from ordinary and surprising jobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.policies.lightgbm_duration.runtime_model import KNOTS, mixture


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.floats(-3, 9), st.floats(0.25, 4), st.floats(0.25, 4)), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
)
def test_the_quantiles_of_a_mixture_are_those_of_its_distribution_function(
    shapes: list[tuple[float, float, float]], probability: float
) -> None:
    """The share of a sample of ordinary and surprising jobs below each quantile is that of the quantile."""
    plain = np.array([[middle - below, middle, middle + above] for middle, below, above in shapes])
    surprises = np.linspace(-5.0, 12.0, len(KNOTS))
    found = mixture(plain, surprises, np.full(len(shapes), probability))
    even = np.linspace(0.0, 1.0, 4001)
    for (middle, below, above), quantiles in zip(shapes, found.tolist(), strict=True):
        ends = [middle - 2 * below, middle - below, middle, middle + above, middle + 2 * above]
        ordinary, odd = np.interp(even, [0.0, 0.1, 0.5, 0.9, 1.0], ends), np.interp(even, KNOTS, surprises)
        for share, quantile in zip((0.1, 0.5, 0.9), quantiles, strict=True):
            reached = probability * (odd <= quantile).mean() + (1 - probability) * (ordinary <= quantile).mean()
            assert reached == pytest.approx(share, abs=0.01)
