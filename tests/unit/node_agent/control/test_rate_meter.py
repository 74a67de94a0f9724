"""The rate meter on jobs with known rates and prefetched steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.control.rate_meter import Measurement, MeterTimeouts, RateMeter

QUICK = MeterTimeouts(settle_seconds=0.0, window_seconds=0.0)


def run(meter: RateMeter, *phases: tuple[int, float], first_step: int = 100, now: float = 50.0) -> Measurement | None:
    """Tell steps in phases of (steps, seconds of each)."""
    step = first_step
    for count, seconds in phases:
        for _ in range(count):
            step, now = step + 1, now + seconds
            if measured := meter.update(step, now):
                return measured
    return None


@given(st.integers(1, 60), st.floats(1e-3, 10), st.integers(0, 2**40))
def test_a_steady_rate_is_measured_exactly(steps: int, seconds: float, first_step: int) -> None:
    measured = run(RateMeter(steps, QUICK, 50.0), (200, seconds), first_step=first_step)
    assert measured
    assert measured.steps >= steps
    assert measured.rate_per_second == pytest.approx(1 / seconds, rel=1e-3)


@given(st.integers(0, 36))  # more than a quarter and a whole of the steps cannot be told from the rate
def test_prefetched_steps_do_not_count_as_the_rate(prepared: int) -> None:
    measured = run(RateMeter(30, QUICK, 50.0), (prepared, 0.05), (300, 0.2))
    assert measured
    assert measured.rate_per_second == pytest.approx(5, rel=0.2)


def test_steps_during_the_settle_time_are_skipped() -> None:
    measured = run(RateMeter(5, MeterTimeouts(settle_seconds=2.0, window_seconds=0.0), 50.0), (200, 0.01), (100, 1.0))
    assert measured
    assert measured.rate_per_second == pytest.approx(1.0)


def test_a_fast_job_is_measured_for_a_whole_window() -> None:
    measured = run(RateMeter(5, MeterTimeouts(settle_seconds=0.0, window_seconds=1.0), 50.0), (2000, 0.001))
    assert measured
    assert measured.seconds >= 1.0


def test_a_job_with_an_unsteady_rate_is_measured_eventually() -> None:
    phases = [(8, 0.02 * 1.5**turn) for turn in range(20)]
    assert run(RateMeter(16, QUICK, 50.0), *phases)


def test_steps_of_another_phase_are_not_measured() -> None:
    meter = RateMeter(10, QUICK, 50.0)
    assert run(meter, (9, 0.1)) is None
    for step in range(110, 200):
        assert meter.update(step, step / 2, "validation") is None
    measured = run(meter, (100, 0.5), first_step=200, now=100.0)
    assert measured
    assert measured.steps == 10
    assert measured.rate_per_second == pytest.approx(2.0)


def test_a_restarted_job_settles_again() -> None:
    meter = RateMeter(10, QUICK, 50.0)
    assert run(meter, (9, 0.1)) is None
    measured = run(meter, (100, 0.5), first_step=0, now=60.0)
    assert measured
    assert measured.rate_per_second == pytest.approx(2.0)
