from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli import units


@given(st.integers(0, 10**12))
def test_a_duration_reads_as_it_was_written(milliseconds: int) -> None:
    seconds = min(milliseconds / 1000, units.DURATION_SECONDS_MAX)
    assert units.parse_seconds(units.write_seconds(seconds)) == pytest.approx(seconds, abs=1e-6)


@given(st.integers(0, 2**50))
def test_a_size_reads_as_it_was_written(size: int) -> None:
    assert units.parse_bytes(units.write_bytes(size)) == size


@given(st.integers(0, 64_000))
def test_gpus_read_as_they_were_written(milli: int) -> None:
    assert units.parse_gpu_milli(units.write_gpus(milli)) == milli


@given(st.floats(0, 100 * 86_400))
def test_a_short_duration_is_at_most_six_wide(seconds: float) -> None:
    assert len(units.short_seconds(seconds)) <= 6


@given(st.floats(0, 2**60))
def test_a_short_size_is_at_most_seven_wide_and_near(size: float) -> None:
    assert len(units.short_bytes(size)) <= 10


@pytest.mark.parametrize(
    "reader",
    [
        units.parse_seconds,
        units.parse_bytes,
        units.parse_gpu_milli,
        units.parse_cores,
        units.parse_integer,
        units.parse_number,
        units.parse_bool,
        lambda text: units.parse_time(text, now=0.0),
    ],
)
@given(text=st.text())
def test_a_parser_accepts_a_text_or_names_what_it_expects(reader: Callable[[str], object], text: str) -> None:
    assert (read_or_refuse(reader, text) or "must").startswith(("must", "needs", "has", "can"))


def read_or_refuse(reader: Callable[[str], object], text: str) -> str | None:
    """Return a parser's error for a text; "" if it accepts it."""
    try:
        reader(text)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("2h", 7200), ("1h30m", 5400), ("1.5h", 5400), ("90", 90), ("1d", 86_400)]
)
def test_durations_are_written_in_many_ways(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "1y", "1h 30m x", "soon", "101000h" * 20, "40000d", "1s" * 51])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        units.parse_seconds(text)


@pytest.mark.parametrize("text", ["4", "4XB", "GiB", "-1GiB", "1.5B", "9EiB", ""])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|needs|has"):
        units.parse_bytes(text)


def test_a_deadline_with_a_zone_is_that_time() -> None:
    assert units.parse_time("2030-01-01T02:00:00+02:00", now=0.0) == 1_893_456_000


def test_a_time_of_day_is_the_next_one() -> None:
    now = datetime.now().astimezone().replace(hour=12, minute=30, second=0, microsecond=0)  # local, as users mean it
    later, earlier = units.parse_time("17:30", now.timestamp()), units.parse_time("9:15:30", now.timestamp())
    shown = [datetime.fromtimestamp(at).astimezone().strftime("%j %H:%M:%S") for at in (later, earlier)]
    tomorrow = datetime.fromtimestamp(now.timestamp() + 86_400).astimezone()
    assert shown == [f"{now:%j} 17:30:00", f"{tomorrow:%j} 09:15:30"]
    for text in ("25:00", "12:60", "+17:30", "1:2"):
        with pytest.raises(ValueError, match="must be a time such as 2h, 17:30 or"):
            units.parse_time(text, now.timestamp())
