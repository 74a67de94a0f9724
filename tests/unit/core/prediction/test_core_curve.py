"""Invariants of a curve for any points, compared with a slow search over all its figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.prediction.core_curve import Beliefs, Curve, Point, Windows, confidence_of, errors_of, fit, ladder
from cotenant.core.prediction.curve_priors import TINY, shapes_of

EXACT = Beliefs(noise=1e-7, form=1e-7)

COUNTS = st.integers(1, 48)
RATES = st.floats(0.01, 1e4)
POINTS = st.lists(st.builds(Point, COUNTS, RATES, st.integers(1, 9)), min_size=1, max_size=6)


FALLING = [Point(1, 10.0), Point(2, 19.0), Point(3, 40.0), Point(4, 30.0), Point(24, 200.0)]


@given(POINTS)
@example(FALLING)
def test_a_curve_never_falls_and_never_exceeds_its_plateau(points: list[Point]) -> None:
    curve = fit(points)
    rates = [curve.rate(cores) for cores in range(1, 60)]
    _, _, plateau = curve.parameters
    assert all(later >= sooner * (1 - 1e-9) for sooner, later in itertools.pairwise(rates))
    assert rates[0] >= 0
    assert max(rates) <= plateau
    assert rates[-1] == plateau


@given(POINTS)
def test_figures_are_sane(points: list[Point]) -> None:
    curve = fit(points)
    low, high = curve.interval
    assert 1 <= low <= curve.cores_useful <= high <= curve.points[-1].cores
    assert 0 <= curve.theta_confidence <= 1
    assert all(0 <= curve.confidence(cores) <= 1 for cores in range(1, 60, 7))
    assert math.isclose(curve.useful_weights.sum(), 1.0)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(points: list[Point], random: object) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' own Random
    assert told(fit(shuffled)) == told(fit(points))


@given(POINTS, st.integers(-8, 8))
def test_another_unit_of_the_rate_changes_nothing_else(points: list[Point], power: int) -> None:
    scale = 2.0**power  # exact in binary
    scaled = [Point(point.cores, point.rate * scale, point.windows) for point in points]
    one, other = fit(points), fit(scaled)
    assert (one.cores_useful, one.interval, one.theta) == (other.cores_useful, other.interval, other.theta)
    assert other.rate(5) == pytest.approx(one.rate(5) * scale, rel=1e-8)
    assert other.spread(5) == pytest.approx(one.spread(5), rel=1e-6)


def told(curve: Curve) -> tuple[object, ...]:
    """All figures of a curve."""
    rates = [(curve.rate(cores), curve.spread(cores)) for cores in (1, 2, 5, 13, 48)]
    return curve.parameters, curve.theta, curve.cores_useful, curve.interval, curve.theta_confidence, rates


@settings(max_examples=examples(60))
@given(st.integers(2, 20), st.floats(0.05, 1), st.floats(0.1, 1e3))
def test_without_noise_a_curve_is_recovered_exactly(theta: int, linear: float, plateau: float) -> None:
    rates = [plateau * (linear * low(cores, theta) + (1 - linear) * high(cores, theta)) for cores in range(1, 25)]
    points = [Point(cores, rate) for cores, rate in enumerate(rates, 1)]
    curve = fit(points, beliefs=EXACT)
    assert curve.theta == theta
    assert [curve.rate(cores) for cores in range(1, 25)] == pytest.approx(rates, rel=1e-5, abs=1e-5 * plateau)


def low(cores: int, theta: int) -> float:
    return min(1.0, cores / theta)


def high(cores: int, theta: int) -> float:
    return min(1.0, math.log(cores) / math.log(theta))


@pytest.mark.parametrize("theta", [1, 3, 6, 11, 24])
def test_noise_moves_the_useful_cores_by_little(theta: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        counts = (1, 2, 5, 8, 12, 24)
        points = [Point(cores, low(cores, theta) * (1 + 0.02 * rng.standard_normal())) for cores in counts]
        curve = fit(points)
        assert theta / 1.5 <= curve.cores_useful <= theta * 1.5


def test_more_windows_make_surer_and_a_wide_spread_less_sure() -> None:
    one, many = (
        fit([Point(4, 1.0, 1)], beliefs=Beliefs(form=0.001)),
        fit([Point(4, 1.0, 9)], beliefs=Beliefs(form=0.001)),
    )
    assert many.spread(4) < one.spread(4)
    assert fit([Point(4, 1.0, 9, spread=0.5)]).confidence(4) < 0.8 < one.confidence(4)


def test_where_nothing_was_measured_a_rate_is_less_sure() -> None:
    curve = fit([Point(1, 10.0), Point(24, 100.0)])
    assert curve.confidence(9) < curve.confidence(1)
    assert curve.confidence(9) < curve.confidence(24)


def test_a_flat_curve_needs_one_core_and_levels_off() -> None:
    curve = fit([Point(1, 99.0), Point(24, 101.0)])
    assert (curve.cores_useful, curve.interval, curve.levels_off) == (1, (1, 1), True)
    assert curve.rate(7) == pytest.approx(100, rel=0.02)


def test_a_rate_that_still_rises_at_the_last_point_has_not_levelled_off() -> None:
    curve = fit([Point(cores, 10.0 * cores) for cores in (1, 2, 4, 8)])
    assert curve.cores_useful == 8
    assert not curve.levels_off


def test_points_at_one_core_count_are_one_mean() -> None:
    apart = fit([Point(4, 9.0), Point(4, 11.0), Point(8, 12.0)])
    assert [(point.cores, point.rate, point.windows) for point in apart.points] == [(4, 10.0, 2), (8, 12.0, 1)]
    assert apart.points[0].spread == pytest.approx(0.1)


@pytest.mark.parametrize(
    "point",
    [
        Point(0, 1.0),
        Point(1, 0.0),
        Point(1, -1.0),
        Point(1, math.nan),
        Point(1, math.inf),
        Point(1, 1.0, windows=0),
        Point(1, 1.0, spread=math.nan),
    ],
)
def test_a_point_that_cannot_be_is_refused(point: Point) -> None:
    with pytest.raises(ValueError, match="a point needs"):
        fit([Point(2, 1.0), point])


def test_no_point_makes_no_curve() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        fit([])


@pytest.mark.parametrize(("cores", "rate"), [(0, 1.0), (1, 0.0), (1, math.nan), (1, math.inf), (1, -2.0)])
def test_an_invalid_window_is_rejected_entirely(cores: int, rate: float) -> None:
    windows = Windows({2: [5.0]})
    with pytest.raises(ValueError, match="must be positive and finite"):
        windows.add(cores, rate)
    assert windows.points() == [Point(2, 5.0)]


@given(st.integers(1, 4096))
def test_the_ladder_climbs_from_one_to_the_top_by_a_quarter_at_most(cores_max: int) -> None:
    rungs = ladder(cores_max)
    assert (rungs[0], rungs[-1]) == (1, cores_max)
    assert all(0 < later - sooner <= max(1, sooner / 4) for sooner, later in itertools.pairwise(rungs))


def test_confidence_is_the_chance_of_being_within_fifteen_percent() -> None:
    rng = np.random.default_rng(1)
    for spread in (0.02, 0.1, 0.3, 1.0):
        drawn = np.abs(rng.standard_normal(200_000) * spread) < 0.15
        assert confidence_of(spread) == pytest.approx(drawn.mean(), abs=0.005)
    assert confidence_of(0.0) == 1.0


def misfit(points: Sequence[Point], beliefs: Beliefs, theta: int, shares: Sequence[float], scale: float) -> float:
    """What the fit minimises for one θ, written out: squared relative errors, and what is held implausible."""
    log, rest, jump = shares
    total = 0.0
    for point, error in zip(points, errors_of(points, beliefs), strict=True):
        rate = log + rest + jump
        if point.cores < theta:
            rate = log * math.log(point.cores) / math.log(theta)
            rate += rest * (point.cores - math.log(point.cores)) / (theta - math.log(theta))
        total += ((rate / (point.rate / scale) - 1) / error) ** 2
    bend = log * theta / math.log(theta) - rest * theta / (theta - math.log(theta))
    return total + (bend / beliefs.bend) ** 2 + (jump / beliefs.jump) ** 2


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.2, 1.0)), min_size=2, max_size=5, unique_by=lambda one: one[0])
)
def test_no_curve_of_a_fine_grid_fits_better(figures: list[tuple[int, float]]) -> None:
    curve = fit([Point(cores, rate) for cores, rate in figures])
    steps = np.linspace(0, 1.3, 27)
    for at, theta in enumerate(curve.thetas):
        if theta == 1:
            continue
        found = misfit(curve.points, curve.beliefs, int(theta), curve.shares[at].tolist(), curve.scale)
        grid = itertools.product(steps, steps, (0.0, 0.1, 0.3))
        best = min(misfit(curve.points, curve.beliefs, int(theta), shares, curve.scale) for shares in grid)
        assert found <= best + 1e-9


def log_odds(curve: Curve, at: int) -> float:
    """The logarithm of a θ's odds: how well it explains the points, Occam's factor, and its prior."""
    theta, beliefs, shares = int(curve.thetas[at]), curve.beliefs, curve.shares[at]
    after = [*curve.thetas[1:].tolist(), int(curve.thetas[-1]) + 1]
    ratios = [math.log(above / below) for below, above in zip(curve.thetas.tolist(), after, strict=True)]
    if theta == 1:
        errors = [
            error * point.rate / curve.scale
            for error, point in zip(errors_of(curve.points, curve.beliefs), curve.points, strict=True)
        ]
        found = sum(
            ((shares.sum() - point.rate / curve.scale) / error) ** 2
            for error, point in zip(errors, curve.points, strict=True)
        )
        return float(-0.5 * found - 0.5 * math.log(sum(error**-2 for error in errors)) + math.log(beliefs.flat))
    ways = np.eye(3)

    def off(*steps: np.ndarray) -> float:
        return misfit(curve.points, beliefs, theta, (shares + sum(steps, np.zeros(3))).tolist(), curve.scale)

    hessian = [[off(one, other) - off(one) - off(other) + off() for other in ways] for one in ways]
    occam = -0.5 * float(np.linalg.slogdet(np.array(hessian) / 2)[1])
    unit = theta / math.log(theta) + theta / (theta - math.log(theta))
    prior = (1 - beliefs.flat) * ratios[at] / sum(ratios[1:])
    return -0.5 * off() + occam + math.log(unit / beliefs.bend / beliefs.jump) + math.log(prior)


@settings(max_examples=examples(20))
@given(st.lists(st.builds(Point, st.integers(1, 90), st.floats(1.0, 50.0)), min_size=2, max_size=4))
def test_a_theta_is_as_likely_as_it_explains_the_points(points: list[Point]) -> None:
    curve = fit([Point(1, 1.0), *points])
    odds = np.array([log_odds(curve, at) for at in range(len(curve.thetas))])
    likely = np.exp(odds - odds.max())
    assert curve.weights == pytest.approx(likely / likely.sum(), rel=1e-3, abs=1e-6)


def rates_by_hand(curve: Curve) -> list[float]:
    """Rates on 1, 2, … cores, one after the other: the form, times what is measured beside it at nearby counts."""
    log, linear, plateau = curve.parameters
    corrections = {}
    for point in curve.points:
        if point.cores < curve.theta:
            noise = max(curve.beliefs.noise, point.spread) / math.sqrt(point.windows)
            form = max(log * math.log(point.cores) + linear * point.cores, TINY * plateau)
            real = curve.beliefs.form**2 / (noise**2 + curve.beliefs.form**2)
            corrections[point.cores] = real * (point.rate / form - 1)
    corrections = {1: corrections[min(corrections)] if corrections else 0.0} | corrections | {curve.theta: 0.0}
    rates = [0.0]
    for cores in range(1, curve.theta):
        low, high = max(c for c in corrections if c <= cores), min(c for c in corrections if c > cores)
        way = math.log(cores / low) / math.log(high / low)
        correction = corrections[low] * (1 - way) + corrections[high] * way
        drawn = max(log * math.log(cores) + linear * cores, TINY * plateau) * (1 + correction)
        rates.append(min(max(rates[-1], drawn), plateau))
    return [*rates[1:], plateau]


def spread_by_hand(curve: Curve, cores: int) -> float:
    """Of all θ: how far each one's rate is from the expected one, and how uncertain it is itself."""
    expected, squares = curve.rate(cores) / curve.scale, 0.0
    for at, theta in enumerate(curve.thetas):
        shapes = shapes_of(np.array([cores]), np.array([theta]))[0, 0]
        own = sum(
            a * b * curve.covariances[at][i, j] for (i, a), (j, b) in itertools.product(enumerate(shapes), repeat=2)
        )
        squares += curve.weights[at] * ((float(shapes @ curve.shares[at]) - expected) ** 2 + own)
    return math.sqrt(squares / expected**2 + curve.beliefs.form**2) if expected else math.inf


