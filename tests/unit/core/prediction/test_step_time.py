from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.prediction.step_time import ERROR, fit_terms

ROWS = st.lists(st.tuples(st.just(1.0), st.floats(0, 8), st.floats(0, 8)), min_size=1, max_size=6)
SECONDS = st.floats(0.01, 100.0)


@given(ROWS, st.tuples(SECONDS, SECONDS, SECONDS))
def test_without_noise_every_measured_time_is_recovered(
    rows: list[tuple[float, ...]], truth: tuple[float, ...]
) -> None:
    seconds = [float(np.dot(row, truth)) for row in rows]
    terms = fit_terms(rows, seconds)
    assert [terms.seconds(row) for row in rows] == pytest.approx(seconds, rel=1e-6)
    assert all(value >= 0 for value in terms.values)


@given(ROWS, st.data())
def test_neither_order_nor_unit_matters(rows: list[tuple[float, ...]], data: st.DataObject) -> None:
    seconds = [data.draw(SECONDS) for _ in rows]
    order = data.draw(st.permutations(range(len(rows))))
    one = fit_terms(rows, seconds)
    other = fit_terms([rows[at] for at in order], [seconds[at] * 1024.0 for at in order])
    for row in ((1.0, 2.0, 3.0), (1.0, 0.0, 0.0)):
        assert other.seconds(row) == pytest.approx(one.seconds(row) * 1024.0, rel=1e-6, abs=1e-6)
    assert other.misfit == pytest.approx(one.misfit, rel=1e-5, abs=1e-5)


@settings(max_examples=examples(25), deadline=None)
@given(ROWS, st.data())
def test_no_point_of_a_fine_grid_fits_better(rows: list[tuple[float, ...]], data: st.DataObject) -> None:
    seconds = [data.draw(st.floats(0.5, 2.0)) for _ in rows]
    terms = fit_terms(rows, seconds)

    def misfit(values: tuple[float, ...]) -> float:
        return sum((float(np.dot(row, values)) / one - 1) ** 2 for row, one in zip(rows, seconds, strict=True))

    grid = itertools.product(np.linspace(0, 2, 11), np.linspace(0, 1, 11), np.linspace(0, 1, 11))
    assert terms.misfit * ERROR**2 <= min(misfit(values) for values in grid) + 1e-9


def test_what_was_never_measured_is_unsure_and_what_was_is_not() -> None:
    terms = fit_terms([(1, 0, 0), (1, 1, 0)], [1.0, 1.2])
    assert terms.spread((1, 1, 0)) < 0.1
    assert terms.spread((1, 1, 1)) > 0.5


def test_times_that_the_form_cannot_have_make_all_less_sure() -> None:
    rows = [(1, 0), (1, 1), (1, 2), (1, 3)]
    rising, falling = fit_terms(rows, [1.0, 1.1, 1.2, 1.3]), fit_terms(rows, [4.0, 1.0, 4.0, 1.0])
    assert falling.spread((1, 1)) > 3 * rising.spread((1, 1))


def test_times_that_vary_count_for_less_and_make_less_sure() -> None:
    rows, seconds = [(1, 0), (1, 0), (1, 1)], [1.0, 2.0, 3.0]
    terms = fit_terms(rows, seconds, [0.0, 2.0, 0.0])
    assert terms.seconds((1, 0)) == pytest.approx(1.0, rel=0.02)
    steady, varied = fit_terms(rows[1:], seconds[1:]), fit_terms(rows[1:], seconds[1:], [0.3, 0.3])
    assert varied.spread((1, 1)) > 2 * steady.spread((1, 1))


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [math.nan], [1.0, math.inf]])
def test_a_time_that_cannot_be_is_refused(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        fit_terms([(1.0,)] * len(seconds), seconds)


def test_a_job_of_which_nothing_takes_time_has_no_rate() -> None:
    terms = fit_terms([(0.0, 1.0)], [1.0])
    assert terms.seconds((1.0, 0.0)) == 0
    assert terms.spread((1.0, 0.0)) == math.inf


def test_times_that_are_many_powers_of_ten_apart_have_terms_too() -> None:
    rows = [(1.0, 0.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 1.5)]
    terms = fit_terms(rows, [1e-9, 1e9, 1.0])
    assert all(terms.spread(row) >= 0 for row in rows)
