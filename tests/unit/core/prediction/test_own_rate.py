"""A running job's own rate: its windows, what begins it again, and the remaining time that follows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import OwnRate, Query
from cotenant.core.prediction.estimate_validation import invalid_reason
from cotenant.core.prediction.own_rate import (
    AT_END_CONFIDENCE,
    CHANGED_SPREAD,
    EXPIRY_SECONDS,
    GRACE_SECONDS,
    P90_SIGMAS,
    WINDOWS_MAX,
    RateTrack,
    expired,
    expiry_seconds,
    grace_seconds,
    remaining_by_rate,
)

RATE = OwnRate(10.0, windows=4, spread=0.02, gap_seconds=1.0)
QUERY = Query("ann", "bert", "", 1000, 1, step=350, steps_total=400, own_rate=RATE)


def track_of(*rates: float, under: str = "8 cores", seconds: int = 10) -> RateTrack:
    """Return the track of a job that runs at these rates, for some seconds each."""
    track = RateTrack(window_seconds=10.0, settle_seconds=5.0)
    run(track, *rates, under=under, seconds=seconds)
    return track


def run(track: RateTrack, *rates: float, under: str = "8 cores", seconds: int = 10, first: int = 0) -> int:
    """Report a job's steps once a second; returns the second after the last report."""
    step = 1000.0 * first
    for rate in rates:
        for _ in range(seconds):
            track.take(under, math.floor(step), float(first), now=float(first))
            first, step = first + 1, step + rate
    return first


def rate_of(track: RateTrack, now: float = 0.0) -> OwnRate:
    measured = track.measured(now)
    assert measured
    return measured


# The rate ---------------------------------------------------------------------------------------------------


def test_nothing_is_measured_before_the_first_report() -> None:
    assert RateTrack(10.0, 5.0).measured(now=7.0) is None


def test_a_job_that_has_reported_once_has_no_rate() -> None:
    track = RateTrack(10.0, 5.0)
    track.take("", 5, 100.0, now=3.0)
    assert track.measured(now=7.0) == OwnRate(0.0, 0, silent_seconds=4.0)


def test_the_rate_is_that_of_all_windows_together() -> None:
    track = track_of(2.0, 2.0, 4.0, 4.0)
    measured = rate_of(track)
    assert measured.windows == 3
    assert measured.rate_per_second == pytest.approx(3.0, abs=0.4)
    assert measured.spread > 0.2


def test_windows_double_so_that_they_cover_the_whole_run() -> None:
    measured = rate_of(track_of(*[5.0] * 500))
    assert WINDOWS_MAX / 2 <= measured.windows < WINDOWS_MAX
    assert measured.rate_per_second == pytest.approx(5.0)
    assert measured.spread == pytest.approx(0.0, abs=1e-3)


def test_a_validation_between_training_steps_lowers_the_rate() -> None:
    track, second, step = RateTrack(10.0, 5.0), 0, 0
    for _ in range(40):
        for _ in range(30):
            track.take("", step, float(second), now=float(second))
            second, step = second + 1, step + 10
        for _ in range(10):  # its steps are those of another phase
            track.take("", step, float(second), now=float(second))
            second += 1
    assert rate_of(track).rate_per_second == pytest.approx(7.5, rel=0.1)


@pytest.mark.parametrize("under", ["4 cores", "8 cores limited to 2 of its cores"])
def test_after_a_resize_or_a_throttle_the_old_rate_counts_without_windows(under: str) -> None:
    track = track_of(5.0, 5.0, 5.0)
    track.take(under, 10_000, 30.0, now=30.0)
    assert (rate_of(track).rate_per_second, rate_of(track).windows) == (5.0, 0)
    run(track, 2.0, 2.0, under=under, first=31)
    assert (rate_of(track).rate_per_second, rate_of(track).windows) == (2.0, 1)


def test_two_changes_in_a_row_keep_the_last_rate_that_was_measured() -> None:
    track = track_of(5.0, 5.0)
    for second in (20, 21):
        track.take(f"change {second}", 10_000, float(second), now=float(second))
    assert rate_of(track).rate_per_second == 5.0


def test_a_restart_from_a_checkpoint_measures_a_new_segment() -> None:
    track = track_of(5.0, 5.0, 5.0)
    for second in range(30, 60):
        track.take("8 cores", 20 + 2 * (second - 30), float(second), now=float(second))
    assert (rate_of(track).rate_per_second, rate_of(track).windows) == (2.0, 2)


