"""Due times, compared with a look at each minute, also where clocks change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant.core.model.recurrence import Recurrence, parse_recurrence

ZONES = [UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Australia/Lord_Howe")]
CHANGES = [  # just before clocks change, somewhere, and before ends of months
    datetime(2026, 3, 28, 23, 40, tzinfo=UTC), datetime(2026, 10, 24, 23, 10, tzinfo=UTC),
    datetime(2026, 3, 8, 5, 50, tzinfo=UTC), datetime(2026, 11, 1, 4, 30, tzinfo=UTC),
    datetime(2026, 4, 4, 14, 10, tzinfo=UTC), datetime(2026, 10, 3, 14, 50, tzinfo=UTC),
    datetime(2028, 2, 28, 22, 30, tzinfo=UTC), datetime(2026, 12, 31, 22, 0, tzinfo=UTC),
]  # fmt: skip
MINUTES = 26 * 60


def field(low: int, high: int) -> st.SearchStrategy[str]:
    one = st.integers(low, high)
    span = st.tuples(one, one).map(lambda two: f"{min(two)}-{max(two)}")
    stepped = st.tuples(st.just("*") | span, st.integers(1, 30)).map(lambda two: f"{two[0]}/{two[1]}")
    return st.just("*") | st.lists(one.map(str) | span | stepped, min_size=1, max_size=3).map(",".join)


lines = st.tuples(
    field(0, 59), field(0, 5) | field(0, 23), st.just("*") | field(1, 31), st.just("*"), st.just("*") | field(0, 7)
).map(" ".join)


def numbers(text: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for term in text.split(","):
        span, _, step = term.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


def matches(line: str, wall: datetime) -> bool:
    minute, hour, day, month, weekday = line.split()
    at = wall.minute in numbers(minute, 0, 59) and wall.hour in numbers(hour, 0, 23)
    of_month = wall.day in numbers(day, 1, 31)
    of_week = wall.isoweekday() % 7 in {one % 7 for one in numbers(weekday, 0, 7)}
    both = day.startswith("*") or weekday.startswith("*")
    return at and wall.month in numbers(month, 1, 12) and (of_month and of_week if both else of_month or of_week)


def due_minutes(line: str, zone: tzinfo, begin: datetime) -> Iterator[float]:
    """Look at each minute: fixed times once a day and right after a gap, others as time goes by."""
    fixed = zone is not UTC and not any(part.startswith("*") for part in line.split()[:2])
    before = begin.astimezone(zone).replace(tzinfo=None)
    latest = before
    for minute in range(1, MINUTES):
        now = begin + timedelta(minutes=minute)
        wall = now.astimezone(zone).replace(tzinfo=None)
        if not fixed:
            due = matches(line, wall)
        else:  # all minutes that the wall clock shows for the first time, or has just skipped
            new = [latest + timedelta(minutes=step) for step in range(1, 1 + (wall - latest) // timedelta(minutes=1))]
            due = any(matches(line, one) for one in new)
        latest = max(latest, wall)
        if due:
            yield now.timestamp()


@example("*/30 * * * *", ZONES[1], CHANGES[0])
@example("5-5/20 3-3/1,21 1,30-30/2 * *", ZONES[0], CHANGES[7])
@example("*/30 * * * *", ZONES[1], CHANGES[1])
@given(lines, st.sampled_from(ZONES), st.sampled_from(CHANGES))
def test_due_times_are_those_of_a_look_at_each_minute(line: str, zone: tzinfo, begin: datetime) -> None:
    try:
        recurrence = parse_recurrence(line, zone, 0.0)
    except ValueError:  # a day that no month has
        assert not list(due_minutes(line, zone, begin))
        return
    end, at, found = begin.timestamp() + 60 * (MINUTES - 1), begin.timestamp(), []
    while (at := recurrence.next_after(at)) <= end:
        found.append(at)
    expected = list(due_minutes(line, zone, begin))
    assert found == expected
    last, count = recurrence.last_until(begin.timestamp(), end)
    assert (last, count) == ((expected[-1], min(1000, len(expected))) if expected else (0.0, 0))


@given(st.integers(60, 10**6), st.floats(0, 2e9), st.floats(0, 1e8))
def test_a_period_counts_from_its_start(period: int, start: float, later: float) -> None:
    recurrence = Recurrence(period_seconds=float(period), start_seconds=start)
    due = recurrence.next_after(start + later)
    assert start + later < due <= start + later + period + 1e-3
    assert abs((due - start) / period - round((due - start) / period)) < 1e-6
    last, count = recurrence.last_until(start, start + later)
    assert count == min(1000, int(later // period)) or math.isclose(later % period, 0, abs_tol=1e-3)
    assert not count or start < last <= start + later


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("61 * * * *", "its minute '61'"),
        ("* 24 * * *", "its hour '24'"),
        ("* * 0 * *", "its day of month '0'"),
        ("* * * FOO *", "its month 'FOO'"),
        ("* * * * MON#6", "its day of week 'MON#6'"),
        ("*/0 * * * *", "its minute '*/0'"),
        ("5-1 * * * *", "its minute '5-1'"),
        ("0 0 31 2 *", "is never due: no month '2' has a day '31'"),
        ("0 0 30 FEB *", "is never due"),
        ("31 2 *", "not 3 fields"),
        ("", "not 0 fields"),
        ("30s", "from 1m to 366d"),
        ("400d", "from 1m to 366d"),
        ("@reboot", "one of @hourly"),
        ("9" * 5000 + " * * * *", "at most 128 characters"),
        ("9" * 100 + " * * * *", "its minute"),
        ("１ * * * *", "ASCII"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(text: str, wrong: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
        parse_recurrence(text, UTC, 0.0)
    assert wrong in str(refused.value)


@given(st.text(st.sampled_from("0123456789*/-,#LWMONJAN@ hd"), max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        recurrence = parse_recurrence(text, ZONES[1], 0.0)
    except ValueError:
        return
    assert recurrence.next_after(1.8e9) > 1.8e9


def test_very_many_due_times_are_not_counted_one_by_one() -> None:
    recurrence = parse_recurrence("* * * * *", UTC, 0.0)
    assert recurrence.last_until(1.7e9, 1.8e9) == (1.8e9, 1000)
    assert parse_recurrence("1m", UTC, 5.0).last_until(5.0, 1.8e9) == (1.8e9 - 55.0, 1000)
