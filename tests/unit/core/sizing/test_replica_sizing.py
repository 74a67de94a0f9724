from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.model.estimate import UNKNOWN, Candidate, CandidateEstimate, Estimate, Latency
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, JobSpec, OpenReplicas, Qos, Request, Role
from cotenant.core.prediction.batch_queueing import BatchTime, answer
from cotenant.core.sizing import replica_sizing

TARGET = 0.03
BATCHES = st.builds(BatchTime, st.sampled_from([0.0005, 0.001, 0.004]), st.sampled_from([0.002, 0.01, 0.02]))
RATES = st.floats(10.0, 3000.0)


def service(rate: float = 900.0, target: float = TARGET, least: int = 1, most: int = 64) -> JobSpec:
    role = Role(replicas=least, request=Request(gpu_milli=1000), open=OpenReplicas(least, most))
    return JobSpec(kind=JobKind.INFERENCE, roles=(role,), qos=Qos(0.0, target, 99.0, rate))


def told(batch: BatchTime) -> Estimate:
    latency = Latency(1, per_request_seconds=batch.per_request, fixed_seconds=batch.fixed)
    return Estimate(candidates=(CandidateEstimate(), CandidateEstimate(latency=latency, allocation=Candidate(4))))


def keeps(spec: JobSpec, batch: BatchTime, replicas: int, share: float = 1.0) -> bool:
    slowed = BatchTime(batch.per_request / share, batch.fixed / share)
    said = answer(slowed, spec.qos.arrivals_per_second / replicas, (99.0,))
    return said is not None and said.percentiles_seconds[0] <= spec.qos.latency_seconds


@settings(deadline=None, max_examples=examples(60))
@given(BATCHES, RATES, st.sampled_from([0.02, 0.03, 0.1]))
def test_as_many_are_decided_as_keep_the_promise_and_not_one_more(batch: BatchTime, rate: float, target: float) -> None:
    spec, estimate = service(rate, target, most=24), told(batch)
    first = next((count for count in range(1, 25) if keeps(spec, batch, count)), None)
    assert replica_sizing.with_required_replicas(spec, estimate).replicas == (first or 24)
    assert (replica_sizing.unreachable_target(spec, estimate) is None) == (first is not None)


@settings(deadline=None, max_examples=examples(40))
@given(BATCHES, RATES, st.floats(1.0, 4.0))
def test_more_arrivals_never_give_fewer_replicas(batch: BatchTime, rate: float, times: float) -> None:
    few, many = (
        replica_sizing.with_required_replicas(service(one), told(batch)).replicas for one in (rate, rate * times)
    )
    assert few <= many


@settings(deadline=None, max_examples=examples(60))
@given(BATCHES, RATES, st.sampled_from([0.004, 0.012, 0.03]), st.integers(1, 8))
def test_remedies_in_a_refusal_work(batch: BatchTime, rate: float, target: float, most: int) -> None:
    spec, estimate = service(rate, target, most=most), told(batch)
    refusal = replica_sizing.unreachable_target(spec, estimate)
    assume(refusal is not None)
    assert refusal
    numbers = refusal.numbers
    changed = {
        "replicas_needed": service(rate, target, most=int(numbers.get("replicas_needed", most))),
        "latency_seconds": service(rate, numbers.get("latency_seconds", target), most=most),
        "arrivals_max": service(numbers.get("arrivals_max", rate), target, most=most),
    }
    for name in changed.keys() & numbers.keys():
        assert replica_sizing.unreachable_target(changed[name], estimate) is None, (name, refusal)
        assert f"{numbers[name]:g}" in refusal.remedy
    if "replicas_needed" in numbers:
        assert replica_sizing.unreachable_target(
            service(rate, target, most=int(numbers["replicas_needed"]) - 1), estimate
        )


@settings(deadline=None, max_examples=examples(40))
@given(BATCHES, RATES, st.integers(1, 24))
def test_the_share_that_is_needed_suffices_and_little_less_does_not(batch: BatchTime, rate: float, count: int) -> None:
    spec = service(rate)
    share = replica_sizing.share_needed(spec, told(batch), count)
    assert share is not None
    if math.isinf(share):
        assert not keeps(spec, batch, count)
        return
    assert keeps(spec, batch, count, share)
    assert share == replica_sizing.SHARE_MIN or not keeps(spec, batch, count, share - 0.002)
    more = replica_sizing.share_needed(spec, told(batch), count + 1)
    assert more is not None
    assert more <= share


def test_an_unknown_service_gets_its_minimum() -> None:
    spec = replica_sizing.with_required_replicas(service(least=2), UNKNOWN)
    assert spec.replicas == 2
    assert "nothing is known" in replica_sizing.in_words(spec, UNKNOWN)
    assert replica_sizing.unreachable_target(spec, UNKNOWN) is None
    assert replica_sizing.share_needed(spec, UNKNOWN, 2) is None


def test_a_fixed_number_of_replicas_is_kept() -> None:
    spec = JobSpec(roles=(Role(replicas=3),), qos=service().qos)
    estimate = told(BatchTime(0.001, 0.01))
    assert replica_sizing.with_required_replicas(spec, estimate) is spec
    assert replica_sizing.unreachable_target(spec, estimate) is None
    assert replica_sizing.in_words(spec, estimate) == ""


