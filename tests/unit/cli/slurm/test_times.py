"""Times of Slurm: every form of a time limit and of a begin."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.slurm import times

NOW = time.mktime((2027, 3, 10, 15, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1", 60), ("90", 5400), ("0:30", 60), ("10:30", 660), ("1:00:00", 3600), ("100:00:00", 360_000),
        ("2-0", 172_800), ("1-12", 129_600), ("1-12:30", 131_400), ("1-00:00:01", 86_460), ("0", None),
        ("00:00:00", None), ("UNLIMITED", None), ("infinite", None), ("-1", None),
    ],
)  # fmt: skip
def test_every_form_of_a_time_limit_is_read(text: str, seconds: int | None) -> None:
    assert times.read_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1h", "1:2:3:4", "1-", "-5", "1.5", "1-2-3", "٣"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".|^$"):
        times.read_limit(text)


@given(st.integers(1, 60 * 24 * 400))
def test_a_written_period_is_read_as_the_same(minutes: int) -> None:
    assert times.read_limit(times.write_elapsed(60 * minutes)) == 60 * minutes


@given(st.integers(3600, 60 * 24 * 400 * 60))
def test_both_written_forms_mean_the_same(seconds: int) -> None:
    assert times.read_limit(times.write_period(seconds)) == times.read_limit(times.write_elapsed(seconds))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", "2027-03-10T15:30:00"), ("now+60", "2027-03-10T15:31:00"), ("now+2hours", "2027-03-10T17:30:00"),
        ("now+3days", "2027-03-13T15:30:00"), ("now+1week", "2027-03-17T15:30:00"), ("16:00", "2027-03-10T16:00:00"),
        ("15:00", "2027-03-11T15:00:00"), ("4:05:06 pm", "2027-03-10T16:05:06"), ("12:00am", "2027-03-11T00:00:00"),
        ("midnight", "2027-03-11T00:00:00"), ("teatime", "2027-03-10T16:00:00"), ("tomorrow", "2027-03-11T00:00:00"),
        ("10:00 tomorrow", "2027-03-11T10:00:00"), ("2027-04-05", "2027-04-05T00:00:00"),
        ("2027-04-05T06:07", "2027-04-05T06:07:00"), ("2027-04-05T06:07:08", "2027-04-05T06:07:08"),
        ("04/05/28", "2028-04-05T00:00:00"), ("040528", "2028-04-05T00:00:00"), ("04/05", "2027-04-05T00:00:00"),
    ],
)  # fmt: skip
def test_every_form_of_a_begin_is_read(text: str, moment: str) -> None:
    assert times.write_time(times.read_moment(text, NOW)) == moment


@given(st.text(max_size=20))
def test_any_other_begin_is_refused_with_a_value_error(text: str) -> None:
    for read in (lambda: times.read_moment(text, NOW), lambda: times.read_limit(text)):
        try:
            read()
        except ValueError:
            continue
