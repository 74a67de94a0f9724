"""Which figures of a third-party predictor's answer are valid: shares from 0 to 1, and finite figures from 0."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cotenant.core.model.estimate import CandidateEstimate, Estimate, Latency
from cotenant.core.prediction.estimate_validation import invalid_reason

LATENCY = Latency(1)
JUDGED = CandidateEstimate(latency=LATENCY)
ANSWER = Estimate(predictable=True, candidates=(CandidateEstimate(), JUDGED))

TINY = 5e-324
SHARES = ([0.0, 0.5, 1.0], [-TINY, math.nextafter(1.0, 2.0), math.inf, math.nan])
FIGURES = ([None, 0.0, 1e300], [-TINY, math.inf, math.nan])


def with_figure(owner: object, name: str, figure: float | None) -> Estimate:
    """Return an answer in which one figure differs."""
    given: dict[str, Any] = {name: figure}
    if owner is ANSWER:
        return replace(ANSWER, **given)
    judged = replace(JUDGED, **given) if owner is JUDGED else replace(JUDGED, latency=replace(LATENCY, **given))
    return replace(ANSWER, candidates=(CandidateEstimate(), judged))


@pytest.mark.parametrize(
    ("owner", "name", "figures"),
    [
        (ANSWER, "confidence", SHARES),
        (ANSWER, "cores_useful_confidence", SHARES),
        *((ANSWER, name, FIGURES) for name in ("remaining_seconds", "remaining_p10_seconds", "remaining_p90_seconds")),
        (ANSWER, "cores_useful", FIGURES),
        (JUDGED, "confidence", SHARES),
        *((JUDGED, name, FIGURES) for name in ("rate_per_second", "remaining_seconds")),
        (LATENCY, "confidence", SHARES),
        *((LATENCY, name, FIGURES) for name in ("mean_seconds_max", "p95_seconds", "p99_seconds")),
        *((LATENCY, name, FIGURES) for name in ("promised_seconds", "replicas_needed")),
    ],
)
def test_a_figure_is_valid_to_both_ends_of_its_range_and_no_further(
    owner: object, name: str, figures: tuple[list[float | None], list[float]]
) -> None:
    valid, invalid = figures
    for figure in valid:
        assert invalid_reason(with_figure(owner, name, figure), candidates=2) == ""
    for figure in invalid:
        assert name in invalid_reason(with_figure(owner, name, figure), candidates=2)


@pytest.mark.parametrize(("judged", "asked", "valid"), [(0, 3, True), (3, 3, True), (2, 3, False), (4, 3, False)])
def test_either_all_candidates_are_judged_or_none(judged: int, asked: int, valid: bool) -> None:
    assert (invalid_reason(Estimate(candidates=(JUDGED,) * judged), asked) == "") == valid
