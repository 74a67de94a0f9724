from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from cotenant.core.model.estimate import Candidate, Estimate, Latency, Observation, Query
from cotenant.core.model.job import Qos
from cotenant.core.policy.options import BadOption, parse
from cotenant.policies.latency import LatencyModel

HELD = Candidate(cores=4, gpu_milli=1000)
PROMISE = Qos(latency_seconds=0.03, latency_percentile=99.0, arrivals_per_second=900.0)


def batch(size: int, *, slower: float = 1.0, held: Candidate = HELD, model: str = "bert") -> Observation:
    seconds = slower * (0.01 + 0.001 * size)
    return Observation("ann", model, "", 1000, 1, held, batch_size=size, batch_seconds=seconds)


def taught(*seen: Observation, **options: str) -> LatencyModel:
    model = LatencyModel(parse(LatencyModel.Options, options))
    for observation in seen:
        model.observe(observation)
    return model


BATCHES = [batch(size) for size in (1, 2, 4, 8, 16, 32, 64, 128) * 4]


def asked(model: LatencyModel, **about: object) -> Estimate:
    query = {"user": "ann", "model": "bert", "name": "", "gpu_milli": 1000, "replicas": 1, "qos": PROMISE, **about}
    return model.estimate(Query(**{"candidates": (HELD,), **query}))  # type: ignore[arg-type]  # by name


def latency(model: LatencyModel, **about: object) -> Latency:
    (judged,) = asked(model, **about).candidates
    assert judged.latency is not None
    return judged.latency


def test_latency_has_a_bound_percentiles_and_the_needed_replicas() -> None:
    told = latency(taught(*BATCHES))
    assert (told.replicas, told.mean_seconds_max, told.p95_seconds, told.p99_seconds) == (1, 0.15763, 0.23921, 0.27957)
    assert (told.promised_seconds, told.replicas_needed) == (0.27957, 5)
    assert told.confidence > 0.5


def test_the_needed_replicas_meet_the_objective_and_one_fewer_does_not() -> None:
    model = taught(*BATCHES)
    needed = latency(model).replicas_needed
    assert needed is not None
    for replicas, kept in ((needed, True), (needed - 1, False)):
        promised = latency(model, replicas=replicas).promised_seconds
        assert promised is not None
        assert (promised <= PROMISE.latency_seconds) is kept


def test_a_service_that_does_not_keep_up_has_no_latency_but_a_number_of_replicas() -> None:
    told = latency(taught(*BATCHES), qos=replace(PROMISE, arrivals_per_second=5000.0))
    assert (told.mean_seconds_max, told.p99_seconds, told.confidence) == (None, None, 0.0)
    assert told.replicas_needed is not None
    assert told.replicas_needed > 5


def test_an_unattainable_objective_has_no_number_of_replicas() -> None:
    assert latency(taught(*BATCHES), qos=replace(PROMISE, latency_seconds=0.005)).replicas_needed is None


def test_a_service_is_never_predictable() -> None:
    estimate = asked(taught(*BATCHES))
    assert (estimate.predictable, estimate.remaining_seconds) == (False, None)
    assert estimate.source == "a service does not end; its latency is predicted from 32 batch times"


def test_one_batch_size_cannot_separate_alpha_from_tau_zero() -> None:
    assert asked(taught(*[batch(8)] * 9)).candidates[0].latency is None
    assert asked(taught(batch(8))).candidates[0].latency is None
    assert asked(taught()).source == "no batch of a similar service was observed"


def test_without_arrivals_there_is_no_prediction() -> None:
    estimate = asked(taught(*BATCHES), qos=Qos())
    assert (estimate.candidates[0].latency, estimate.source) == (
        None,
        "it does not give the arrival rate of its requests",
    )


