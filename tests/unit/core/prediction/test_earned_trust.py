"""Trust by record: never narrower or surer than told, the same for the same jobs, and lost by wrong predictors."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import UNKNOWN, Estimate, as_of
from cotenant.core.prediction.earned_trust import JOBS_ENOUGH, WINDOW, EarnedTrust, JudgedPrediction, JudgedPredictions

times = st.floats(1.0, 1e7)
predictions = st.builds(
    JudgedPrediction,
    st.integers(0, 50).map(float),
    st.uuids().map(str),
    st.sampled_from(["history", "progress"]),
    st.sampled_from(["a", "b"]),
    times,
    times,
)


def judged(*several: JudgedPrediction, jobs_max: int = 1000) -> JudgedPredictions:
    found = JudgedPredictions(jobs_max)
    for one in several:
        found.add(one)
    return found


def off_by(ratio: float, count: int, tenant: str = "a", first: int = 0, source: str = "history") -> JudgedPredictions:
    return judged(*made(ratio, count, tenant, first, source))


def made(
    ratio: float, count: int, tenant: str = "a", first: int = 0, source: str = "history"
) -> list[JudgedPrediction]:
    """Return predictions of 100 s for jobs that ran for `ratio` times as long."""
    return [
        JudgedPrediction(float(number), f"{tenant}{number}", source, tenant, 100.0, 100.0 * ratio)
        for number in range(first, first + count)
    ]


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    low, middle, high = sorted(draw(st.tuples(times, times, times)))
    bounds = draw(st.sampled_from([(low, high), (None, None), (low, None), (None, high)]))
    return Estimate(True, draw(st.floats(0, 1)), middle, *bounds, source="history: told")


@given(st.lists(predictions, max_size=60), estimates(), times | st.just(0.0), st.sampled_from(["a", "b", "c"]))
def test_an_estimate_is_never_narrower_or_surer_than_told(
    several: list[JudgedPrediction], told: Estimate, ran: float, tenant: str
) -> None:
    trust = judged(*several).trust("history", tenant)
    found = trust.limit(told, ran)
    assert found.remaining_seconds == told.remaining_seconds
    middle = told.remaining_seconds or 0.0
    told_low, told_high = told.remaining_p10_seconds, told.remaining_p90_seconds
    low, high = found.remaining_p10_seconds, found.remaining_p90_seconds
    assert 0 <= (middle if low is None else low) <= (middle if told_low is None else told_low)
    assert (middle if high is None else high) >= (middle if told_high is None else told_high)
    assert found.confidence <= min(told.confidence, trust.confidence_max + 1e-12)
    assert 0 <= trust.confidence_max <= 1 + 1e-12
    own = [one for one in sorted(several) if (one.source, one.tenant) == ("history", tenant)][-WINDOW:]
    if len(own) >= JOBS_ENOUGH:  # then it is at least as wide as the usual ratios
        assert (middle if high is None else high) >= (ran + middle) * trust.ratio_p90 - ran - 1e-6 * (ran + middle)


@given(st.lists(predictions, max_size=60, unique_by=lambda one: one.job_id), st.randoms(use_true_random=False))
def test_the_same_jobs_give_the_same_record(several: list[JudgedPrediction], random: Random) -> None:
    shuffled = random.sample(several, len(several)) + several[:3]
    one, other = judged(*several, jobs_max=20), judged(*shuffled, jobs_max=20)
    backwards = JudgedPredictions(20)
    for prediction in sorted(several, reverse=True):  # as a new leader reads them
        if backwards.full:
            break
        backwards.add(prediction)
    for source in ("history", "progress"):
        for tenant in ("", "a", "b", "nobody"):
            assert one.trust(source, tenant) == other.trust(source, tenant) == backwards.trust(source, tenant)
    assert one.sources == other.sources


def test_without_a_record_a_predictor_is_believed() -> None:
    told = Estimate(True, 0.9, 60.0, 50.0, source="history")
    trust = judged().trust("history", "a")
    assert trust.limit(told) == told
    assert trust.in_words() == "history: none of its predictions has been judged yet"
    assert trust.limit(UNKNOWN) is UNKNOWN


def test_a_wrong_predictor_loses_its_word_within_ten_jobs() -> None:
    told = Estimate(True, 0.9, 100.0, 90.0, 110.0, source="history")
    after = [off_by(5.0, count).trust("history", "a").limit(told) for count in (0, 1, 5, 10)]
    assert [one.confidence for one in after] == pytest.approx([0.9, 0.9 * 0.9, 0.5 * 0.5, 0.0])
    assert [one.remaining_p90_seconds for one in after] == pytest.approx([110.0, 100 * 5**0.19, 100 * 5**0.75, 500.0])
    assert {one.remaining_p10_seconds for one in after} == {90.0}


def test_a_predictor_that_is_right_again_regains_it() -> None:
    known = judged(*made(5.0, WINDOW), *made(1.0, WINDOW, first=WINDOW))
    assert known.trust("history", "a").confidence_max == 1.0


def test_a_tenant_starts_from_the_record_over_all_tenants() -> None:
    known = judged(*made(4.0, 20, "a"), *made(1.0, 5, "b", first=100))
    newcomer, some, own = (known.trust("history", tenant) for tenant in ("c", "b", "a"))
    assert newcomer == known.trust("history")
    assert newcomer.confidence_max == pytest.approx(0.2)
    assert some.confidence_max == pytest.approx(0.5 + 0.5 * 0.2)  # half of its record is missing
    assert (own.confidence_max, own.tenant) == (0.0, "a")
    assert (some.tenant, some.record) == ("", newcomer.record)  # the record that decided more
    assert own.ratio_p90 == pytest.approx(4.0)
    assert known.trust("progress", "a") == EarnedTrust("progress")


def test_errors_are_of_total_run_times() -> None:
    trust = off_by(2.0, 20).trust("history", "a")
    told = trust.limit(Estimate(True, 0.9, 10.0), ran_seconds=90.0)
    assert told.remaining_p90_seconds == pytest.approx(110.0)
    assert as_of(told, 50.0).remaining_p90_seconds == pytest.approx(60.0)
    early = off_by(0.5, 20).trust("history", "a").limit(Estimate(True, 0.9, 10.0), ran_seconds=90.0)
    assert early.remaining_p10_seconds == 0.0


def test_an_interval_has_two_ends() -> None:
    told = off_by(0.5, 20).trust("history", "a").limit(Estimate(True, 0.9, 100.0))
    assert (told.remaining_p10_seconds, told.remaining_p90_seconds) == (50.0, 100.0)


def test_memory_is_bounded_and_impossible_times_are_ignored() -> None:
    known = judged(*made(4.0, 30), *made(1.0, 10, "b", first=100), jobs_max=10)
    assert known.trust("history", "a") == known.trust("history") != EarnedTrust("history")
    assert known.sources == ["history"]
    for times in ((math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)):
        known.add(JudgedPrediction(200.0, "x", "progress", "a", *times))
    assert known.sources == ["history"]


def test_the_record_in_words() -> None:
    assert off_by(1.3, 50).trust("history", "a").in_words() == (
        "history: of its last 40 predictions for tenant a, half were off by at most 1.3×, 100 % by at most 2×"
    )
