from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from cotenant.core.estimates import UNKNOWN, Candidate, CandidateEstimate, Estimate, Observation, Query
from cotenant.services.predictor.chain import Chain

QUERY = Query("ann", "bert", "", gpu_milli=1000, replicas=1, candidates=(Candidate(1), Candidate(2)))
SEEN = Observation("ann", "bert", "", 1000, 1, Candidate(1), rate_per_second=1.0)
SURE = Estimate(True, 0.9, remaining_seconds=60.0, source="looked it up")
UNSURE = Estimate(source="never saw it")


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
    assert chain.estimate(QUERY) == ("b", SURE)


def test_where_nobody_is_sure_the_first_one_says_why() -> None:
    assert Chain([Says("a", UNSURE), Says("b", Estimate(source="nor I"))]).estimate(QUERY) == ("a", UNSURE)


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
def test_a_predictor_whose_answer_cannot_be_is_named_and_passed_over(answer: Any, told: str) -> None:
    chain = Chain([Says("bad", answer), Says("good", SURE)])
    with capture_logs() as logs:
        assert chain.estimate(QUERY) == ("good", SURE)
        assert chain.estimate(QUERY) == ("good", SURE)
        chain.tell_failures()
        chain.tell_failures()
    (line,) = logs
    assert (line["event"], line["predictor"], line["count"]) == ("predictor_failed", "bad", 2)
    assert line["last_error"].startswith(told)


def test_where_all_fail_nothing_is_known() -> None:
    assert Chain([Says("bad", RuntimeError("boom"))]).estimate(QUERY) == ("nobody", UNKNOWN)


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


def test_many_are_answered_as_each_would_be_and_asked_about_once() -> None:
    first, second = SaysMany("a", UNSURE), SaysMany("b", SURE)
    chain = Chain([first, second, Says("c", SURE)])
    assert chain.estimate_many([QUERY] * 5) == [chain.estimate(QUERY)] * 5
    assert (first.calls, second.calls) == (1, 1)
    assert chain.estimate_many([]) == []


@pytest.mark.parametrize("many", [RuntimeError("boom"), [SURE], [None, None]])
def test_where_many_cannot_be_answered_each_is(many: Any) -> None:
    chain = Chain([SaysMany("a", SURE, many)])
    assert chain.estimate_many([QUERY, QUERY]) == [("a", SURE)] * 2
    with capture_logs() as logs:
        chain.tell_failures()
    assert "estimate_many" in logs[0]["last_error"]


def test_an_unsound_answer_among_many_is_passed_over_alone() -> None:
    chain = Chain([SaysMany("a", SURE, [SURE, Estimate(True, 1.5)]), Says("b", SURE)])
    assert chain.estimate_many([QUERY, QUERY]) == [("a", SURE), ("b", SURE)]
