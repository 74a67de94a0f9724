"""Remaining times: which source decides, and that samples follow their quantiles."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import Estimate
from cotenant.core.prediction.remaining_time import (
    RUN_SECONDS_UNKNOWN,
    UNKNOWN_SPREAD,
    RemainingTime,
    certain_time,
    remaining_time_of,
    sample_run_times,
)

times = st.builds(
    lambda low, more, most: RemainingTime(low + more, low, low + more + most),
    *(st.floats(0, 1e6) for _ in range(3)),
)


class Chances(np.random.Generator):
    """Draws the same chance for all jobs, one after another."""

    def __init__(self, chances: list[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self._chances = chances

    def random(self, size: tuple[int, int]) -> np.ndarray:  # type: ignore[override]  # as it is called
        assert size[0] == len(self._chances)
        return np.repeat(np.array(self._chances)[:, None], size[1], axis=1)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(None, None, (50, 50, 50)), (20.0, 90.0, (50, 20, 90)), (60.0, 40.0, (50, 50, 50)), (0.0, None, (50, 0, 50))],
)
def test_an_estimate_comes_first_and_its_range_holds_its_median(
    low: float | None, high: float | None, expected: tuple[float, float, float]
) -> None:
    known = Estimate(True, 0.9, remaining_seconds=50.0, remaining_p10_seconds=low, remaining_p90_seconds=high)
    assert remaining_time_of(known, 7.0, expected_seconds=1000.0) == RemainingTime(*expected)


@pytest.mark.parametrize("estimate", [Estimate(remaining_seconds=50.0), Estimate(True, 0.9), Estimate(True, 0.9, 0.0)])
def test_without_an_estimate_the_users_time_counts_until_the_job_has_outlived_it(estimate: Estimate) -> None:
    assert remaining_time_of(estimate, 99.0, expected_seconds=100.0) == certain_time(1.0)
    for ran in (100.0, 101.0):
        outlived = remaining_time_of(estimate, ran, expected_seconds=100.0)
        assert outlived == RemainingTime(ran, ran / UNKNOWN_SPREAD, ran * UNKNOWN_SPREAD, known=False)
    assert remaining_time_of(estimate, 0.0, expected_seconds=0.0, usual_seconds=5.0).seconds == 5.0
    assert remaining_time_of(estimate, 0.0).seconds == RUN_SECONDS_UNKNOWN


def test_a_time_is_certain_only_if_its_range_is_a_point() -> None:
    assert certain_time(5.0).certain
    assert not RemainingTime(5.0, 4.0, 5.0).certain
    assert not RemainingTime(5.0, 5.0, 6.0).certain


@given(st.lists(times, min_size=1, max_size=4))
def test_samples_at_a_quantile_are_that_quantile_and_the_rest_lies_between(rests: list[RemainingTime]) -> None:
    chances = [0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, math.nextafter(1.0, 0.0)]
    drawn = sample_run_times(rests, Chances(chances), len(chances))
    assert list(drawn[0]) == [rest.seconds for rest in rests]
    if all(rest.certain for rest in rests):
        assert drawn.shape == (1, len(rests))
        return
    assert drawn.shape == (1 + len(chances), len(rests))
    for column, rest in enumerate(rests):
        low, middle, high = (math.log1p(one) for one in (rest.p10_seconds, rest.seconds, rest.p90_seconds))
        knots = [max(0.0, 2 * low - middle), low, middle, high, 2 * high - middle]
        halfway = [(one + other) / 2 for one, other in pairwise(knots)]
        expected = [one for pair in zip(knots, [*halfway, math.nan], strict=True) for one in pair][:-1]
        assert np.log1p(drawn[1:, column]) == pytest.approx(expected, abs=1e-6)


def test_if_all_times_are_certain_nothing_is_drawn() -> None:
    rests = [certain_time(3.0), certain_time(7.0)]
    assert sample_run_times(rests, Chances([]), 0).tolist() == [[3.0, 7.0]]
    assert sample_run_times([], Chances([]), 0).shape == (1, 0)
