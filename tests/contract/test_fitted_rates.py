"""Predictors that fit rates say how far off they may be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cotenant import plugins
from cotenant.core.model.estimate import Candidate, Observation, Query
from cotenant.core.policy.protocols import Predictor


@pytest.mark.parametrize("name", ["parameter-server", "scaling", "xiao-piecewise"])
def test_percentiles_of_a_fitted_rate_are_as_far_apart_as_the_confidence_says(name: str) -> None:
    """The rate's error is normal, and the confidence is the chance that it is at most 15 %."""
    predictor: Predictor = plugins.load("cotenant.predictors", name, {"confidence_min": "0"})
    teams = [Candidate(4, 1000, workers=workers, servers=servers) for workers in (1, 2, 4) for servers in (1, 2)]
    for number, team in enumerate(teams):
        predictor.observe(Observation("ann", "bert", "", 1000, 1, team, 8.0 + number % 3, 10.0))
    for team in (teams[0], replace(teams[0], workers=16), replace(teams[0], nodes=2)):
        wider = 1 if name == "parameter-server" else team.workers
        told = predictor.estimate(Query("ann", "bert", "", 1000 * wider, wider, steps_total=900, candidates=(team,)))
        if told.remaining_seconds is None or told.remaining_p10_seconds is None:
            continue
        off = (told.remaining_seconds / told.remaining_p10_seconds - 1) / 1.2816
        assert told.confidence == pytest.approx(math.erf(0.15 / off / math.sqrt(2)), abs=0.001)
        assert told.remaining_p90_seconds == pytest.approx(told.remaining_seconds / max(1 - 1.2816 * off, 0.1))
