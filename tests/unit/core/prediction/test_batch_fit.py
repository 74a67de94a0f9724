from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.batch_fit import MAD_TO_SIGMA, POINTS_HALF, SPREAD_HALF, fit

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


NOISY = [
    (size, (0.01 + 0.001 * size) * (1 + 0.1 * math.sin(7 * size + turn))) for turn in range(3) for size in (1, 2, 4, 9)
]


def test_a_fit_depends_on_no_unit_of_time_and_on_no_order() -> None:
    plain, longer, reverse = fit(NOISY), fit([(size, 60 * took) for size, took in NOISY]), fit(NOISY[::-1])
    assert plain is not None
    assert longer is not None
    assert plain == reverse
    assert longer.batch.per_request == pytest.approx(60 * plain.batch.per_request)
    assert longer.batch.fixed == pytest.approx(60 * plain.batch.fixed)
    assert longer.per_request_error == pytest.approx(60 * plain.per_request_error)
    assert longer.confidence == pytest.approx(plain.confidence)


def test_requests_that_are_twice_as_large_take_twice_as_long_each() -> None:
    plain, larger = fit(NOISY), fit([(2 * size, took) for size, took in NOISY])
    assert plain is not None
    assert larger is not None
    assert larger.batch.per_request == pytest.approx(plain.batch.per_request / 2)
    assert larger.batch.fixed == pytest.approx(plain.batch.fixed)
    assert larger.per_request_error == pytest.approx(plain.per_request_error / 2)
    assert larger.size_max == 2 * plain.size_max
    assert larger.confidence == pytest.approx(plain.confidence)


def test_the_error_is_that_of_a_slope_and_the_confidence_falls_with_the_relative_distance() -> None:
    found = fit(NOISY)
    assert found is not None
    sizes, times = (np.array(column, dtype=float) for column in zip(*NOISY, strict=True))
    distances = np.abs(times - found.batch.per_request * sizes - found.batch.fixed)
    expected = found.batch.per_request * sizes + found.batch.fixed
    spread = math.sqrt(sum((size - sizes.mean()) ** 2 for size in sizes))
    assert found.per_request_error == pytest.approx(MAD_TO_SIGMA * float(np.median(distances)) / spread)
    off = MAD_TO_SIGMA * float(np.median(distances / expected))
    extra = len(NOISY) - 2
    assert found.confidence == pytest.approx(extra / (extra + POINTS_HALF) / (1 + (off / SPREAD_HALF) ** 2))


def test_a_line_that_would_begin_below_zero_goes_through_the_origin_and_a_falling_one_is_level() -> None:
    steep, falling = fit([(2, 0.01), (4, 0.05), (8, 0.12)]), fit([(1, 0.05), (2, 0.04), (4, 0.03)])
    assert steep is not None
    assert steep.batch.per_request == pytest.approx(0.05 / 4)
    assert steep.batch.fixed == 0.0
    assert falling is not None
    assert falling.batch.per_request == 0.0
    assert falling.batch.fixed == pytest.approx(0.04)
