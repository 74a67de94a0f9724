"""Invariants of a design, compared with a naive computation of the same criterion and an exhaustive search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.prediction.core_curve import Curve, Point, fit, ladder
from cotenant.core.prediction.curve_priors import shapes_of
from cotenant.core.prediction.experiment_design import (
    POINTS_MAX,
    POINTS_MIN,
    RATE_MIN,
    WEIGHT_MIN,
    plan,
    uncertainty_after,
)

COUNTS = st.integers(1, 64)
POINTS = st.lists(st.builds(Point, COUNTS, st.floats(0.1, 100.0)), max_size=6, unique_by=lambda point: point.cores)


@settings(deadline=None)
@given(POINTS, COUNTS)
def test_a_plan_holds_new_counts_within_range_and_ends(points: list[Point], cores_max: int) -> None:
    planned = plan(points, cores_max)
    known = {point.cores for point in points if point.cores <= cores_max}
    assert len(set(planned.cores)) == len(planned.cores)
    assert known.isdisjoint(planned.cores)
    assert all(1 <= cores <= cores_max for cores in planned.cores)
    assert len(known) + len(planned.cores) <= max(POINTS_MAX, len(known) + 1)
    assert len(known) + len(planned.cores) >= min(POINTS_MIN, cores_max)
    assert planned.reason


@settings(deadline=None)
@given(POINTS, COUNTS)
def test_the_most_cores_come_first(points: list[Point], cores_max: int) -> None:
    others = [point for point in points if point.cores != cores_max]
    assert plan(others, cores_max).cores[0] == cores_max


@settings(deadline=None)
@given(POINTS, COUNTS, st.randoms(use_true_random=False))
def test_the_order_and_the_unit_of_points_do_not_matter(points: list[Point], cores_max: int, random: object) -> None:
    shuffled = [Point(point.cores, point.rate * 4.0) for point in points]
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' own Random
    assert plan(shuffled, cores_max) == plan(points, cores_max)


@pytest.mark.parametrize("theta", [1, 2, 5, 9, 16, 30])
def test_measuring_one_by_one_finds_theta_within_a_step_of_the_ladder(theta: int) -> None:
    known: list[Point] = []
    while left := plan(known, 32).cores:
        known.append(Point(left[0], 10.0 * min(left[0], theta)))
    assert POINTS_MIN <= len(known) <= POINTS_MAX
    rungs = ladder(32)
    found = fit(known, 32).cores_useful
    assert abs(int(np.searchsorted(rungs, found)) - int(np.searchsorted(rungs, theta))) <= 1


def test_reasons_explain_why_planning_goes_on_or_ends() -> None:
    assert plan([], 8).reason == "the rate is known at 0 core counts; that on 8 cores bounds what others can gain"
    assert plan([Point(1, 1.0)], 1).reason == "every distinguishable core count has been measured"
    assert "more than 1 core does not help" in plan([Point(1, 1.0), Point(8, 1.0)], 8).reason
    steep = [Point(1, 1.0), Point(8, 6.0)]
    assert "these are the most informative" in plan(steep, 8).reason
    wild = [Point(cores, rate) for cores, rate in ((1, 1.0), (3, 9.0), (9, 2.0), (20, 12.0), (60, 30.0))]
    assert "are as many as profiling may cost" in plan(wild, 60).reason


def naive_uncertainty(curve: Curve, choice: int) -> float:
    """The criterion in plain loops: for each θ that may be true, what would be seen, and what every θ makes of it."""
    kept = [at for at, weight in enumerate(curve.weights) if weight > WEIGHT_MIN]
    total = sum(curve.weights[at] for at in kept)
    error = math.hypot(curve.beliefs.noise, curve.beliefs.form)

    def relative(at: int, cores: int) -> float:
        shapes = shapes_of(np.array([cores]), curve.thetas[at : at + 1])[0, 0]
        return float(shapes @ curve.shares[at] / curve.shares[at].sum())

    def row(at: int, cores: int) -> np.ndarray:
        theta = int(curve.thetas[at])
        return np.array([math.log(cores) / math.log(theta), cores / theta]) if cores < theta else np.zeros(2)

    def information(at: int, counts: list[int]) -> np.ndarray:
        rows = [row(at, cores) / (error * max(relative(at, cores), RATE_MIN)) for cores in counts]
        return np.eye(2) + sum((np.outer(one, one) for one in rows), np.zeros((2, 2)))

    measured = [point.cores for point in curve.points]
    expected = 0.0
    for true in kept:
        if curve.thetas[true] > 1:
            expected += curve.weights[true] / total * np.trace(np.linalg.inv(information(true, [*measured, choice])))
        seen = relative(true, choice) * curve.shares[true].sum()
        odds = {}
        for judged in kept:
            variance = (error * max(relative(judged, choice), RATE_MIN)) ** 2
            variance += row(judged, choice) @ np.linalg.inv(information(judged, measured)) @ row(judged, choice)
            off = seen - relative(judged, choice) * curve.shares[judged].sum()
            odds[judged] = curve.weights[judged] * math.exp(-0.5 * off**2 / variance) / math.sqrt(variance)
        whole = sum(odds.values())
        mean = sum(odds[at] / whole * math.log(curve.thetas[at]) for at in kept)
        squares = sum(odds[at] / whole * math.log(curve.thetas[at]) ** 2 for at in kept)
        expected += curve.weights[true] / total * (squares - mean**2)
    return float(expected)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.2, 1.0)), min_size=1, max_size=3, unique_by=lambda one: one[0])
)
def test_the_criterion_equals_the_naive_one_and_the_best_count_is_taken(figures: list[tuple[int, float]]) -> None:
    points = [*(Point(cores, rate) for cores, rate in figures if cores < 12), Point(12, 1.0)]
    curve, measured = fit(points, 12), {point.cores for point in points}
    left = [cores for cores in ladder(12) if cores not in measured]
    naive = [naive_uncertainty(curve, cores) for cores in left]
    assert uncertainty_after(curve, left) == pytest.approx(naive, rel=1e-6, abs=1e-9)
    if planned := plan(points, 12).cores:
        assert naive[left.index(planned[0])] <= min(naive) + 1e-8


@pytest.mark.parametrize("theta", [6, 9, 14])
def test_choosing_one_by_one_comes_close_to_the_best_of_all_pairs(theta: int) -> None:
    """For a θ that is known, A-optimality has no more to it than the trace; greedy is within a tenth of exhaustive."""
    counts = range(1, theta)

    def trace(chosen: tuple[int, ...]) -> float:
        rows = [np.array([math.log(cores) / math.log(theta), cores / theta]) for cores in chosen]
        weights = [1 / (0.05 * max(cores / theta, RATE_MIN)) ** 2 for cores in chosen]
        whole = sum((weight * np.outer(row, row) for weight, row in zip(weights, rows, strict=True)), np.eye(2))
        return float(np.trace(np.linalg.inv(whole)))

    chosen: tuple[int, ...] = ()
    for _ in range(2):
        chosen = min(((*chosen, cores) for cores in counts if cores not in chosen), key=trace)
    best = min(trace(pair) for pair in itertools.combinations(counts, 2))
    assert trace(chosen) <= 1.1 * best
