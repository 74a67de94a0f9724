from __future__ import annotations

import math

import numpy as np
import pytest

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.policy.options import BadOption, parse
from cotenant.policies.parameter_server import EVEN, TEAMS_MAX, ParameterServer, Team, slowness

TEAMS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 2), (8, 4))


def truth(workers: int, servers: int, cores: int = 4, server_cores: int = 2) -> float:
    slow = slowness(cores, (0.8, 0.5))
    serving = 0.1 + 0.1 * slowness(server_cores, EVEN)
    return slow * (4.0 / workers + 0.5) + serving * workers / servers + 0.01 * workers + 0.02 * servers


def timed(seconds: float, workers: int, servers: int, cores: int = 4, **about: object) -> Observation:
    given = {"user": "ann", "model": "dnn", "name": "", "phase": "", **about}
    seen = Candidate(
        cores, 1000, gpu_type=str(given.pop("gpu_type", "")), workers=workers, servers=servers, server_cores=2
    )
    rate = 1 / seconds if seconds else 0.0
    return Observation(
        gpu_milli=1000 * workers,
        replicas=workers + servers,
        allocation=seen,
        rate_per_second=rate,
        **given,  # type: ignore[arg-type]  # by name
    )


def profiled(count: int = len(TEAMS), noise: float = 0.0) -> list[Observation]:
    rng = np.random.default_rng(3)
    return [timed(truth(*team) * (1 + noise * rng.standard_normal()), *team) for team in TEAMS[:count]]


def taught(*seen: Observation) -> ParameterServer:
    predictor = ParameterServer()
    for observation in seen:
        predictor.observe(observation)
    return predictor


def asked(predictor: ParameterServer, workers: int, servers: int, cores: int = 4, **about: object) -> Estimate:
    candidate = Candidate(cores, 1000, workers=workers, servers=servers, server_cores=2)
    given = {"user": "ann", "model": "dnn", "name": "", "gpu_milli": 4000, "replicas": 6, **about}
    return predictor.estimate(Query(candidates=(candidate,), **given))  # type: ignore[arg-type]  # by name


def seconds_and_confidence(estimate: Estimate) -> tuple[float, float]:
    (judged,) = estimate.candidates
    assert judged.rate_per_second
    return 1 / judged.rate_per_second, judged.confidence


@pytest.mark.parametrize("team", [(3, 1), (4, 3), (6, 2), (4, 4), (5, 4)])
def test_teams_between_measured_ones_are_predicted(team: tuple[int, int]) -> None:
    seconds, confidence = seconds_and_confidence(asked(taught(*profiled()), *team))
    assert seconds == pytest.approx(truth(*team), rel=0.03)
    assert confidence > 0.5
    noisy, _ = seconds_and_confidence(asked(taught(*profiled(noise=0.02)), *team))
    assert noisy == pytest.approx(truth(*team), rel=0.1)


def test_below_five_teams_a_job_is_unpredictable() -> None:
    estimate = asked(taught(*profiled(4), *profiled(4)), 4, 2, steps_total=100)
    assert (estimate.predictable, estimate.candidates[0].rate_per_second) == (False, None)
    assert estimate.source == "4 teams of workers and parameter servers observed; 5 are needed"
    assert asked(taught(*profiled(5)), 4, 2, steps_total=100).candidates[0].rate_per_second


def test_far_from_what_was_measured_it_is_less_sure() -> None:
    predictor = taught(*profiled())
    near, far = (seconds_and_confidence(asked(predictor, *team))[1] for team in ((4, 2), (64, 1)))
    assert far < near
    other_cores = seconds_and_confidence(asked(predictor, 4, 2, cores=1))[1]
    assert other_cores < 0.5 < near, "the cores never varied"


def test_varied_cores_are_predicted() -> None:
    seen = [timed(truth(*team, cores), *team, cores) for team in TEAMS for cores in (1, 2, 8)]
    seconds, confidence = seconds_and_confidence(asked(taught(*seen), 4, 3, cores=4))
    assert seconds == pytest.approx(truth(4, 3, 4), rel=0.05)
    assert confidence > 0.9


def test_remaining_steps_give_the_remaining_time() -> None:
    estimate = asked(taught(*profiled()), 4, 2, step=100, steps_total=1100)
    assert estimate.predictable
    assert estimate.remaining_seconds == pytest.approx(1000 * truth(4, 2), rel=0.03)
    assert estimate.remaining_p10_seconds < estimate.remaining_seconds < estimate.remaining_p90_seconds  # type: ignore[operator]  # told above


def test_jobs_without_parameter_servers_are_left_to_others() -> None:
    predictor = taught(*profiled())
    alone = Observation("ann", "dnn", "", 1000, 1, Candidate(4, 1000), rate_per_second=1.0)
    predictor.dump()
    predictor.observe(alone)
    assert predictor.dump() == {}
    estimate = predictor.estimate(Query("ann", "dnn", "", 1000, 1, candidates=(Candidate(4, 1000),), steps_total=10))
    assert (estimate.predictable, estimate.candidates[0].rate_per_second) == (False, None)


def test_the_order_of_windows_does_not_matter() -> None:
    seen = profiled(noise=0.05)
    assert asked(taught(*seen), 3, 2) == asked(taught(*reversed(seen)), 3, 2)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_an_invalid_rate_is_rejected_completely(rate: float) -> None:
    predictor = ParameterServer()
    seen = Candidate(4, 1000, workers=1, servers=1)
    with pytest.raises(ValueError, match="a rate must be positive and finite"):
        predictor.observe(Observation("ann", "dnn", "", 1000, 2, seen, rate_per_second=rate))
    with pytest.raises(ValueError, match="invalid job"):
        predictor.observe(Observation("ann", "dnn", "", 1000, 2, Candidate(4, servers=-1), rate_per_second=1.0))
    predictor.observe(timed(0.0, 1, 1))
    predictor.observe(timed(1.0, 1, 1, phase="validation"))
    assert predictor.dump() == {}


@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b"7",
        b'{"key":["a"],"rates":[]}',
        b'{"key":["a","b"],"rates":[["",0,1,4,2,1,[1]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,-4,2,1,[1]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,4,2,NaN,[1]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,4,2,1,[NaN]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,4,2,1,[0]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,4,2,1]]}',
    ],
)
def test_a_record_that_cannot_be_read_is_named_and_the_others_serve(record: bytes) -> None:
    before, after = taught(*profiled()), ParameterServer()
    assert after.restore({"bad": record, **before.dump()}) == ["bad"]
    assert asked(after, 3, 2, steps_total=10) == asked(before, 3, 2, steps_total=10)


def test_memory_of_one_job_class_is_bounded() -> None:
    seen = [timed(1.0, workers, servers) for workers in range(1, 15) for servers in range(1, 15)]
    (record,) = taught(*seen).dump().values()
    assert record.count(b"[1.0]") == TEAMS_MAX


def test_options_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(BadOption) as caught:
        parse(ParameterServer.Options, {"kinds_max": "0", "confidence_min": "2"})
    assert {violation.field for violation in caught.value.violations} == {"kinds_max", "confidence_min"}


def test_a_role_with_enough_cores_is_not_slowed() -> None:
    assert slowness(100, (0.95, 0.5)) == pytest.approx(1.0)
    assert slowness(1, (0.95, 0.5)) > slowness(2, (0.95, 0.5)) > 1
    assert Team(4, 2, 0, 0, 4.0).features((0.8, 0.5), (0.8, 0.5)) == (0.25, 1.0, 2.0, 2.0, 4.0, 2.0, 4.0)
