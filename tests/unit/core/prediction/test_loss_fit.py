from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.loss_curves import BROKEN, STEPS, Told, broken, following, hyperbola
from tests.support.properties import some

from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.prediction.loss_fit import (
    BREAKS_MAX,
    JUMP_ERRORS,
    JUMP_SHARE,
    JUMP_TRENDS,
    MAD_TO_SIGMA,
    POINTS_MIN,
    ROUNDING,
    WINDOW,
    Curve,
    Fit,
    Forecast,
    _drifts,
    _last_jump,
    _open,
    _rival,
    fit,
    forecast,
)
from cotenant.core.prediction.loss_points import LossPoints

curves = st.builds(
    Curve,
    amplitude=st.floats(1e-3, 1e3),
    scale=st.floats(1.0, 1e7),
    floor=st.floats(-10, 10),
    origin=st.floats(0, 1e6),
    exponent=st.sampled_from([0.5, 1.0, 32.0]),
)


def foretold(told: Told, goal: LossGoal | None = None) -> Forecast:
    return forecast(told.points.cells, goal or LossGoal(target=told.goal))


@given(curves, st.floats(0, 1e7))
def test_the_step_of_a_loss_is_the_step_that_has_it(curve: Curve, further: float) -> None:
    step = curve.origin + further
    loss = curve.loss(step)
    assume(loss - curve.floor > 1e-6 * max(1.0, abs(curve.floor)))
    assert curve.step_of(loss) - curve.origin == pytest.approx(further, rel=1e-3, abs=1e-3 * curve.scale)


@given(curves)
def test_the_betas_are_those_of_the_paper(curve: Curve) -> None:
    curve = replace(curve, exponent=1.0)
    beta_0, beta_1, beta_2 = curve.betas
    for step in (curve.origin, curve.origin + curve.scale, curve.origin + 5 * curve.scale):
        assert 1 / (beta_0 * step + beta_1) + beta_2 == pytest.approx(curve.loss(step), rel=1e-6, abs=1e-6)


@given(curves)
def test_a_loss_at_or_below_the_floor_is_never_reached(curve: Curve) -> None:
    assert curve.step_of(curve.floor) == curve.step_of(curve.floor - 1) == math.inf


@given(curves, st.integers(1, 10_000), st.floats(1e-4, 0.5))
def test_a_fall_rule_is_met_where_the_fall_is_just_that_small(curve: Curve, steps: int, share: float) -> None:
    fall_min = share * curve.amplitude
    at = curve.done_at(LossGoal(fall_steps=steps, fall_min=fall_min))
    assert curve.loss(at) - curve.loss(at + steps) <= fall_min * (1 + 1e-6)
    if at > curve.origin:
        before = curve.origin + 0.99 * (at - curve.origin)
        assert curve.loss(before) - curve.loss(before + steps) >= fall_min * (1 - 1e-6)


def test_whichever_rule_is_met_first_ends_the_training() -> None:
    curve = Curve(2.0, 100.0, 0.5)
    loss, fall = curve.done_at(LossGoal(target=0.6)), curve.done_at(LossGoal(fall_steps=10, fall_min=0.01))
    assert curve.done_at(LossGoal(0.6, 10, 0.01)) == min(loss, fall)


def squares_on_a_grid(steps: np.ndarray, losses: np.ndarray) -> tuple[float, float]:
    """The slow twin: every scale of a fine grid, by numpy's own least squares."""
    found = []
    for scale in np.geomspace(0.005, 20, 2000) * (steps[-1] - steps[0]):
        columns = np.stack([1 / (1 + (steps - steps[0]) / scale), np.ones(len(steps))], axis=1)
        solution = np.linalg.lstsq(columns, losses, rcond=None)[0]
        found.append((float(((columns @ solution - losses) ** 2).sum()), float(scale)))
    return min(found)


@pytest.mark.parametrize("seed", range(8))
def test_a_fit_is_as_good_as_a_search_of_the_whole_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.linspace(1, 4000, 150)
    losses = hyperbola(steps, rng.uniform(0.02, 0.4)) + 0.02 * rng.normal(size=150)
    ones = np.ones(150)
    found = fit((steps, losses, ones), weights=ones)
    assert found is not None
    squares, scale = squares_on_a_grid(steps, losses)
    assert found.squares <= squares * (1 + 1e-4)
    assert found.curve.scale == pytest.approx(scale, rel=0.02)