def test_allocations_are_kept_apart() -> None:
    big = Candidate(cores=8, gpu_milli=1000, gpu_type="A100")
    model = taught(*BATCHES, *[batch(size, slower=0.1, held=big) for size in (1, 4, 16, 64) * 4])
    ours, theirs, any_cores, other = asked(
        model, candidates=(HELD, big, Candidate(cores=0, gpu_milli=1000), Candidate(cores=4, gpu_milli=500))
    ).candidates
    assert ours.latency is not None
    assert theirs.latency is not None
    assert (ours.latency.p99_seconds or 0) > 5 * (theirs.latency.p99_seconds or 1)
    assert any_cores.latency == theirs.latency, "the latest"
    assert other.latency is None


def test_confidence_falls_where_batches_would_be_larger_than_any_seen() -> None:
    small = taught(*[batch(size) for size in (1, 2, 3, 4) * 8])
    assert latency(small).confidence < 0.1 < latency(taught(*BATCHES)).confidence
    assert latency(small, replicas=20).confidence > 0.5, "20 replicas need batches of 1"


def test_the_latest_batches_count() -> None:
    was, now = [batch(size, slower=5.0) for size in (1, 4, 16) * 3], [batch(size) for size in (1, 4, 16) * 3]
    assert latency(taught(*was, *now, batches_max="9")).p99_seconds == latency(taught(*now)).p99_seconds


def test_old_services_and_allocations_are_dropped_for_new_ones() -> None:
    model = taught(*BATCHES, batch(1, model="other"), services_max="1")
    assert asked(model).source == "no batch of a similar service was observed"
    few = taught(*BATCHES, batch(1, held=Candidate(9, 1000)), allocations_max="1")
    assert asked(few).candidates[0].latency is None
    assert len(few.dump()) == 1


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_an_invalid_batch_time_is_rejected_completely(seconds: float) -> None:
    model = LatencyModel()
    with pytest.raises(ValueError, match="a batch time must be positive and finite"):
        model.observe(replace(batch(1), batch_seconds=seconds))
    with pytest.raises(ValueError, match="a batch has from 1 to"):
        model.observe(replace(batch(1), batch_size=0))
    assert model.dump() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": ["ann"]},
        {"batches": [[1000, 4, "", []]]},
        {"batches": [[1000, 4, "", [[0, 1.0]]]]},
        {"batches": [[1000, 4, "", [[1, math.nan]]]]},
        {"batches": [[1000, 4, [[1, 1.0]]]]},
        {"batches": 7},
    ],
)
def test_a_record_that_is_corrupt_is_named_and_estimates_go_on(wrong: dict[str, object]) -> None:
    sound: dict[str, object] = {"key": ["ann", "gnmt"], "batches": [[1000, 4, "", [[1, 1.0]]]]}
    assert LatencyModel().restore({"sound": json.dumps(sound).encode()}) == []
    model = LatencyModel()
    assert model.restore({"bad": json.dumps(sound | wrong).encode(), **taught(*BATCHES).dump()}) == ["bad"]
    assert latency(model) == latency(taught(*BATCHES))


def test_options_that_make_no_sense_are_all_named() -> None:
    wrong = {"services_max": "0", "allocations_max": "0", "batches_max": "0"}
    with pytest.raises(BadOption) as caught:
        parse(LatencyModel.Options, wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)


def test_a_candidate_with_replicas_of_its_own_is_judged_by_its_share_of_the_requests() -> None:
    latency, held = LatencyModel(), Candidate(cores=4, gpu_milli=1000)
    for size in (1, 2, 4, 8, 16, 4, 8, 2, 1, 16):
        latency.observe(
            Observation("ann", "bert", "", 1000, 1, held, batch_size=size, batch_seconds=0.01 + 0.001 * size)
        )
    asked = Query(
        "ann", "bert", "", 1000, 1, qos=Qos(arrivals_per_second=900.0), candidates=(held, replace(held, workers=3))
    )
    one, three = [judged.latency for judged in latency.estimate(asked).candidates]
    assert one
    assert three
    assert (one.replicas, three.replicas) == (1, 3)
    assert (three.p99_seconds or 0) < (one.p99_seconds or 0)
