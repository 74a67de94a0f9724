"""Decayed usage: exact under any split of time, monotone, never negative, and clear about bad input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.resources import Resources
from cotenant.core.scheduling.decayed_usage import DecayedUsage

HALF_LIFE = 3600.0
amounts = st.builds(
    Resources, st.integers(0, 64_000), st.integers(0, 512), st.integers(0, 2**40), st.integers(0, 2**40)
)
half_lives = st.floats(1.0, 1e7)
lasting = st.floats(0.0, 1e7)


def close(one: DecayedUsage, other: DecayedUsage, less_than: DecayedUsage | None = None) -> bool:
    """Return whether both are the same but for rounding, which is that of the minuends if they are differences."""
    minuends = (less_than or one).amounts
    return all(
        mine == pytest.approx(others, rel=1e-9, abs=max(1e-3, 1e-14 * minuend))
        for mine, others, minuend in zip(one.amounts, other.amounts, minuends, strict=True)
    ) and math.isclose(one.at_seconds, other.at_seconds, rel_tol=1e-12)


@given(half_lives, lasting, lasting, lasting, amounts, amounts)
def test_two_steps_equal_one(
    half_life: float, before: float, first: float, second: float, held: Resources, now_held: Resources
) -> None:
    start = DecayedUsage(half_life).advanced(before, held)
    once = start.advanced(before + (first + second), now_held)
    twice = start.advanced(before + first, now_held).advanced(before + (first + second), now_held)
    assert close(once, twice)


@given(half_lives, lasting, lasting, lasting, amounts)
def test_what_becomes_known_late_counts_as_if_it_had_been_known(
    half_life: float, start: float, ran: float, later: float, held: Resources
) -> None:
    end, now = start + ran, start + ran + later
    known = DecayedUsage(half_life).advanced(start).advanced(end, held).advanced(now)
    late = DecayedUsage(half_life).advanced(now).charged(held, start, end)
    assert close(known, late)
    too_much = DecayedUsage(half_life).advanced(start).advanced(now, held)
    assert close(known, too_much.refunded(held, end, now), too_much)


@given(half_lives, lasting, lasting, amounts, amounts)
def test_usage_grows_with_what_is_held_and_is_never_negative(
    half_life: float, before: float, lasts: float, held: Resources, more: Resources
) -> None:
    start = DecayedUsage(half_life).advanced(before, held)
    less, most = (start.advanced(before + lasts, one) for one in (held, held + more))
    assert all(0 <= small <= large for small, large in zip(less.amounts, most.amounts, strict=True))
    assert all(one >= 0 for one in start.refunded(held + more, 0.0, before).amounts)
    idle = start.advanced(before + lasts)
    assert all(0 <= after <= earlier for after, earlier in zip(idle.amounts, start.amounts, strict=True))


@given(half_lives, amounts)
def test_the_average_is_what_is_always_held(half_life: float, held: Resources) -> None:
    usage = DecayedUsage(half_life).advanced(60 * half_life, held)
    assert usage.average == pytest.approx(tuple(held), rel=1e-9)


def test_half_is_left_after_a_half_life() -> None:
    used = DecayedUsage(HALF_LIFE).advanced(60.0, Resources(8000, 24))
    assert used.advanced(60.0 + HALF_LIFE).amounts == pytest.approx([one / 2 for one in used.amounts])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_fields_are_all_named_in_one_error(bad: float) -> None:
    with pytest.raises(ValueError, match=r"half_life_seconds must .*; amounts\.cores must be finite and not negative"):
        DecayedUsage(bad, 0.0, (0.0, bad, 0.0, 0.0))
    usage = DecayedUsage(HALF_LIFE, 100.0)
    with pytest.raises(ValueError, match=r"to_seconds must .*; held\.gpu_milli must be finite and not negative"):
        usage.advanced(bad, (bad, 0, 0, 0))
    with pytest.raises(ValueError, match=r"until_seconds must .*; held\.gpu_milli must be"):
        usage.charged((bad, 0, 0, 0), 5.0, bad)
    with pytest.raises(ValueError, match=r"until_seconds must not be before 5, not 4"):
        usage.refunded(Resources(), 5.0, 4.0)
    with pytest.raises(ValueError, match=r"must not be after 100, not 101"):
        usage.charged(Resources(), 5.0, 101.0)
    with pytest.raises(ValueError, match="amounts must have 4 amounts, not 1"):
        DecayedUsage(HALF_LIFE, 0.0, (1.0,))
    with pytest.raises(ValueError, match="must be finite"):
        DecayedUsage(HALF_LIFE, math.nan)
