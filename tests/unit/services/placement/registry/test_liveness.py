"""Silence is counted only where it could have been broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.services.placement.registry import liveness
from cotenant.services.placement.registry.liveness import LOOKS_COUNTED_MAX, Attention


@dataclass
class Clock:
    """A monotonic clock that is set by hand."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The clock of the module under test."""
    made = Clock()
    with mock.patch.object(liveness, "time", made):
        yield made


def test_what_lies_between_two_looks_counts_in_part_where_it_is_long(clock: Clock) -> None:
    judge = Attention(beat_seconds=2.0)
    for _ in range(4):
        clock.now += 0.5
        judge.look()
    assert judge.look() == 2.0
    clock.now += 3600
    assert judge.look() == 2.0 + LOOKS_COUNTED_MAX * 0.5


def test_nothing_counts_while_everybody_is_turned_away(clock: Clock) -> None:
    judge = Attention(beat_seconds=2.0)
    clock.now += 0.5
    judge.turn_away()
    for _ in range(10):
        clock.now += 0.5
        judge.look()
    judge.turn_back()
    clock.now += 0.25
    assert judge.look() == 0.75


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["look", "turn_away", "turn_back"])), max_size=30))
def test_it_never_runs_ahead_of_the_time_and_never_goes_back(steps: list[tuple[float, str]]) -> None:
    clock = Clock()
    with mock.patch.object(liveness, "time", clock):
        judge = Attention(beat_seconds=4.0)
        began, before, ends = clock.now, 0.0, 0.0
        for gap, then in steps:
            clock.now += gap
            ends += min(gap, LOOKS_COUNTED_MAX * judge.look_seconds)
            getattr(judge, then)()
            assert before <= judge.look() <= min(clock.now - began, ends) + 1e-9
            before = judge.look()
