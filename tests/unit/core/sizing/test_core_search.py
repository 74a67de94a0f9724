"""The core search: where it ends, and that it ends soon."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.core_curve import Point, Windows
from cotenant.core.sizing.core_search import SearchOptions, Trial, expected, next_trial, rising

Curve = list[float]


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw a rate for each core count: rising by ever smaller steps of 3 % at least, then flat."""
    theta = draw(st.integers(1, 24))
    bend = draw(st.floats(0, 0.5))
    rates = [10.0]
    for cores in range(2, 25):
        gain = max(0.03, (1 / (cores - 1)) * (1 - bend)) if cores <= theta else 0.0
        rates.append(rates[-1] * (1 + gain))
    return rates


def search(
    curve: Curve, start: int, highest: int, how: SearchOptions, rng: random.Random, noise: float
) -> tuple[Trial, int]:
    """Follow the search until it ends; also tell how many counts were measured."""
    windows = Windows()
    for _ in range(40):
        points = tuple(windows.points())
        trial = next_trial(points, start, highest, how, tried=len(points))
        if trial.found:
            return trial, len(points)
        windows.add(trial.cores, curve[trial.cores - 1] * (1 + rng.uniform(-noise, noise)))
    raise AssertionError("the search does not end")


@given(curves(), st.integers(1, 24), st.integers(1, 24), st.randoms(use_true_random=False))
def test_a_search_ends_within_2_percent_of_the_best_after_8_counts_at_most(
    curve: Curve, start: int, highest: int, rng: random.Random
) -> None:
    noise = 0.002
    trial, measured = search(curve, start, highest, SearchOptions(noise=noise / 2), rng, noise)
    assert measured <= 8
    assert 1 <= trial.cores <= highest
    assert curve[trial.cores - 1] >= curve[highest - 1] * (1 - 0.02 - 2 * noise)


@given(curves(), st.integers(1, 24), st.integers(1, 24))
def test_without_noise_no_fewer_cores_would_do(curve: Curve, start: int, highest: int) -> None:
    trial, _ = search(curve, start, highest, SearchOptions(noise=0.0, counts_max=24), random.Random(0), 0.0)
    assert trial.cores == 1 or curve[trial.cores - 2] < curve[highest - 1] * 0.98


@given(curves(), st.lists(st.integers(1, 24), min_size=1, max_size=8), st.integers(1, 24), st.randoms())
def test_what_to_try_does_not_depend_on_the_order_of_the_points(
    curve: Curve, counts: list[int], highest: int, rng: random.Random
) -> None:
    points = [Point(cores, curve[cores - 1]) for cores in sorted(set(counts))]
    shuffled = points.copy()
    rng.shuffle(shuffled)
    assert next_trial(points, 3, highest) == next_trial(shuffled, 3, highest)


def test_a_gain_within_the_noise_is_none() -> None:
    points = [Point(3, 10.0), Point(4, 10.25)]
    assert next_trial(points, 3, 8, SearchOptions(noise=0.0)).cores == 6
    assert next_trial(points, 3, 8, SearchOptions(noise=0.02)).cores == 1
    settled = [Point(3, 10.0, windows=40), Point(4, 10.25, windows=40)]
    assert next_trial(settled, 3, 8, SearchOptions(noise=0.02)).cores == 6


def test_after_its_counts_a_job_tries_no_fewer_cores_but_more_that_cost_nothing() -> None:
    flat, steep = [Point(4, 10.0), Point(6, 10.0)], [Point(3, 6.0), Point(4, 8.0)]
    assert next_trial(flat, 4, 8, tried=8) == next_trial(flat, 4, 8, tried=9)
    assert next_trial(flat, 4, 8, tried=8).found
    assert next_trial(steep, 4, 8, tried=8).cores == 6


def test_where_fewer_are_free_than_it_could_use_it_takes_those() -> None:
    points = [Point(1, 1.0), Point(6, 6.0), Point(12, 6.0)]
    trial = next_trial(points, 6, 4)
    assert (trial.cores, trial.found) == (4, True)


@given(st.lists(st.builds(Point, st.integers(1, 30), st.floats(0.1, 100.0), windows=st.integers(1, 9))))
def test_pooled_rates_never_fall_and_keep_their_sum(points: list[Point]) -> None:
    one_each = list({point.cores: point for point in points}.values())
    pooled = rising(one_each)
    assert [point.cores for point in pooled] == sorted(point.cores for point in one_each)
    assert all(low.rate <= high.rate * (1 + 1e-12) for low, high in pairwise(pooled))
    before, after = (sum(point.rate * point.windows for point in some) for some in (one_each, pooled))
    assert abs(before - after) <= 1e-9 * (1 + before)


def test_the_unmeasured_is_hoped_to_go_on() -> None:
    assert expected([], 4) == 4.0
    assert expected([Point(3, 6.0)], 2) == 4.0
    assert expected([Point(3, 6.0)], 5) == 10.0
    assert expected([Point(3, 6.0), Point(4, 6.0)], 9) == 6.0


def test_a_job_that_has_tried_nothing_may_try_as_many_counts_as_the_options_say() -> None:
    flat, how = [Point(3, 10.0, 9), Point(4, 10.0, 9)], SearchOptions(counts_max=1)
    assert next_trial(flat, 3, 6, how) == next_trial(flat, 3, 6, how, tried=0)
    assert not next_trial(flat, 3, 6, how).found
    assert next_trial(flat, 3, 6, how, tried=1).found
