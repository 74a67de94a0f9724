"""A profile is trusted until the job's own windows contradict it, three times in a row."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.drift import RATES_MAX, REFERENCE_WINDOWS, Bounds, Profile


def measured(rates: dict[int, float]) -> Profile[int]:
    profile: Profile[int] = Profile()
    for cores, rate in rates.items():
        profile.measure(cores, rate, 0)
    return profile


CURVE = {1: 10.0, 2: 20.0, 8: 40.0}


@pytest.mark.parametrize("ratio", [0.84, 1.16, 0.1, 10.0])
def test_three_windows_outside_make_a_profile_stale_and_all_that_was_measured_gives_way(ratio: float) -> None:
    profile = measured(CURVE)
    assert [profile.add_window(8, 40 * ratio, at).void for at in (1, 2)] == [False, False]
    assert (profile.stale, len(profile.windows.rates)) == ("", 3), "two are not three"
    seen = profile.add_window(8, 40 * ratio, 3)
    assert (seen.void, seen.learnt) == (True, (1, 2, 3))
    assert profile.stale == f"its last 3 windows ran at {ratio:.2f} of the measured rate"
    assert profile.windows.rates == {8: [40 * ratio] * 3}


@pytest.mark.parametrize("ratio", [0.86, 1.14, 1.0])
def test_windows_within_the_bounds_change_nothing(ratio: float) -> None:
    profile = measured(CURVE)
    assert not any(profile.add_window(8, 40 * ratio, at).void for at in range(50))
    assert profile.stale == ""


def test_windows_at_a_count_that_was_never_measured_do_not_count() -> None:
    profile = measured(CURVE)
    assert not any(profile.add_window(cores, 1.0, 0).void for cores in (3, 4, 5, 6, 7))
    for cores in (8, 16, 8):
        profile.add_window(cores, 20.0, 0)
    assert profile.stale == "", "that between them says nothing about either side"
    profile.add_window(8, 20.0, 0)
    assert profile.stale


def test_noise_is_learnt_once_the_next_window_agrees() -> None:
    profile = measured(CURVE)
    assert [profile.add_window(8, rate, at).learnt for at, rate in enumerate((20.0, 60.0, 41.0))] == [(), (), (0, 1, 2)]
    assert profile.windows.rates[8] == [40.0, 20.0, 60.0, 41.0]


def test_a_slow_change_is_found_though_each_window_is_like_the_one_before() -> None:
    profile = measured(CURVE)
    rate, seen = 40.0, 0
    while not profile.stale:
        rate, seen = rate * 0.99, seen + 1
        profile.add_window(8, rate, 0)
        assert seen < 100
    assert 0.8 < rate / 40.0 < 0.85


def test_rates_at_a_single_count_are_replaced_without_a_stale_profile() -> None:
    profile = measured({8: 40.0})
    assert [profile.add_window(8, 20.0, 0).void for _ in range(3)] == [False, False, True]
    assert (profile.stale, profile.windows.rates) == ("", {8: [20.0] * 3})


def test_the_bounds_can_be_others() -> None:
    profile = measured(CURVE)
    assert profile.add_window(8, 30.0, 0, Bounds(deviation=0.2, windows=1)).void
    assert not profile.add_window(8, 25.0, 0, Bounds(deviation=0.2, windows=1)).void


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 0.0])
@pytest.mark.parametrize("cores", [8, 3])
def test_a_rate_that_cannot_be_leaves_nothing_behind(rate: float, cores: int) -> None:
    profile = measured(CURVE)
    for _ in range(4):
        with pytest.raises(ValueError, match="must be positive and finite"):
            profile.add_window(cores, rate, 0)
    assert (dict(profile.windows.rates), profile.stale) == ({cores: [rate] for cores, rate in CURVE.items()}, "")


@given(st.lists(st.tuples(st.integers(1, 80), st.floats(1e-6, 1e6)), max_size=200), st.integers(1, 4))
def test_each_window_is_learned_at_most_once_and_memory_is_bounded(told: list[tuple[int, float]], windows: int) -> None:
    profile: Profile[int] = Profile()
    learnt: list[int] = []
    for at, (cores, rate) in enumerate(told):
        learnt += profile.add_window(cores, rate, at, Bounds(windows=windows)).learnt
    assert len(set(learnt)) == len(learnt)
    assert len(learnt) > len(told) - windows
    assert all(len(rates) <= RATES_MAX for rates in profile.windows.rates.values())
    assert profile.references.keys() <= profile.windows.rates.keys()
    assert all(count <= REFERENCE_WINDOWS for _, count in profile.references.values())