def test_spikes_do_not_bend_a_fit() -> None:
    steps = np.linspace(1, 4000, 120)
    clean = hyperbola(steps, 0.1)
    spiked = clean.copy()
    spiked[::10] += 4.0
    found = fit((steps, spiked, np.ones(120)))
    assert found is not None
    assert found.curve.step_of(float(hyperbola(STEPS, 0.1))) == pytest.approx(STEPS, rel=1e-3)
    assert found.weights[::10].max() == 0


@given(st.floats(0.02, 0.4), st.floats(0.1, 100), st.floats(-5, 5))
def test_a_curve_without_noise_is_predicted_to_the_step_in_any_unit(scale: float, unit: float, floor: float) -> None:
    points = LossPoints()
    for step in range(1, 4001, 20):
        points.add(step, unit * float(hyperbola(step, scale, floor)))
    goal = LossGoal(target=unit * float(hyperbola(STEPS, scale, floor)))
    told = forecast(points.cells, goal)
    assert told.step == pytest.approx(STEPS, rel=0.02)
    assert told.confidence > 0.8, told.why


@pytest.mark.parametrize("cut", [False, True], ids=["one learning rate", "a cut of it"])
@pytest.mark.parametrize("scale", [0.05, 0.1])
def test_two_fifths_of_a_curve_tell_its_end_within_a_tenth(scale: float, cut: bool) -> None:
    noise = 0.002 if cut else 0.01
    told = [foretold(following(np.random.default_rng(seed), scale, noise, cut)) for seed in range(20)]
    sure = [abs(one.step / STEPS - 1) for one in told if one.confidence >= 0.5]
    assert len(sure) >= 15
    assert sorted(sure)[int(0.9 * len(sure))] <= 0.1


@pytest.mark.parametrize("kind", some(list(BROKEN), 5))
def test_a_curve_of_no_such_form_is_not_trusted(kind: str) -> None:
    false = 0
    for seed in range(20):
        told = broken(np.random.default_rng(seed), kind)
        points = told.points
        false += not points.wild and forecast(points.cells, LossGoal(target=told.goal)).confidence >= 0.5
    assert false <= 1


@pytest.mark.deep
def test_a_fit_that_breaks_is_unsure_and_sure_again_once_the_new_curve_is_known() -> None:
    """The learning rate is cut at step 1,500: a loss of 0.4 was out of reach, and then is not."""
    points, sure = LossPoints(), {}
    for step in range(1, 6001, 10):
        after = 0.2 + 0.35 / (1 + max(step - 1500, 0) / 500)
        points.add(step, float(hyperbola(step, 0.05)) if step < 1500 else after)
        sure[step] = forecast(points.cells, LossGoal(target=0.25))
    assert "level off" in sure[1401].why
    assert sure[1551].confidence < 0.5
    assert sure[4001].confidence >= 0.5
    assert sure[4001].step == pytest.approx(1500 + 500 * (0.35 / 0.05 - 1), rel=0.05)


