"""The record of predictions: what it says of right, scaled and useless ones, and a slow version of it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.research.predicting.judging import notes, row
from cotenant.core.prediction.track_record import SPREAD_MIN, track_record

times = st.floats(1.0, 1e7)
pairs = st.lists(st.tuples(times, times), min_size=1, max_size=30)


def test_nothing_is_said_of_no_jobs() -> None:
    assert track_record([]) is None


@given(st.lists(times, min_size=1, max_size=30))
def test_exact_predictions(ran: list[float]) -> None:
    record = track_record([(seconds, seconds) for seconds in ran])
    assert record
    assert (record.jobs, record.median_factor, record.within_twice, record.bias) == (len(ran), 1.0, 1.0, 1.0)
    assert record.explained in (None, 1.0)


@given(pairs, st.floats(1.01, 100.0))
def test_predictions_that_are_longer_by_a_factor_have_a_bias_greater_by_it(
    judged: list[tuple[float, float]], factor: float
) -> None:
    before, after = track_record(judged), track_record([(told * factor, ran) for told, ran in judged])
    assert before
    assert after
    assert after.bias == pytest.approx(before.bias * factor)


@given(pairs)
def test_it_is_what_a_slow_version_says(judged: list[tuple[float, float]]) -> None:
    record = track_record(judged)
    assert record
    off = [max(told / ran, ran / told) for told, ran in judged]
    assert record.median_factor == pytest.approx(math.exp(median(map(math.log, off))))
    assert record.within_twice == pytest.approx(sum(one <= 2.0 + 1e-9 for one in off) / len(off))
    logs = [math.log(ran) for _, ran in judged]
    typical = sum(logs) / len(logs)
    spread = sum((one - typical) ** 2 for one in logs)
    if record.explained is not None:
        assert record.explained == pytest.approx(1 - sum(math.log(one) ** 2 for one in off) / spread, abs=1e-6)
    else:
        assert spread <= 1.01 * SPREAD_MIN**2 * len(judged)


def test_of_jobs_that_ran_nearly_equally_long_nothing_is_explained() -> None:
    record = track_record((90.0, 60.0 + number / 100) for number in range(20))
    assert record
    assert record.explained is None, "-40,000 % would say that predictions of 90 s for 60 s mislead"
    table = {("history", ""): record}
    assert row(("history", ""), record)[-1] == ""
    assert notes(table)[-1].startswith("no EXPLAINED for history: the jobs ran nearly equally long")
    assert len(notes({("history", ""): replace(record, explained=0.5)})) == len(notes(table)) - 1
    assert notes({}) == []


def test_telling_the_typical_run_time_explains_nothing_and_the_reverse_misleads() -> None:
    ran = [10.0, 1000.0]
    typical, reverse = track_record((100.0, one) for one in ran), track_record(zip(ran[::-1], ran, strict=True))
    assert typical
    assert reverse
    assert typical.explained == pytest.approx(0.0)
    assert reverse.explained == pytest.approx(-3.0)


def test_run_times_below_a_second_are_alike() -> None:
    record = track_record([(0.5, 0.01), (0.0, 0.2)])
    assert record
    assert (record.median_factor, record.explained) == (1.0, None)