@pytest.mark.parametrize(("required_replicas", "share"), [(2, 1.0), (3, 1.0), (4, math.inf), (None, math.inf)])
def test_without_batch_times_the_predictors_verdict_counts(required_replicas: int | None, share: float) -> None:
    latency = Latency(3, replicas_needed=required_replicas)
    estimate = Estimate(candidates=(CandidateEstimate(latency=latency, allocation=Candidate(4)),))
    assert replica_sizing.share_needed(service(), estimate, 3) == share
    assert replica_sizing.share_needed(service(), estimate, 5) is None
    assert replica_sizing.with_required_replicas(service(most=8), estimate).replicas == (required_replicas or 8)


@pytest.mark.parametrize(
    ("promised_seconds", "share"),
    [(TARGET / 2, 1.0), (TARGET, 1.0), (math.nextafter(TARGET, 1.0), math.inf), (None, math.inf)],
)
def test_a_promised_time_within_the_target_meets_it_at_full_speed(promised_seconds: float | None, share: float) -> None:
    latency = Latency(3, promised_seconds=promised_seconds)
    estimate = Estimate(candidates=(CandidateEstimate(latency=latency, allocation=Candidate(4)),))
    assert replica_sizing.share_needed(service(), estimate, 3) == share


def test_a_maximum_that_is_too_low_is_explained_in_full() -> None:
    refusal = replica_sizing.unreachable_target(service(most=4), told(BatchTime(0.001, 0.01)))
    assert refusal is not None
    assert refusal.detail == (
        "it takes 5 replicas to answer 99 % of 900 requests a second within 0.03 s, and its maximum is 4; "
        "4 of them take 0.0309 s"
    )
    assert refusal.remedy == (
        "replicas_max is 5 or more, or its target is 0.0309 s or more, or at most 832 requests arrive a second"
    )


def test_a_target_below_the_time_of_one_request_is_kept_by_no_number() -> None:
    refusal = replica_sizing.unreachable_target(service(target=0.005), told(BatchTime(0.001, 0.01)))
    assert refusal is not None
    assert "one request alone takes 0.011 s" in refusal.detail
    assert "replicas_max" not in refusal.remedy


def test_the_number_of_replicas_is_explained() -> None:
    estimate = told(BatchTime(0.001, 0.01))
    assert "the fewest that answer 99 %" in replica_sizing.in_words(service().with_replicas(5), estimate)
    assert "alone 5 would" in replica_sizing.in_words(service().with_replicas(7), estimate)
    assert replica_sizing.in_words(service(least=8).with_replicas(8), estimate) == "8 replicas, its minimum"
    crowded = replace(service(most=3), roles=service(most=3).with_replicas(3).roles)
    assert replica_sizing.in_words(crowded, estimate) == "3 replicas, its maximum"


def gang_of(spec: JobSpec, estimate: Estimate, parts: int = 1) -> Gang:
    part = Part("worker", spec.replicas, Demand(1000, 4))
    return Gang("job", (part,) * parts, sizing="4 cores; 1 replica", spec=spec, estimate=estimate)


@settings(deadline=None, max_examples=examples(20))
@given(BATCHES, RATES, st.integers(1, 8), st.integers(0, 12))
def test_one_replica_more_is_tried_after_another_until_they_bear_the_worst_neighbors(
    batch: BatchTime, rate: float, have: int, spare: int
) -> None:
    spec, estimate = service(rate, most=have + spare).with_replicas(have), told(batch)
    slowest = replica_sizing.SHARE_MIN
    enough = next((count for count in range(have, have + spare) if keeps(spec, batch, count, slowest)), have + spare)
    larger = list(replica_sizing.larger_gangs(gang_of(spec, estimate)))
    for count, gang in zip(range(have + 1, enough + 1), larger, strict=True):
        assert gang.spec == spec.with_replicas(count)
        assert gang.parts == (Part("worker", count, Demand(1000, 4)),)
        assert gang.sizing == f"4 cores; {replica_sizing.in_words(spec.with_replicas(count), estimate)}"


def test_more_replicas_are_tried_only_for_one_role_with_auto_replicas_and_a_known_latency() -> None:
    open_spec, known = service(), told(BatchTime(0.001, 0.01))
    fixed = JobSpec(kind=JobKind.INFERENCE, roles=(Role(),), qos=open_spec.qos)
    assert next(replica_sizing.larger_gangs(gang_of(open_spec, known)))
    for gang in (
        gang_of(fixed, known),
        gang_of(open_spec, known, parts=2),
        gang_of(open_spec, UNKNOWN),
        replace(gang_of(open_spec, known), spec=None),
    ):
        assert list(replica_sizing.larger_gangs(gang)) == []
    only_three = Estimate(candidates=(CandidateEstimate(latency=Latency(3, replicas_needed=5)),))
    assert len(list(replica_sizing.larger_gangs(gang_of(open_spec.with_replicas(3), only_three)))) == 1


def test_no_more_replicas_are_tried_than_bear_the_worst_neighbors() -> None:
    batch = BatchTime(0.0005, 0.002)
    spec = service(most=40)
    enough = next(count for count in range(1, 40) if keeps(spec, batch, count, replica_sizing.SHARE_MIN))
    tried = [
        [gang.parts[0].replicas for gang in replica_sizing.larger_gangs(gang_of(spec.with_replicas(have), told(batch)))]
        for have in (enough - 1, enough, enough + 1)
    ]
    assert tried == [[enough], [], []]
