from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant.core.model.estimate import (
    Candidate,
    CandidateEstimate,
    Estimate,
    Latency,
    Observation,
    OwnRate,
    Query,
)
from cotenant.core.policy.protocols import Predictor
from cotenant.core.prediction.chain import CONFIDENCE_MIN, NOBODY, Chain, by_own_rate, combined, with_allocations
from cotenant.core.prediction.estimate_validation import invalid_reason

QUERY = Query("ann", "bert", "", gpu_milli=1000, replicas=1, candidates=(Candidate(1), Candidate(2)))
SEEN = Observation("ann", "bert", "", 1000, 1, Candidate(1), rate_per_second=1.0)
SURE = Estimate(True, 0.9, remaining_seconds=60.0, source="looked it up")
UNSURE = Estimate(source="never saw it")


class Failed:
    """Remembers which predictors failed, and how."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __call__(self, predictor: Predictor, error: str) -> None:
        self.told.append((predictor.name, error))


def by(name: str, estimate: Estimate) -> Estimate:
    return replace(estimate, source=f"{name}: {estimate.source}")


class Says:
    """Always gives the same answer, or raises it."""

    api_version = 1

    def __init__(self, name: str, answer: Any) -> None:
        self.name, self.answer = name, answer
        self.seen: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.seen.append(observation)

    def estimate(self, query: Query) -> Estimate:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]  # some tests answer nonsense on purpose

    def dump(self) -> dict[str, bytes]:
        return {}

    def restore(self, records: object) -> list[str]:
        return []


def test_the_first_predictor_that_is_sure_speaks() -> None:
    chain = Chain([Says("a", UNSURE), Says("b", SURE), Says("c", Estimate(True, 1.0, remaining_seconds=1.0))])
    assert chain.estimate(QUERY) == by("b", SURE)


OWN = replace(QUERY, step=350, steps_total=400, own_rate=OwnRate(10.0, windows=4, spread=0.02))


@pytest.mark.parametrize("answer", [SURE, UNSURE])
def test_a_jobs_own_rate_comes_before_every_predictor(answer: Estimate) -> None:
    found = Chain([Says("a", answer)]).estimate(OWN)
    assert (found.predictable, found.remaining_seconds) == (True, 5.0)
    assert found.source == "progress: 50 steps left at 10 per second, its own rate over 4 windows"
    assert by_own_rate(found)


def test_a_rate_from_before_a_change_comes_after_every_predictor() -> None:
    changed = replace(OWN, own_rate=OwnRate(10.0, windows=0))
    assert Chain([Says("a", SURE)]).estimate(changed) == by("a", SURE)
    found = Chain([Says("a", UNSURE)]).estimate(changed)
    assert found.remaining_seconds == 5.0
    assert found.source == "progress: 50 steps left at 10 per second, its own rate from before it changed"


def test_theta_and_rates_still_come_from_the_predictors() -> None:
    rates = (CandidateEstimate(2.0, confidence=0.9), CandidateEstimate(4.0, confidence=0.9))
    answer = replace(SURE, cores_useful=6, cores_useful_confidence=0.9, candidates=rates)
    found = Chain([Says("a", answer)]).estimate(OWN)
    assert (found.remaining_seconds, found.cores_useful) == (5.0, 6)
    assert [one.remaining_seconds for one in found.candidates] == [25.0, 12.5]
    assert found.source.endswith("; θ by a; rates by a")


class ReadsSteps(Says):
    """Divides the remaining steps by ten."""

    def estimate(self, query: Query) -> Estimate:
        left = query.steps_total - query.step
        return Estimate(True, 0.9, left / 10, source="steps") if left else UNSURE


def test_steps_of_a_job_that_stopped_reporting_are_no_longer_divided_by_any_rate() -> None:
    assert OWN.own_rate
    chain = Chain([ReadsSteps("a", None)])
    assert chain.estimate(replace(OWN, own_rate=None)).remaining_seconds == 5.0
    silent = chain.estimate(replace(OWN, own_rate=replace(OWN.own_rate, silent_seconds=700.0)))
    assert (silent.predictable, silent.remaining_seconds) == (False, None)
    assert silent.source == "progress: its last step, 350 of 400, was 12 min ago"
    assert Chain([Says("b", SURE)]).estimate(replace(OWN, own_rate=replace(OWN.own_rate, silent_seconds=700.0))) == (
        by("b", SURE)
    )


def test_if_no_predictor_is_confident_the_first_gives_the_reason() -> None:
    assert Chain([Says("a", UNSURE), Says("b", Estimate(source="nor I"))]).estimate(QUERY) == by("a", UNSURE)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (RuntimeError("boom"), "estimate: RuntimeError: boom"),
        (None, "estimate: AttributeError: "),
        (Estimate(True, 1.5), "estimate: confidence is 1.5"),
        (Estimate(True, math.nan), "estimate: confidence is nan"),
        (Estimate(True, 0.5, remaining_seconds=math.nan), "estimate: remaining_seconds is nan"),
        (Estimate(True, 0.5, remaining_p10_seconds=-1), "estimate: remaining_p10_seconds is -1"),
        (Estimate(True, 0.5, remaining_p90_seconds=math.inf), "estimate: remaining_p90_seconds is inf"),
        (Estimate(True, 0.5, cores_useful=-1), "estimate: cores_useful is -1"),
        (Estimate(True, 0.5, candidates=(CandidateEstimate(),)), "estimate: 1 candidates are judged, not 2"),
        (Estimate(True, 0.5, candidates=(CandidateEstimate(math.nan),) * 2), "estimate: a candidate's estimate is "),
    ],
)
def test_a_predictor_with_an_invalid_answer_is_reported_and_skipped(answer: Any, told: str) -> None:
    failed = Failed()
    chain = Chain([Says("bad", answer), Says("good", SURE)], failed)
    assert chain.estimate(QUERY) == by("good", SURE)
    ((name, error),) = failed.told
    assert name == "bad"
    assert error.startswith(told)


def test_where_all_fail_nothing_is_known() -> None:
    assert Chain([Says("bad", RuntimeError("boom"))]).estimate(QUERY) == NOBODY


def test_all_predictors_learn_even_behind_one_that_fails() -> None:
    bad, good = Says("bad", RuntimeError("boom")), Says("good", SURE)
    Chain([bad, good]).observe(SEEN)
    assert good.seen == [SEEN]


@pytest.mark.parametrize(
    ("names", "complaint"), [((), "at least one predictor is needed"), (("a", "b", "a"), "'a' is named twice")]
)
def test_a_chain_that_makes_no_sense_is_refused(names: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Chain([Says(name, SURE) for name in names])


class SaysMany(Says):
    """Answers all at once; `many` replaces those answers where it is given."""

    def __init__(self, name: str, answer: Any, many: Any = None) -> None:
        super().__init__(name, answer)
        self.many, self.calls = many, 0

    def estimate_many(self, queries: Sequence[Query]) -> list[Estimate]:
        self.calls += 1
        if isinstance(self.many, Exception):
            raise self.many
        return self.many if self.many is not None else [self.estimate(query) for query in queries]


def test_a_batch_query_gives_the_same_answers_in_one_call() -> None:
    first, second = SaysMany("a", UNSURE), SaysMany("b", SURE)
    chain = Chain([first, second, Says("c", SURE)])
    told = chain.estimate_many([QUERY] * 5)
    assert (first.calls, second.calls) == (1, 1)
    assert told == [chain.estimate(QUERY)] * 5
    assert chain.estimate_many([]) == []


@pytest.mark.parametrize("gone", [0, 50])
def test_the_same_answers_about_as_many_steps_left_are_combined_once(gone: int) -> None:
    rates = (CandidateEstimate(2.0, confidence=0.9), CandidateEstimate())
    answer = Estimate(source="rates", candidates=rates)
    chain, query = Chain([Says("a", answer)]), replace(QUERY, step=100, steps_total=1000)
    first = chain.estimate(query)
    assert first.remaining_seconds == 450.0
    assert chain.estimate(replace(query, step=100 + gone, steps_total=1000 + gone, run_seconds=7.0)) is first
    others = [replace(query, step=200), replace(query, steps_total=1200), replace(query, step=900, steps_total=200)]
    for other in others:
        assert chain.estimate(other) == Chain([Says("a", answer)]).estimate(other)


@pytest.mark.parametrize("many", [RuntimeError("boom"), [SURE], [None, None]])
def test_where_many_cannot_be_answered_each_is(many: Any) -> None:
    failed = Failed()
    chain = Chain([SaysMany("a", SURE, many)], failed)
    assert chain.estimate_many([QUERY, QUERY]) == [by("a", SURE)] * 2
    assert "estimate_many" in failed.told[0][1]


def test_an_unsound_answer_among_many_is_passed_over_alone() -> None:
    chain = Chain([SaysMany("a", SURE, [SURE, Estimate(True, 1.5)]), Says("b", SURE)])
    assert chain.estimate_many([QUERY, QUERY]) == [by("a", SURE), by("b", SURE)]


# What is put together ------------------------------------------------------------------------------------------------

ASKED = Query("ann", "bert", "", 2000, 2, cores=4, steps_total=1000, candidates=(Candidate(4), Candidate(8)))
CONFIDENCES = st.floats(0, 1)
FIGURES = st.floats(0.001, 1e6)


@st.composite
def judgements(draw: st.DrawFn) -> CandidateEstimate:
    rate = draw(st.none() | FIGURES)
    rest = draw(st.none() | FIGURES) if rate else None
    latency = draw(st.none() | st.builds(Latency, st.just(2), p99_seconds=FIGURES, confidence=CONFIDENCES))
    return CandidateEstimate(rate, rest, draw(CONFIDENCES) if rate else 0.0, latency)


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    predictable = draw(st.booleans())
    useful = draw(st.none() | st.integers(1, 64))
    judged = draw(st.just(()) | st.tuples(judgements(), judgements()))
    rest = draw(FIGURES) if predictable else None
    confidence = draw(st.floats(CONFIDENCE_MIN, 1)) if predictable else 0.0
    surely = draw(CONFIDENCES) if useful else 0.0
    return Estimate(predictable, confidence, rest, None, None, useful, judged, "so", surely)


TOLD = st.lists(estimates(), min_size=1, max_size=4).map(
    lambda told: [(f"p{number}", estimate) for number, estimate in enumerate(told)]
)
STEPS = st.sampled_from((0, 1000))


@given(TOLD, STEPS)
def test_nothing_is_made_up(told: list[tuple[str, Estimate]], steps: int) -> None:
    asked = replace(ASKED, steps_total=steps)
    both, said = combined(told, asked), [estimate for _, estimate in told]
    assert invalid_reason(both, 2) == ""
    assert both.cores_useful in {one.cores_useful for one in said}
    for place, judged in enumerate(both.candidates):
        ones = [one.candidates[place] for one in said if one.candidates]
        known = [one for one in ones if one.rate_per_second is not None]
        if known:
            surest = max(one.confidence for one in known)
            assert judged.rate_per_second in {one.rate_per_second for one in known if one.confidence == surest}
            assert judged.confidence <= surest
        else:
            assert judged.rate_per_second is None
            assert judged.remaining_seconds is None
        assert judged.latency in [one.latency for one in ones]
        if judged.remaining_seconds is not None and judged.rate_per_second:
            left = [(one.remaining_seconds or 0) * (one.rate_per_second or 0) for one in known]
            assert any(math.isclose(judged.remaining_seconds * judged.rate_per_second, one) for one in (*left, steps))
    if both.predictable:
        told_by = [one.confidence for one in said if one.predictable]
        rates = [one.confidence for one in both.candidates]
        assert both.confidence in (told_by[:1] or rates)


@given(TOLD, STEPS)
def test_order_decides_only_the_remaining_time_if_confidences_differ(
    told: list[tuple[str, Estimate]], steps: int
) -> None:
    asked = replace(ASKED, steps_total=steps)

    def rates(estimate: Estimate) -> list[tuple[float | None, float | None]]:
        return [(one.rate_per_second, one.confidence) for one in estimate.candidates]

    alike = [one.cores_useful_confidence for _, one in told if one.cores_useful]
    alike += [one.confidence for _, estimate in told for one in estimate.candidates if one.rate_per_second]
    if len(set(alike)) < len(alike):
        return
    first = combined(told, asked)
    for others in permutations(told):
        other = combined(others, asked)
        assert (other.cores_useful, other.predictable) == (first.cores_useful, first.predictable)
        assert rates(other) == rates(first)


@given(TOLD)
def test_exactly_the_contributing_predictors_are_named(told: list[tuple[str, Estimate]]) -> None:
    both = combined(told, ASKED)
    alone = [name for name, one in told if one.predictable] or [told[0][0]]
    if len(told) == 1:
        assert both.source.startswith("p0: ")
    for name, one in told:
        if name in both.source:
            speaks = name == alone[0] or both.cores_useful == one.cores_useful
            assert speaks or any(judged != CandidateEstimate() for judged in one.candidates)


def test_if_none_is_confident_steps_are_divided_by_the_most_confident_rate() -> None:
    slow, fast = CandidateEstimate(2.0, None, 0.6), CandidateEstimate(4.0, None, 0.9)
    unsure = Estimate(candidates=(CandidateEstimate(), CandidateEstimate(9.0, None, 0.1)), source="unsure")
    scaling = Estimate(candidates=(slow, fast), source="a fit")
    told = combined([("loss-curve", unsure), ("scaling", scaling)], ASKED)
    assert (told.predictable, told.remaining_seconds, told.confidence) == (True, 500.0, 0.6)
    assert told.source == "scaling: 1000 steps left at 2 per second"
    assert [one.remaining_seconds for one in told.candidates] == [500.0, 250.0]
    doubtful = Estimate(candidates=(replace(slow, confidence=0.4), fast))
    assert not combined([("scaling", doubtful)], ASKED).predictable


def test_steps_derived_from_a_time_limit_the_confidence_of_another_rate() -> None:
    curve = Estimate(candidates=(CandidateEstimate(2.0, 50.0, 0.6),))
    past = Estimate(candidates=(CandidateEstimate(4.0, None, 0.9),))
    asked = replace(ASKED, steps_total=0, candidates=(Candidate(4),))
    (one,) = combined([("loss-curve", curve), ("history", past)], asked).candidates
    assert one == CandidateEstimate(4.0, 25.0, 0.6)


def test_a_judgement_can_tell_its_allocation() -> None:
    told = with_allocations(Estimate(candidates=(CandidateEstimate(2.0), CandidateEstimate(3.0))), ASKED)
    assert [one.allocation for one in told.candidates] == list(ASKED.candidates)


@given(st.floats(), st.sampled_from(["remaining_seconds", "remaining_p10_seconds", "remaining_p90_seconds"]))
@example(0.0, "remaining_seconds")
def test_any_time_that_is_finite_and_not_negative_is_valid(seconds: float, name: str) -> None:
    answer = Estimate(True, 1.0, **{name: seconds})  # type: ignore[arg-type]  # a time
    assert (invalid_reason(answer, 0) == "") == (0 <= seconds < math.inf)


def test_the_remaining_steps_of_a_job_say_nothing_of_another_phase() -> None:
    told = [("p", Estimate(candidates=(CandidateEstimate(10.0), CandidateEstimate(20.0))))]
    steps = replace(ASKED, steps_total=1000, step=200)
    assert [one.remaining_seconds for one in combined(told, steps).candidates] == [80.0, 40.0]
    validation = replace(steps, phase="validation")
    assert [one.remaining_seconds for one in combined(told, validation).candidates] == [None, None]


def test_of_several_latencies_that_of_the_first_predictor_counts() -> None:
    told = [
        (name, Estimate(candidates=(CandidateEstimate(latency=Latency(2, p99_seconds=seconds)), CandidateEstimate())))
        for name, seconds in (("first", 1.0), ("second", 2.0))
    ]
    (latency, none) = [one.latency for one in combined(told, ASKED).candidates]
    assert latency is not None
    assert (latency.p99_seconds, none) == (1.0, None)
