from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.batch_fit import fit

points = st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 1e3)), min_size=1, max_size=40)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.lists(st.integers(1, 256), min_size=2, max_size=30, unique=True))
def test_times_on_a_line_give_the_line(per_request: float, fixed: float, sizes: list[int]) -> None:
    found = fit([(size, per_request * size + fixed) for size in sizes])
    assert found is not None
    assert found.batch.per_request == pytest.approx(per_request, rel=1e-5)
    assert found.batch.fixed == pytest.approx(fixed, rel=1e-3, abs=1e-6)
    assert found.size_max == max(sizes)


def test_a_fifth_of_wild_times_does_not_move_the_line() -> None:
    rng = np.random.default_rng(1)
    sizes = [1, 2, 4, 8, 16] * 10
    times = [(0.01 + 0.001 * size) * float(rng.normal(1, 0.02)) for size in sizes]
    times[::5] = [9.0 * float(rng.random()) for _ in times[::5]]
    found = fit(list(zip(sizes, times, strict=True)))
    assert found is not None
    assert found.batch.per_request == pytest.approx(0.001, rel=0.1)
    assert found.batch.fixed == pytest.approx(0.01, rel=0.1)


def test_the_slope_is_that_of_a_search_over_all_slopes() -> None:
    """The slow twin: the slope with the least sum of weighed distances to all pairs' slopes, from a fine grid."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 32, 20)
    times = (0.01 + 0.001 * sizes) * rng.normal(1, 0.1, 20)
    found = fit([(int(size), float(took)) for size, took in zip(sizes, times, strict=True)])
    seen = list(zip(sizes.tolist(), times.tolist(), strict=True))
    pairs = [(a - b, (x - y) / (a - b)) for a, x in seen for b, y in seen if a > b]
    grid = np.linspace(0, 0.003, 3001)
    costs = [math.fsum(weight * abs(slope - one) for weight, slope in pairs) for one in grid]
    assert found is not None
    assert found.batch.per_request == pytest.approx(float(grid[int(np.argmin(costs))]), abs=2e-6)


@given(points)
def test_whatever_was_seen_makes_a_sound_line_or_none(seen: list[tuple[int, float]]) -> None:
    found = fit(seen)
    if len({size for size, _ in seen}) < 2:
        assert found is None
    else:
        assert found is not None
        assert found.batch.per_request >= 0
        assert found.batch.fixed >= 0
        assert 0 <= found.confidence <= 1
        assert math.isfinite(found.per_request_error)


def test_more_and_closer_points_make_surer() -> None:
    def line(count: int, off: float) -> float:
        found = fit([(1 + n % 8, (0.01 + 0.001 * (1 + n % 8)) * (1 + off * (-1) ** (n // 8))) for n in range(count)])
        assert found is not None
        return found.confidence

    assert line(8, 0.0) < line(32, 0.0)
    assert line(32, 0.3) < line(32, 0.05) < line(32, 0.0)
    assert fit([(1, 0.01), (2, 0.02)]).confidence == 0  # type: ignore[union-attr]  # two sizes are enough for a line
