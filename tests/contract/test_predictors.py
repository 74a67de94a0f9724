from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant import plugins
from cotenant.core.model.estimate import Candidate, Observation, Query
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.policy.protocols import Predictor, Prepares

GOAL = LossGoal(target=1.0)
PREDICTORS = plugins.discover("cotenant.predictors")


@pytest.mark.parametrize("plugin", PREDICTORS, ids=[plugin.name for plugin in PREDICTORS])
def test_fitting_in_advance_gives_the_same_result_as_on_demand(plugin: plugins.Plugin) -> None:
    asked = Query("ann", "bert", "", 1000, 1, job_id="j", loss_goal=GOAL, candidates=(Candidate(2), Candidate(8)))
    answers = []
    for beforehand in (True, False):
        predictor: Predictor = plugin.make()
        for step in range(20, 1220, 20):
            cores, loss = 1 + step // 20 % 8, 2 / (1 + step / 1000) + 0.5
            seen = Observation("ann", "bert", "", 1000, 1, Candidate(cores), 2.0 * cores, 10.0, job_id="j", step=step)
            predictor.observe(replace(seen, loss=loss, loss_goal=GOAL))
        if beforehand and isinstance(predictor, Prepares):
            assert predictor.prepare(0) > 0
            while predictor.prepare(1):
                pass
        answers.append(predictor.estimate(asked))
    assert answers[0] == answers[1]
