"""Windows of a rate lie entirely under one allocation, in one phase, and outside of profiles."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.prediction.rate_windows import RateWindows, Window

HELD, RESIZED = (1, 7, ""), (1, 9, "")


def windows_of(*told: tuple[object, int, float]) -> list[Window]:
    windows = RateWindows(window_seconds=10.0, settle_seconds=5.0)
    found = [windows.take("j1", under, step, at) for under, step, at in told]
    return [window for window in found if window]


def test_a_window_begins_where_the_one_before_ended() -> None:
    assert windows_of((HELD, 1, 0), (HELD, 10, 5), (HELD, 30, 15), (HELD, 40, 20), (HELD, 60, 25)) == [
        Window(20, 10, 15),
        Window(30, 10, 25),
    ]


def test_no_window_lies_over_a_resize() -> None:
    before = [(HELD, step, float(step)) for step in range(18)]
    after = [(RESIZED, 18 + 2 * step, 18.0 + step) for step in range(20)]
    (first, second) = windows_of(*before, *after)
    assert (first.rate_per_second, first.end_seconds) == (1.0, 15.0)
    assert (second.rate_per_second, second.end_seconds) == (2.0, 33.0), "5 s to settle, then 10 s"


def test_slow_steps_make_long_windows() -> None:
    assert windows_of((HELD, 1, 0), (HELD, 2, 60), (HELD, 2, 100), (HELD, 3, 120)) == [Window(1, 60, 120)]


def test_a_profile_ends_no_window_and_restarts_them() -> None:
    windows = RateWindows(window_seconds=10.0, settle_seconds=5.0)
    for step in range(8):
        assert windows.take("j1", HELD, step, float(step)) is None
    windows.hold("j1")
    assert [windows.take("j1", HELD, step, float(step)) for step in range(8, 40)] == [None] * 32
    windows.release("j1")
    found = [windows.take("j1", HELD, 40 + step, 40.0 + step) for step in range(16)]
    assert [window for window in found if window] == [Window(10, 10, 55)]


def test_a_job_that_begins_again_or_a_clock_that_goes_back_makes_no_window() -> None:
    settled = [(HELD, 50, 0.0), (HELD, 51, 6.0)]
    assert windows_of(*settled, (HELD, 3, 20.0), (HELD, 13, 30.0)) == [Window(10, 10, 30)]
    assert windows_of(*settled, (HELD, 60, 5.5), (HELD, 70, 15.5)) == [Window(10, 10, 15.5)]
    assert windows_of(*settled, (HELD, 60, -3600.0), (HELD, 61, -3594.0), (HELD, 81, -3584.0)) == [
        Window(20, 10, -3584)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from((HELD, RESIZED)), st.integers(0, 2**62), st.floats(-1e9, 1e9, allow_nan=False)),
        max_size=50,
    )
)
def test_a_rate_is_always_positive_and_finite(told: list[tuple[object, int, float]]) -> None:
    for window in windows_of(*told):
        assert 0 < window.rate_per_second < math.inf
        assert window.seconds >= 10
