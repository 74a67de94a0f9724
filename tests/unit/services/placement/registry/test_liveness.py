"""Silence counts only while messages could have been received."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.services.placement.registry import liveness
from cotenant.services.placement.registry.liveness import TICKS_COUNTED_MAX, LivenessClock


@dataclass
class Clock:
    """A monotonic clock that the test sets."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The clock of the module under test."""
    made = Clock()
    with mock.patch.object(liveness, "time", made):
        yield made


def test_a_long_gap_between_ticks_counts_in_part(clock: Clock) -> None:
    judge = LivenessClock(beat_seconds=2.0)
    for _ in range(4):
        clock.now += 0.5
        judge.tick()
    assert judge.tick() == 2.0
    clock.now += 3600
    assert judge.tick() == 2.0 + TICKS_COUNTED_MAX * 0.5


def test_no_time_counts_while_paused(clock: Clock) -> None:
    judge = LivenessClock(beat_seconds=2.0)
    clock.now += 0.5
    judge.pause()
    for _ in range(10):
        clock.now += 0.5
        judge.tick()
    judge.resume()
    clock.now += 0.25
    assert judge.tick() == 0.75


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["tick", "pause", "resume"])), max_size=30))
def test_the_clock_is_monotonic_and_never_ahead_of_real_time(steps: list[tuple[float, str]]) -> None:
    clock = Clock()
    with mock.patch.object(liveness, "time", clock):
        judge = LivenessClock(beat_seconds=4.0)
        began, before, ends = clock.now, 0.0, 0.0
        for gap, then in steps:
            clock.now += gap
            ends += min(gap, TICKS_COUNTED_MAX * judge.tick_seconds)
            getattr(judge, then)()
            assert before <= judge.tick() <= min(clock.now - began, ends) + 1e-9
            before = judge.tick()
