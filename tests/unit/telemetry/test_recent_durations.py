"""Durations of the last 30 s."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.telemetry.recent_durations import FLOOR_SECONDS, GROWTH, WINDOW_SECONDS, RecentDurations


def at(now: list[float]) -> RecentDurations:
    return RecentDurations(clock=lambda: now[0])


@given(st.lists(st.floats(0.0, 100.0), min_size=1))
def test_the_median_is_at_most_one_bucket_too_large(durations: list[float]) -> None:
    recent = at([50.0])
    for seconds in durations:
        recent.add(seconds)
    median = statistics.median_high(durations)
    assert median <= recent.median_seconds * (1 + 1e-9)
    assert recent.median_seconds <= max(median, FLOOR_SECONDS) * GROWTH * (1 + 1e-9)
    assert recent.longest_seconds == max(durations)


def test_durations_are_dropped_after_three_windows() -> None:
    now = [5.0]
    recent = at(now)
    recent.add(4.0)
    now[0] += 2 * WINDOW_SECONDS
    assert (recent.count, recent.longest_seconds) == (1, 4.0)
    now[0] += WINDOW_SECONDS
    assert (recent.count, recent.longest_seconds, recent.median_seconds, recent.share) == (0, 0.0, 0.0, 0.0)


def test_one_slow_moment_is_in_one_window_and_lasting_slowness_in_several() -> None:
    now = [5.0]
    recent = at(now)
    for _ in range(3):
        recent.add(1.5)
    assert recent.windows_above(1.0) == 1
    now[0] += WINDOW_SECONDS
    recent.add(1.0)
    assert (recent.windows_above(1.0), recent.windows_above(1.2)) == (2, 1)


def test_the_share_is_of_the_time_that_was_watched() -> None:
    now = [8.0]
    recent = at(now)
    now[0] = 12.0
    recent.add(1.0)
    assert recent.share == pytest.approx(0.25)
    recent.add(40.0)
    assert recent.share == 1.0