def test_a_loss_that_jumps_again_and_again_follows_no_curve() -> None:
    points = LossPoints()
    for step in range(1, 1200):
        points.add(step, 5.0 - step // 200 + 1e-3 * math.sin(step * 7.1))
    assert forecast(points.cells, LossGoal(target=-2.0)).confidence == 0


@pytest.mark.parametrize("count", [0, 1, 2, POINTS_MIN - 1])
def test_few_points_tell_nothing(count: int) -> None:
    told = forecast([(float(step), 1 / (step + 1), 1) for step in range(count)], LossGoal(target=0.01))
    assert (told.confidence, told.step) == (0.0, math.inf)
    assert told.why == f"{count} points are too few for a curve"


def test_a_loss_that_does_not_fall_is_reported() -> None:
    for losses in ([1.0] * 50, [float(step) for step in range(50)]):
        cells = [(float(step), loss, 1) for step, loss in enumerate(losses)]
        assert forecast(cells, LossGoal(target=0.5)).why == "the loss does not fall"


def test_an_unreachable_goal_is_reported_with_the_final_loss() -> None:
    told = foretold(following(np.random.default_rng(1), 0.1, 0.0), LossGoal(target=0.3))
    assert told.confidence == 0
    assert told.why.startswith("the loss seems to level off at 0.5")


def test_a_goal_that_is_long_past_is_no_forecast() -> None:
    told = foretold(following(np.random.default_rng(1), 0.1, 0.0), LossGoal(target=1.5))
    assert told.confidence == 0
    assert "its goal was reached at step 1000" in told.why


@given(
    st.lists(st.tuples(st.integers(0, 10**15), st.floats(-1e9, 1e9)), max_size=150),
    st.none() | st.floats(-1e9, 1e9),
    st.integers(1, 10**15),
    st.floats(1e-9, 1e9),
)
def test_a_forecast_makes_sense_whatever_the_points(
    told: list[tuple[int, float]], target: float | None, fall_steps: int, fall_min: float
) -> None:
    points = LossPoints()
    for step, loss in sorted(told):
        points.add(step, loss)
    found = forecast(points.cells, LossGoal(target, fall_steps, fall_min))
    assert 0 <= found.confidence <= 1
    assert found.confidence == 0 or (math.isfinite(found.step) and found.error >= 0)
    assert bool(found.why) <= (found.confidence == 0)
    assert forecast(points.cells, LossGoal(target, fall_steps, fall_min)) == found


def jumps_in_errors(residuals: list[float], losses: list[float], counts: list[int]) -> dict[int, float]:
    """The slow twin: how many errors apart six points before and after each place are, if more than their trends."""
    wide = max(losses) - min(losses)
    z = [off * math.sqrt(count) for off, count in zip(residuals, counts, strict=True)]
    noise = median(abs(b - a) for a, b in itertools.pairwise(z)) * MAD_TO_SIGMA / math.sqrt(2)
    found = {0: JUMP_ERRORS}
    for at in range(WINDOW, len(z) - WINDOW + 1) if len(z) > 2 * WINDOW else ():
        sides = slice(at - WINDOW, at), slice(at, at + WINDOW)
        before, after = (median(residuals[side]) for side in sides)
        halves = [(residuals[side][: WINDOW // 2], residuals[side][WINDOW // 2 :]) for side in sides]
        trend = max(abs(median(late) - median(early)) for early, late in halves)
        error = math.hypot(*(1.2533 * noise / math.sqrt(sum(counts[side])) for side in sides))
        if abs(after - before) >= max(JUMP_TRENDS * trend, JUMP_SHARE * wide):
            found[at] = abs(after - before) / max(error, ROUNDING * wide)
    return found


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, -1, 2]), st.sampled_from([1, 1, 4, 9])), min_size=12, max_size=20),
    st.lists(st.tuples(st.integers(5, 14), st.sampled_from([-12, 3, 4, 6, 24, 24])), min_size=1, max_size=3),
    st.sampled_from([100.0, 300.0, 400.0, 600.0]),
)
def test_a_curve_breaks_where_the_losses_before_and_after_are_farthest_apart(
    points: list[tuple[int, int]], jumps: list[tuple[int, int]], wide: float
) -> None:
    counts, losses = [count for _, count in points], np.linspace(wide, 0, len(points))
    residuals = [float(off + sum(by for at, by in jumps if place >= at)) for place, (off, _) in enumerate(points)]
    arrays = np.arange(len(points), dtype=np.float64), losses, np.array(counts, dtype=np.float64)
    found = _last_jump(Fit(Curve(1.0, 1.0, 0.0), arrays, np.ones(len(points)), np.array(residuals)))
    errors = jumps_in_errors(residuals, losses.tolist(), counts)
    assert errors.get(found) == pytest.approx(max(errors.values()))


def independent_points(found: Fit) -> float:
    """The slow twin: fewer than there are by how alike the residuals of neighbors are."""
    z = [float(off * math.sqrt(weight)) for off, weight in zip(found.residuals, found.weights, strict=True)]
    alike = min(max(sum(a * b for a, b in itertools.pairwise(z)) / sum(one * one for one in z), 0.0), 0.95)
    return max(int((found.weights > 0).sum()) * (1 - alike) / (1 + alike), 1.0)


