from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cotenant import plugins
from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.policy.protocols import Predictor, Prepares

GOAL = LossGoal(target=1.0)
PREDICTORS = plugins.discover("cotenant.predictors")


def following() -> list[Observation]:
    """Windows of a job whose rate grows with its cores, and whose loss falls."""
    seen = []
    for step in range(20, 1220, 20):
        cores, loss = 1 + step // 20 % 8, 2 / (1 + step / 1000) + 0.5
        one = Observation("ann", "bert", "", 1000, 1, Candidate(cores), 2.0 * cores, 10.0, job_id="j", step=step)
        seen.append(replace(one, loss=loss, loss_goal=GOAL))
    return seen


@pytest.mark.parametrize("plugin", PREDICTORS, ids=[plugin.name for plugin in PREDICTORS])
def test_a_job_is_predictable_from_the_least_confidence_on(plugin: plugins.Plugin) -> None:
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


@pytest.mark.parametrize("plugin", PREDICTORS, ids=[plugin.name for plugin in PREDICTORS])
def test_fitting_in_advance_gives_the_same_result_as_on_demand(plugin: plugins.Plugin) -> None:
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


@pytest.mark.parametrize("plugin", PREDICTORS, ids=[plugin.name for plugin in PREDICTORS])
def test_percentiles_of_a_fitted_rate_are_as_far_apart_as_the_confidence_says(plugin: plugins.Plugin) -> None:
    """The rate's error is normal, and the confidence is the chance that it is at most 15 %."""
    if plugin.name not in ("parameter-server", "scaling", "xiao-piecewise"):
        return
    predictor: Predictor = plugin.make({"confidence_min": "0"})
    teams = [Candidate(4, 1000, workers=workers, servers=servers) for workers in (1, 2, 4) for servers in (1, 2)]
    for number, team in enumerate(teams):
        predictor.observe(Observation("ann", "bert", "", 1000, 1, team, 8.0 + number % 3, 10.0))
    for team in (teams[0], replace(teams[0], workers=16), replace(teams[0], nodes=2)):
        wider = 1 if plugin.name == "parameter-server" else team.workers
        told = predictor.estimate(Query("ann", "bert", "", 1000 * wider, wider, steps_total=900, candidates=(team,)))
        if told.remaining_seconds is None or told.remaining_p10_seconds is None:
            continue
        off = (told.remaining_seconds / told.remaining_p10_seconds - 1) / 1.2816
        assert told.confidence == pytest.approx(math.erf(0.15 / off / math.sqrt(2)), abs=0.001)
        assert told.remaining_p90_seconds == pytest.approx(told.remaining_seconds / max(1 - 1.2816 * off, 0.1))