@settings(max_examples=examples(40))
@given(st.lists(st.builds(Point, COUNTS, st.floats(1.0, 50.0), st.integers(1, 9)), min_size=1, max_size=5))
def test_rates_their_spread_and_the_useful_cores_are_those_computed_one_by_one(points: list[Point]) -> None:
    curve = fit(points)
    assert [curve.rate(cores) for cores in range(1, curve.theta + 1)] == pytest.approx(rates_by_hand(curve), rel=1e-6)
    for cores in {1, curve.theta // 2 + 1, curve.theta, curve.theta + 1}:
        assert curve.spread(cores) == pytest.approx(spread_by_hand(curve, cores), rel=1e-6)
    thetas, chances = curve.thetas.tolist(), dict.fromkeys(curve.thetas.tolist(), 0.0)
    for theta, weight in zip(thetas, curve.weights, strict=True):
        measured = min((point.cores for point in curve.points if point.cores >= theta), default=math.inf)
        knee = [other for other in thetas if theta <= other <= min(theta * curve.beliefs.knee, measured)]
        for other in knee if theta > 1 else [1]:
            chances[other] += weight / (len(knee) if theta > 1 else 1)
    assert curve.useful_weights == pytest.approx(list(chances.values()))
    sums = list(itertools.accumulate(chances.values()))
    for share, found in ((0.5, curve.cores_useful), (0.05, curve.interval[0]), (0.95, curve.interval[1])):
        assert found == next(theta for theta, below in zip(thetas, sums, strict=True) if round(below, 9) >= share)
    rungs = ladder(thetas[-1])
    at = next(at for at, rung in enumerate(rungs) if rung >= curve.cores_useful)
    near = [weight for theta, weight in chances.items() if rungs[max(at - 1, 0)] <= theta <= [*rungs, math.inf][at + 1]]
    assert curve.theta_confidence == pytest.approx(min(1.0, sum(near)))
    assert curve.levels_off == (curve.interval[1] < max(point.cores for point in points))


@pytest.mark.filterwarnings("error")
def test_rates_that_are_many_powers_of_ten_apart_have_a_curve_too() -> None:
    windows = Windows({2: [4.0, 4.0, 2.0, 2.0], 4: [547758070.0, 3.0, 3.0]})
    curve = fit(windows.points(), cores_max=64)
    for cores in range(1, 65):
        assert curve.rate(cores) >= 0
        assert curve.spread(cores) >= 0
