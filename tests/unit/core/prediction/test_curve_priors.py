"""Where θ is searched, which shapes a curve has, and how likely each is: the formulas, count by count."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.curve_priors import EVERY_COUNT_UP_TO, TINY, Hypotheses, hypotheses

BEND, JUMP, FLAT = 1.5, 0.15, 0.1

counts = st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True).map(tuple)
tops = st.sampled_from([1, 2, 5, 63, 64, 65, 66, 67, 96, 128, 200, 512])


def made(counts: tuple[int, ...], top: int) -> Hypotheses:
    return hypotheses(counts, top, BEND, JUMP, FLAT)


@given(counts, tops)
def test_each_count_up_to_64_is_searched_then_steps_of_a_thirty_second_and_what_was_measured(
    counts: tuple[int, ...], top: int
) -> None:
    found = made(counts, top).thetas.tolist()
    assert {*range(1, min(top, EVERY_COUNT_UP_TO) + 1), top, *counts} <= set(found)
    assert found == sorted(set(found))
    steps = [EVERY_COUNT_UP_TO]
    while steps[-1] + steps[-1] // 32 < top:
        steps.append(steps[-1] + steps[-1] // 32)
    expected = {*steps} if top > EVERY_COUNT_UP_TO else set()
    assert set(found) == {*range(1, min(top, EVERY_COUNT_UP_TO) + 1), top, *counts, *expected}


@given(counts, tops)
def test_below_theta_a_curve_is_made_of_a_logarithm_and_the_rest_and_above_it_is_flat(
    counts: tuple[int, ...], top: int
) -> None:
    found = made(counts, top)
    for row, theta in zip(found.shapes, found.thetas.tolist(), strict=True):
        for shapes, cores in zip(row, counts, strict=True):
            if cores >= theta:
                assert shapes.tolist() == [1.0, 1.0, 1.0]
                continue
            log, rest = math.log(cores) / math.log(theta), (cores - math.log(cores)) / (theta - math.log(theta))
            assert shapes == pytest.approx([log, rest, 0.0])


@given(counts, tops)
def test_priors_hold_the_bend_and_the_jump_and_of_a_flat_curve_only_the_plateau_is_open(
    counts: tuple[int, ...], top: int
) -> None:
    found = made(counts, top)
    for theta, normal, volume in zip(found.thetas.tolist(), found.normal, found.volume.tolist(), strict=True):
        if theta == 1:
            assert normal == pytest.approx(np.diag([1 / TINY, 0.0, 1 / TINY]))
            assert volume == pytest.approx(math.log(1 / TINY))
            continue
        slopes = np.array([theta / math.log(theta), -theta / (theta - math.log(theta)), 0.0]) / BEND
        jump = np.array([0.0, 0.0, 1 / JUMP])
        assert normal == pytest.approx(np.outer(slopes, slopes) + np.outer(jump, jump))
        assert volume == pytest.approx(math.log((slopes[0] - slopes[1]) / JUMP))


@given(counts, tops)
def test_a_flat_curve_has_its_own_chance_and_ratios_of_theta_are_equally_likely(
    counts: tuple[int, ...], top: int
) -> None:
    found = made(counts, top)
    thetas, chances = found.thetas.tolist(), np.exp(found.log_prior)
    if len(thetas) == 1:
        assert chances == pytest.approx([math.log(2)])
        return
    assert chances[0] == pytest.approx(FLAT)
    assert chances[1:].sum() == pytest.approx(1 - FLAT)
    widths = [math.log(after / theta) for theta, after in pairwise([*thetas, thetas[-1] + 1])][1:]
    assert chances[1:] / chances[1] == pytest.approx(np.array(widths) / widths[0])


def test_what_is_shared_is_cached_and_cannot_be_changed() -> None:
    found = made((1, 2), 4)
    assert made((1, 2), 4) is found
    for array in (found.thetas, found.shapes, found.normal, found.volume, found.log_prior):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