def test_steps_that_go_backwards_begin_a_new_segment_and_never_give_a_negative_rate() -> None:
    track = track_of(5.0, 5.0, 5.0)
    for second in range(30, 60):
        track.take("8 cores", 20 + 2 * (second - 30), float(second), now=float(second))
        assert rate_of(track).rate_per_second > 0
    for second in range(60, 90):  # ever fewer: no rate follows from that
        track.take("8 cores", 90 - second, float(second), now=float(second))
        assert rate_of(track).rate_per_second >= 0


def test_a_clock_that_goes_backwards_begins_a_new_segment() -> None:
    track = track_of(5.0, 5.0, 5.0)
    track.take("8 cores", 10_000, 3.0, now=31.0)
    assert rate_of(track).windows == 0
    run(track, 4.0, 4.0, first=40)
    assert rate_of(track).rate_per_second == 4.0


def test_a_profile_counts_for_nothing() -> None:
    track = track_of(5.0, 5.0, 5.0)
    for second in range(30, 60):
        track.take("1 core", 150 + second - 30, float(second), now=float(second), profiled=True)
    assert rate_of(track, 61.0) == replace(rate_of(track_of(5.0, 5.0, 5.0)), silent_seconds=2.0)


def test_three_slower_windows_in_a_row_replace_all_before() -> None:
    assert rate_of(track_of(10.0, 10.0, 10.0, 10.0, 10.0, 6.0, 6.0)).rate_per_second > 8
    assert rate_of(track_of(*[10.0] * 6, *[6.0] * 5)).rate_per_second < 6.5


def test_silence_and_the_longest_gap_are_reported() -> None:
    track = RateTrack(10.0, 5.0)
    for second in (0, 1, 2, 9, 10):
        track.take("", second, 100.0 + second, now=float(second))
    measured = rate_of(track, now=16.0)
    assert (measured.gap_seconds, measured.silent_seconds) == (7.0, 6.0)
    track.take("", 10, 110.0, now=30.0)  # a report without a new step
    assert rate_of(track, now=30.0).silent_seconds == 20.0


def test_the_version_changes_with_the_segment_and_as_windows_double() -> None:
    track = RateTrack(10.0, 5.0)
    versions: list[tuple[int, int]] = []
    for second in range(100):
        track.take("a" if second < 80 else "b", second, float(second), now=float(second))
        if not versions or versions[-1] != track.version:
            versions.append(track.version)
    assert versions == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


reports = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.one_of(st.integers(0, 50), st.integers(0, 10**15)),
        st.floats(0, 1e9),
        st.booleans(),
    ),
    max_size=60,
)


@given(reports)
def test_no_report_breaks_a_track(told: list[tuple[str, int, float, bool]]) -> None:
    track = RateTrack(10.0, 5.0)
    for under, step, at, profiled in told:
        track.take(under, step, at, now=at, profiled=profiled)
        measured = rate_of(track, at)
        assert 0 <= measured.rate_per_second < math.inf
        assert 0 <= measured.spread < math.inf
        assert 0 <= measured.windows < WINDOWS_MAX
        estimate = remaining_by_rate(replace(QUERY, own_rate=measured))
        assert estimate is None or not invalid_reason(estimate, 0)


# The remaining time -----------------------------------------------------------------------------------------


def test_steps_left_divided_by_the_rate() -> None:
    found = remaining_by_rate(QUERY)
    assert found
    assert found.predictable
    assert found.remaining_seconds == 5.0
    assert found.remaining_p10_seconds is not None
    assert found.remaining_p90_seconds is not None
    assert 3.5 < found.remaining_p10_seconds < 5.0 < found.remaining_p90_seconds < 7.0
    assert found.confidence > 0.7
    assert found.source == "50 steps left at 10 per second, its own rate over 4 windows"


@pytest.mark.parametrize(
    "query",
    [
        replace(QUERY, steps_total=0),
        replace(QUERY, own_rate=None),
        replace(QUERY, own_rate=replace(RATE, rate_per_second=0.0)),
        replace(QUERY, phase="validation"),
    ],
)
def test_without_a_total_or_a_rate_there_is_no_remaining_time(query: Query) -> None:
    assert remaining_by_rate(query) is None


def width(measured: OwnRate) -> float:
    found = remaining_by_rate(replace(QUERY, own_rate=measured))
    assert found
    assert found.remaining_p90_seconds
    assert found.remaining_p10_seconds
    return found.remaining_p90_seconds / found.remaining_p10_seconds