def errors_by_hand(found: Fit, goal: LossGoal) -> list[float]:
    """What is uncertain about a forecast: the residuals, its drift while points came in, and two rival forms."""
    curve, at = found.curve, found.curve.done_at(goal)
    steps, losses, counts = found.points

    def moved(amplitude: float = 0.0, floor: float = 0.0, log_scale: float = 0.0) -> Curve:
        scale = curve.scale * math.exp(log_scale)
        return replace(curve, amplitude=curve.amplitude + amplitude, floor=curve.floor + floor, scale=scale)

    def slopes(of: Callable[[Curve], float]) -> list[float]:
        tiny = 1e-6
        ways = ((tiny, 0, 0), (0, tiny, 0), (0, 0, tiny))
        return [(of(moved(*way)) - of(moved(*(-one for one in way)))) / (2 * tiny) for way in ways]

    jacobian = np.array([slopes(lambda moved, step=step: moved.loss(step)) for step in steps])  # type: ignore[misc]  # a default
    used, gradient = int((found.weights > 0).sum()), np.array(slopes(lambda moved: moved.done_at(goal)))
    covariance = np.linalg.inv(jacobian.T @ np.diag(found.weights) @ jacobian)
    covariance *= sum(found.weights * found.residuals**2) / (used - 3) * used / independent_points(found)
    errors = [math.sqrt(gradient @ covariance @ gradient) / (at - curve.origin)]

    def apart(other: Fit | None) -> float:
        assert other is not None
        return abs(math.log((other.curve.done_at(goal) - curve.origin) / (at - curve.origin)))

    for part in (0.7, 0.85):
        size = math.ceil(part * len(steps))
        early = fit((steps[:size], losses[:size], counts[:size]), weights=found.weights[:size])
        errors.append(0.7 * apart(early))
    for exponent in (0.5, 32.0):
        rival = fit(found.points, exponent, found.weights)
        assert rival is not None
        better = independent_points(found) / 2 * math.log(found.squares / rival.squares)
        likely = 1 / (1 + math.exp(-better))
        errors.append(likely * apart(rival) if likely > 0.01 else 0.0)
    return errors


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("goal", [LossGoal(target=0.75), LossGoal(fall_steps=100, fall_min=0.006)])
def test_the_confidence_in_a_forecast_follows_from_all_that_is_uncertain_about_it(seed: int, goal: LossGoal) -> None:
    rng = np.random.default_rng(seed)
    steps, counts = np.linspace(1, 1600, 80), rng.integers(1, 4, size=80).astype(np.float64)
    losses = hyperbola(steps, 0.05) + 0.01 * rng.normal(size=80) / np.sqrt(counts)
    found = fit((steps, losses, counts))
    assert found is not None
    errors, at = errors_by_hand(found, goal), found.curve.done_at(goal)
    rivals = [_rival(found, goal, at, exponent) for exponent in (0.5, 32.0)]
    assert [_open(found, goal, at), *_drifts(found, goal, at), *rivals] == pytest.approx(errors, rel=0.01)
    told = forecast(list(zip(steps, losses, counts, strict=True)), goal)
    assert not told.why
    assert told.step == pytest.approx(at)
    assert told.error == pytest.approx(math.hypot(*errors), rel=0.01)
    seen = min(1.0, (steps[-1] - steps[0]) / (0.2 * (at - steps[0])))
    assert told.confidence == pytest.approx(seen / (1 + (told.error / 0.075) ** 2))


@pytest.mark.parametrize("drop", [2.0, -2.0])
def test_a_goal_that_the_floor_may_lie_above_leaves_the_step_open(drop: float) -> None:
    steps = np.linspace(1, 1600, 80)
    losses = hyperbola(steps, 0.05) + 0.01 * drop * np.cos(steps)
    found = fit((steps, losses, np.ones(80)))
    assert found is not None
    goal = LossGoal(target=found.curve.floor + 1e-9)
    assert math.isfinite(at := found.curve.done_at(goal))
    assert _open(found, goal, at) == math.inf


@pytest.mark.parametrize(("errors", "breaks"), [(5.5, False), (6.5, True), (11.0, True)])
def test_a_jump_counts_from_six_standard_errors_on(errors: float, breaks: bool) -> None:
    count, at = 24, 12
    residuals = np.where(np.arange(count) % 2, 1.0, -1.0)
    sigma = 2 * MAD_TO_SIGMA / math.sqrt(2)  # of one point; a difference of two points has √2 times as much
    of_a_median = math.sqrt(math.pi / 2) * sigma / math.sqrt(WINDOW)
    residuals[at:] += errors * of_a_median * math.sqrt(2)
    arrays = np.arange(count, dtype=np.float64), np.linspace(100.0, 0.0, count), np.ones(count)
    assert _last_jump(Fit(Curve(1.0, 1.0, 0.0), arrays, np.ones(count), residuals)) == (at if breaks else 0)


@pytest.mark.parametrize("jumps", range(BREAKS_MAX + 1))
def test_a_loss_may_jump_twice_and_still_follow_a_curve(jumps: int) -> None:
    points = LossPoints()
    for step in range(1, 2001):
        ahead = sum(8.0 / 2**number for number in range(jumps) if step < 300 * (number + 1))
        points.add(step, float(hyperbola(step, 0.05)) + ahead + 1e-4 * math.sin(step * 7.1))
    found = forecast(points.cells, LossGoal(target=float(hyperbola(4000, 0.05))))
    assert found.why == ""
    assert found.step == pytest.approx(4000, rel=0.05)
