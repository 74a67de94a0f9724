"""Quarter octaves, hazards and typical run times, against the same computed one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.policies.robust_order.gittins_index import AT_RISK_MIN, LOWEST, STEPS, counted, seconds_per_end
from cotenant.policies.robust_order.run_time_model import RunTimeModel
from cotenant.policies.robust_order.scale import ends_of, quarter_octaves, rounded_quarter_octaves

NOTHING = np.zeros(STEPS)
EDGES = [0.0, *(2.0 ** (step / 4) for step in range(LOWEST + 1, LOWEST + STEPS + 1))]


@given(st.floats(1e-3, 1e12))
def test_a_number_lies_in_its_quarter_octave(value: float) -> None:
    step = quarter_octaves(np.array([value]))
    begin, end = float(ends_of(step - 1)[0]), float(ends_of(step)[0])
    assert begin <= value < end
    assert end / begin <= 1.2
    assert abs(float(rounded_quarter_octaves(np.log(np.array([value])))[0]) - int(step[0])) <= 1


def slow_seconds_per_end(ended: list[float], censored: list[float]) -> list[float]:
    """Kaplan and Meier's hazard, and the best ratio of time taken to chance of ending, step by step."""
    hazard = []
    for step in range(STEPS):
        left = sum(ended[step:]) + sum(censored[step:]) - censored[step] / 2
        hazard.append(min(0.999, max(1e-6, ended[step] / max(left, 1e-9))))
    found = []
    for begin in range(STEPS):
        alive, taken, best = 1.0, 0.0, math.inf
        for step in range(begin, STEPS):
            taken += alive * (EDGES[step + 1] - EDGES[step]) * (1 - hazard[step] / 2)
            alive *= 1 - hazard[step]
            best = min(best, taken / (1 - alive))
        found.append(best)
    return found


@given(
    st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS),
    st.lists(st.integers(0, 3), min_size=STEPS, max_size=STEPS),
)
def test_the_index_is_that_of_the_definition_where_enough_jobs_are_left(ended: list[int], censored: list[int]) -> None:
    ended[-1] += math.ceil(AT_RISK_MIN)  # so that no step is thin
    censored[-1] = 0
    quick = seconds_per_end(np.array(ended, dtype=float), np.array(censored, dtype=float))
    np.testing.assert_allclose(quick, slow_seconds_per_end([*map(float, ended)], [*map(float, censored)]), rtol=1e-9)


def steps_of(run_times: np.ndarray) -> np.ndarray:
    return counted(quarter_octaves(run_times))


def test_a_falling_hazard_gives_least_attained_service() -> None:
    rng = np.random.default_rng(0)
    index = seconds_per_end(steps_of(np.exp(rng.normal(0, 3.0, 20_000))), NOTHING)
    middle = index[-LOWEST - 12 : -LOWEST + 16 : 2]  # from an eighth of the typical run time to 16 times that
    assert (np.diff(middle) > 0).all()


def test_a_constant_hazard_gives_first_in_first_out() -> None:
    rng = np.random.default_rng(0)
    index = seconds_per_end(steps_of(rng.exponential(1.0, 200_000)), NOTHING)
    middle = index[-LOWEST - 12 : -LOWEST + 8]
    assert middle.max() / middle.min() < 1.25


def test_a_narrow_distribution_gives_the_remaining_time() -> None:
    index = seconds_per_end(steps_of(np.full(1000, 1.05)), NOTHING)
    ages = np.array([0.125, 0.25, 0.5, 0.75])
    rest = index[quarter_octaves(ages) - LOWEST]
    assert rest == pytest.approx(1.09 - ages, abs=0.05)


def test_where_few_jobs_are_left_the_index_no_longer_changes() -> None:
    index = seconds_per_end(steps_of(np.exp(np.random.default_rng(1).normal(0, 1.0, 100))), NOTHING)
    assert index[-1] == pytest.approx(index[-12], rel=0.01)


def test_jobs_that_still_run_lower_the_hazard() -> None:
    ended = steps_of(np.full(100, 1.05))
    censored = counted(np.full(100, 8))  # as many are four times as old
    assert seconds_per_end(ended, censored)[-LOWEST] > 1.5 * seconds_per_end(ended, NOTHING)[-LOWEST]


def test_a_model_without_jobs_is_its_prior_and_few_jobs_move_it_little() -> None:
    model = RunTimeModel((math.log(7200.0), 0.0), window=100, worth=40)
    model.fit()
    assert model.coefficients.tolist() == pytest.approx([math.log(7200.0), 0.0])
    model.learn((1.0, 0.0), math.log(72.0))
    model.fit()
    assert model.coefficients[0] == pytest.approx(math.log(7200.0) - math.log(100) / 41, abs=1e-6)


def test_a_model_finds_what_predictions_are_worth() -> None:
    rng = np.random.default_rng(2)
    model = RunTimeModel((0.0, 0.0, 1.0), window=150, worth=40)
    for log_predicted in rng.normal(8.0, 2.0, 150):
        model.learn((1.0, 0.0, float(log_predicted)), 4.0 + 0.5 * float(log_predicted))
    model.fit()
    assert model.coefficients[2] == pytest.approx(0.5, abs=0.15)


def test_a_model_remembers_its_window_only() -> None:
    model = RunTimeModel((math.log(7200.0), 0.0), window=20, worth=1)
    for seconds in (10.0,) * 50 + (1000.0,) * 20:
        model.learn((1.0, 0.0), math.log(seconds))
    model.fit()
    assert len(model) == 20
    assert math.exp(float(model.typical(np.array([[1.0, 0.0]]))[0])) == pytest.approx(1100, rel=0.02)