def test_few_windows_scatter_and_a_change_widen_the_interval() -> None:
    widths = [width(replace(RATE, windows=windows, spread=0.1)) for windows in (15, 4, 2, 1, 0)]
    assert widths == sorted(widths)
    assert widths[-1] == pytest.approx(math.exp(2 * P90_SIGMAS * CHANGED_SPREAD))
    assert width(replace(RATE, spread=0.5)) > 2 * width(replace(RATE, spread=0.05))


@pytest.mark.parametrize(
    ("step", "source"),
    [
        (400, "all of its 400 steps are done"),
        (420, "it is at step 420, beyond its total of 400: it counts as at its end"),
    ],
)
def test_a_job_at_or_beyond_its_total_is_at_its_end(step: int, source: str) -> None:
    found = remaining_by_rate(replace(QUERY, step=step))
    assert found
    assert (found.predictable, found.remaining_seconds, found.confidence) == (True, 0.0, AT_END_CONFIDENCE)
    assert found.source == source


def silent(seconds: float, gap_seconds: float = 1.0) -> Query:
    return replace(QUERY, own_rate=replace(RATE, silent_seconds=seconds, gap_seconds=gap_seconds))


def test_silence_ages_the_estimate_until_it_is_unknown() -> None:
    fresh, quiet, aged = (remaining_by_rate(silent(seconds)) for seconds in (0.0, GRACE_SECONDS, 120.0))
    assert fresh
    assert quiet
    assert aged
    assert quiet.confidence == fresh.confidence > aged.confidence > 0
    assert aged.remaining_seconds == pytest.approx(4.905 + 90.0)
    assert aged.remaining_p90_seconds == pytest.approx(6.1 + 9 * 90.0, abs=0.2)
    assert aged.source.endswith("; no step for 2 min, unknown after 10 min")
    unknown = remaining_by_rate(silent(EXPIRY_SECONDS + 1))
    assert unknown
    assert (unknown.predictable, unknown.remaining_seconds) == (False, None)
    assert unknown.source == "its last step, 350 of 400, was 10 min ago"
    assert expired(silent(EXPIRY_SECONDS + 1))
    assert not expired(silent(EXPIRY_SECONDS))


def test_a_job_with_slow_steps_may_be_silent_for_longer() -> None:
    slow = replace(RATE, gap_seconds=300.0)
    assert (grace_seconds(slow), expiry_seconds(slow)) == (900.0, 3000.0)
    assert not expired(silent(2999.0, gap_seconds=300.0))


def test_a_step_that_takes_long_counts_as_begun() -> None:
    slow = replace(RATE, rate_per_second=0.01, gap_seconds=100.0)
    found = [
        remaining_by_rate(replace(QUERY, step=399, own_rate=replace(slow, silent_seconds=seconds)))
        for seconds in (0.0, 50.0, 100.0)
    ]
    assert [one and one.remaining_seconds for one in found] == pytest.approx([100.0, 50.0, 5.0])


@given(
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.floats(1e-9, 1e9),
    st.integers(0, 16),
    st.floats(0, 1e6),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_every_estimate_is_valid_and_its_interval_holds_its_median(
    step: int, total: int, rate: float, windows: int, spread: float, gap: float, silence: float
) -> None:
    measured = OwnRate(rate, windows, spread, gap, silence)
    found = remaining_by_rate(replace(QUERY, step=step, steps_total=total, own_rate=measured))
    if found is None or not found.predictable:
        return
    assert not invalid_reason(found, 0)
    assert found.remaining_seconds is not None
    if found.remaining_p10_seconds is not None and found.remaining_p90_seconds is not None:
        assert found.remaining_p10_seconds <= found.remaining_seconds <= found.remaining_p90_seconds


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_the_interval_holds_in_eight_of_ten_runs(noise: float) -> None:
    rng, held, runs = np.random.default_rng(7), 0, 200
    for _ in range(runs):
        factors = np.exp(noise * rng.standard_normal(90))  # of ten seconds each
        rate = float(np.exp(rng.normal(2, 1)))
        seen = int(rng.integers(2, 12))
        steps = np.concatenate([[0.0], np.cumsum(np.repeat(rate * factors, 10))])
        track = RateTrack(10.0, 5.0)
        for second in range(10 * seen + 6):
            track.take("", int(100 * steps[second]), float(second), now=float(second))
        total, now = int(100 * steps[600]), 10 * seen + 5
        found = remaining_by_rate(
            replace(QUERY, step=int(100 * steps[now]), steps_total=total, own_rate=track.measured(float(now)))
        )
        assert found
        assert found.remaining_p10_seconds is not None
        assert found.remaining_p90_seconds is not None
        held += found.remaining_p10_seconds <= 600 - now <= found.remaining_p90_seconds
    assert held >= 0.8 * runs
