"""The meter: on jobs whose rate is known, with what loaders had prepared before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.control.rate_meter import Measured, Meter, Patience

QUICK = Patience(settle_seconds=0.0, window_seconds=0.0)


def run(meter: Meter, *phases: tuple[int, float], first_step: int = 100, now: float = 50.0) -> Measured | None:
    """Tell steps in phases of (steps, seconds of each)."""
    step = first_step
    for count, seconds in phases:
        for _ in range(count):
            step, now = step + 1, now + seconds
            if measured := meter.take(step, now):
                return measured
    return None


@given(st.integers(1, 60), st.floats(1e-3, 10), st.integers(0, 2**40))
def test_a_steady_rate_is_measured_as_it_is(steps: int, seconds: float, first_step: int) -> None:
    measured = run(Meter(steps, QUICK, 50.0), (200, seconds), first_step=first_step)
    assert measured
    assert measured.steps >= steps
    assert measured.rate_per_second == pytest.approx(1 / seconds, rel=1e-3)


@given(st.integers(0, 36))  # more than a quarter and a whole of the steps cannot be told from the rate
def test_what_was_prepared_before_is_not_taken_for_the_rate(prepared: int) -> None:
    measured = run(Meter(30, QUICK, 50.0), (prepared, 0.05), (300, 0.2))
    assert measured
    assert measured.rate_per_second == pytest.approx(5, rel=0.2)


def test_a_moment_passes_after_a_change_however_many_steps_there_were() -> None:
    measured = run(Meter(5, Patience(settle_seconds=2.0, window_seconds=0.0), 50.0), (200, 0.01), (100, 1.0))
    assert measured
    assert measured.rate_per_second == pytest.approx(1.0)


def test_a_quick_job_is_watched_for_long_enough() -> None:
    measured = run(Meter(5, Patience(settle_seconds=0.0, window_seconds=1.0), 50.0), (2000, 0.001))
    assert measured
    assert measured.seconds >= 1.0


def test_a_job_whose_rate_never_rests_is_measured_all_the_same() -> None:
    phases = [(8, 0.02 * 1.5**turn) for turn in range(20)]
    assert run(Meter(16, QUICK, 50.0), *phases)


def test_steps_of_another_phase_are_not_measured() -> None:
    meter = Meter(10, QUICK, 50.0)
    assert run(meter, (9, 0.1)) is None
    for step in range(110, 200):
        assert meter.take(step, step / 2, "validation") is None
    measured = run(meter, (100, 0.5), first_step=200, now=100.0)
    assert measured
    assert measured.steps == 10
    assert measured.rate_per_second == pytest.approx(2.0)


def test_a_job_that_begins_again_settles_again() -> None:
    meter = Meter(10, QUICK, 50.0)
    assert run(meter, (9, 0.1)) is None
    measured = run(meter, (100, 0.5), first_step=0, now=60.0)
    assert measured
    assert measured.rate_per_second == pytest.approx(2.0)
