"""Laws of predictors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.estimate_worlds import observations, queries
from cotenant.conformance.trials import tried
from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.policy.protocols import Predictor, Prepares

GOAL = LossGoal(target=1.0)


@tried()
@given(st.lists(observations, max_size=20), queries)
def test_an_estimate_makes_sense_and_survives_a_restart(
    plugin: plugins.Plugin, seen: list[Observation], query: Query
) -> None:
    """An estimate has a source, a confidence from 0 to 1 and ordered percentiles, and is the same after a restart."""
    predictor: Predictor = plugin.make()
    for observation in seen:
        predictor.observe(observation)
    estimate = predictor.estimate(query)
    assert estimate.source
    assert 0 <= estimate.confidence <= 1
    assert len(estimate.candidates) == len(query.candidates)
    if estimate.predictable:
        assert estimate.remaining_seconds is not None
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        assert (low or 0) <= estimate.remaining_seconds <= (math.inf if high is None else high)
        assert math.isfinite(estimate.remaining_seconds)
    else:
        assert (estimate.remaining_seconds, estimate.confidence) == (None, 0.0)
    restarted: Predictor = plugin.make()
    assert restarted.restore(predictor.dump()) == []
    assert restarted.estimate(query) == estimate
    assert predictor.dump() == {}, "nothing has changed since the last dump"


def test_an_unknown_job_has_no_estimate(plugin: plugins.Plugin) -> None:
    """A job of which nothing is known has no estimate, and a source that says so."""
    estimate = plugin.make().estimate(Query("ann", "bert", "", gpu_milli=1000, replicas=1))
    assert not estimate.predictable
    assert (estimate.remaining_seconds, estimate.cores_useful, estimate.candidates) == (None, None, ())
    assert estimate.source


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["rate_per_second", "run_seconds"])
def test_an_observation_with_an_invalid_value_is_rejected(plugin: plugins.Plugin, field: str, figure: float) -> None:
    """An observation with an invalid value raises ValueError, and nothing is learned from it."""
    predictor: Predictor = plugin.make()
    sound = Observation("ann", "bert", "", 1000, 1, Candidate(4), rate_per_second=1.0, run_seconds=9.0, succeeded=True)
    with pytest.raises(ValueError, match="positive and finite"):
        predictor.observe(replace(sound, **{field: figure}))  # type: ignore[arg-type]  # by name
    assert predictor.dump() == {}


@tried()
@given(st.dictionaries(st.text(max_size=5), st.binary(min_size=1, max_size=30), max_size=3))
def test_unreadable_records_are_named(plugin: plugins.Plugin, records: dict[str, bytes]) -> None:
    """Records that cannot be read are named."""
    assert set(plugin.make().restore(records)) == set(records)


def following() -> list[Observation]:
    """Windows of a job whose rate grows with its cores, and whose loss falls."""
    seen = []
    for step in range(20, 1220, 20):
        cores, loss = 1 + step // 20 % 8, 2 / (1 + step / 1000) + 0.5
        one = Observation("ann", "bert", "", 1000, 1, Candidate(cores), 2.0 * cores, 10.0, job_id="j", step=step)
        seen.append(replace(one, loss=loss, loss_goal=GOAL))
    return seen


def test_a_job_is_predictable_from_the_least_confidence_on(plugin: plugins.Plugin) -> None:
    """A job is predictable from the confidence on that the option `confidence_min` names."""
    if "confidence_min" not in plugin.options or plugin.name == "lightgbm-duration":
        return  # without a model, `history` answers, with its own least confidence
    query = Query("ann", "bert", "", 1000, 1, cores=8, steps_total=5000, job_id="j", candidates=(Candidate(8),))

    def told(least: float) -> Estimate:
        predictor: Predictor = plugin.make({"confidence_min": repr(least)})
        for observation in following():
            predictor.observe(observation)
        return predictor.estimate(query)

    sure = told(0.0)
    assert told(sure.confidence) == sure
    assert not told(math.nextafter(sure.confidence, 2.0)).predictable


def test_fitting_in_advance_gives_the_same_result_as_on_demand(plugin: plugins.Plugin) -> None:
    """Fitting in advance gives the same estimate as fitting on demand."""
    asked = Query("ann", "bert", "", 1000, 1, job_id="j", loss_goal=GOAL, candidates=(Candidate(2), Candidate(8)))
    answers = []
    for beforehand in (True, False):
        predictor: Predictor = plugin.make()
        for observation in following():
            predictor.observe(observation)
        if beforehand and isinstance(predictor, Prepares):
            assert predictor.prepare(0) > 0
            while predictor.prepare(1):
                pass
        answers.append(predictor.estimate(asked))
    assert answers[0] == answers[1]
