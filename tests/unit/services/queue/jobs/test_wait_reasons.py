"""Refusals of an equivalence class that depend on how long each job has waited."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.listed_refusals import ListedRefusals

from cotenant.codec import refusals
from cotenant.core.model.job import JobSpec, Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.wait_reasons import WaitReasons

NOW = 1_000_000.0
AT_SERVER = Refusal(Code.FRAGMENTED, "best server has 6", "", {"wanted_replicas": 8.0}, Locality.SERVER)


def waiting(name: str, seconds: float, like: Record | None = None) -> Record:
    record = new_record(name, JobSpec(), "ann", "")
    record.stored.job.create_time.FromNanoseconds(int((NOW - 2 * seconds) * 1e9))
    record.fragmented_seconds = seconds
    if like:
        record.equivalence_key = like.equivalence_key
    return record


def refused(waited: float, *, since: float, until: float) -> Refusal:
    """Return the policy's refusal of a gang at the topology level for waits between two bounds."""
    return Refusal(
        AT_SERVER.code,
        AT_SERVER.detail,
        numbers=AT_SERVER.numbers,
        locality=AT_SERVER.locality,
        holds_seconds=until - waited,
        held_seconds=waited - since,
        relaxes_to=Locality.RACK,
    )


def test_a_shared_refusal_applies_only_at_the_same_topology_level() -> None:
    reasons, asked = WaitReasons(NOW), waiting("asked", 100)
    reasons.refuse_class(asked, refused(100, since=60, until=300), WaitReasons())
    for seconds, shared in ((59, False), (60, True), (299, True), (300, False)):
        assert reasons.known(waiting("other", seconds, asked)) is shared, seconds
    assert not reasons.known(waiting("of another shape", 100))


def test_each_job_gets_its_own_remaining_wait() -> None:
    reasons, asked = WaitReasons(NOW), waiting("asked", 100)
    younger = waiting("younger", 80, asked)
    reasons.refuse_class(asked, refused(100, since=60, until=300), WaitReasons())
    for record, later, told in ((asked, 0, 200), (younger, 0, 220), (younger, 100, 120), (younger, 500, 0)):
        answer = reasons.of(record, NOW + later)
        assert answer is not None
        assert answer[0].holds_seconds == pytest.approx(told)
    assert answer is not None
    assert str(answer[0]) == "FRAGMENTED: best server has 6; relaxes to rack in 0 s"


def test_the_next_cycle_runs_when_the_first_job_relaxes() -> None:
    reasons, asked = WaitReasons(NOW), waiting("asked", 100)
    reasons.refuse_class(asked, refused(100, since=0, until=300), WaitReasons())
    assert reasons.holds_seconds == 200
    assert reasons.known(waiting("older", 250, asked))
    assert reasons.holds_seconds == 50


def test_a_time_independent_refusal_applies_to_the_whole_class() -> None:
    reasons, asked = WaitReasons(NOW), waiting("asked", 100)
    reasons.refuse_class(asked, Refusal(Code.CAPACITY, "too little is free"), WaitReasons())
    assert reasons.known(waiting("new", 0, asked))
    assert reasons.holds_seconds == float("inf")


def test_a_job_behind_the_head_keeps_its_time_once_it_gets_a_refusal_of_its_own() -> None:
    head, job = waiting("head", 100), waiting("job", 80)
    first, second, third = (WaitReasons(NOW + later) for later in (0, 10, 20))
    first.block_behind(head, Refusal(Code.CAPACITY, "too little is free"), WaitReasons())
    second.block_behind(head, Refusal(Code.CAPACITY, "too little is free"), first)
    second.refuse(job, Refusal(Code.BEHIND, "waits behind head"), first)
    third.refuse(job, Refusal(Code.NO_NODES, "no node is connected"), second)
    assert [found[1] for one in (first, second, third) if (found := one.of(job, NOW + 20))] == [NOW, NOW, NOW + 20]


def test_refusals_survive_encoding() -> None:
    one = refused(100, since=60, until=300.25)
    assert refusals.from_wire(refusals.to_wire(one)) == one
    assert refusals.from_wire(refusals.to_wire(AT_SERVER)) == AT_SERVER
    told = refusals.to_text(one)
    assert told.detail == "best server has 6; relaxes to rack in 4 min"
    assert told.holds.ToTimedelta().total_seconds() == 200.25
    assert "relaxes_to" not in told.numbers


def test_only_fragmented_time_counts() -> None:
    job = waiting("job", 0)
    for now, code in ((10, Code.CAPACITY), (25, Code.FRAGMENTED), (30, Code.FRAGMENTED), (70, Code.CAPACITY)):
        before = WaitReasons(max(NOW, job.fragmented_until))  # time of the previous cycle
        before.refuse_class(job, Refusal(code, "", ""), WaitReasons())
        before.age(job, NOW + now)
        before.age(job, NOW + now)  # counting twice must not add up
    assert job.fragmented_seconds == 20


def test_a_job_submitted_after_the_cycle_counts_from_its_submission() -> None:
    before, old = WaitReasons(NOW), waiting("old", 100)
    before.refuse_class(old, refused(100, since=0, until=300), WaitReasons())
    new = waiting("new", 0, old)
    new.stored.job.create_time.FromNanoseconds(int((NOW + 50) * 1e9))
    before.age(new, NOW + 60)
    assert new.fragmented_seconds == 10


def test_each_wait_is_counted_separately() -> None:
    job = waiting("job", 0)
    job.age(NOW + 40, fragmented=True)
    job.stored.job.attempt.end_time.FromNanoseconds(int((NOW + 100) * 1e9))
    job.age(NOW + 107, fragmented=True)
    assert job.fragmented_seconds == 7


TIMES = st.sampled_from([math.inf, math.inf, 60.0, 300.0])
REFUSALS = st.builds(
    Refusal,
    st.sampled_from([Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.RESERVED]),
    st.just("waits"),
    holds_seconds=TIMES,
    held_seconds=TIMES,
)


@given(st.lists(st.tuples(REFUSALS, st.booleans()), max_size=4), st.sampled_from([0.0, 100.0, 400.0]), st.booleans())
def test_lookups_by_equivalence_class_match_lookups_by_job(
    said: list[tuple[Refusal, bool]], waited: float, behind: bool
) -> None:
    quick, asked, other = WaitReasons(NOW), waiting("asked", 100), waiting("other", waited)
    other.equivalence_key = asked.equivalence_key
    thorough = WaitReasons(NOW, classes=ListedRefusals())
    for reasons in (quick, thorough):
        for refusal, own in said:
            if own:
                reasons.refuse(other, refusal, WaitReasons())
            else:
                reasons.refuse_class(asked, refusal, WaitReasons())
        if behind:
            reasons.block_behind(asked, AT_SERVER, WaitReasons())
    twin = waiting("other", waited)
    twin.equivalence_key, twin.stored = other.equivalence_key, deepcopy(other.stored)
    for reasons, record in ((quick, other), (thorough, twin)):
        for later in (10.0, 25.0):
            reasons.age(record, NOW + later)
    assert quick.known(other) == thorough.known(twin)
    assert (quick.code(other), quick.of(other, NOW + 1)) == (thorough.code(twin), thorough.of(twin, NOW + 1))
    assert (other.fragmented_seconds, other.fragmented_until) == (twin.fragmented_seconds, twin.fragmented_until)
    assert quick.holds_seconds == thorough.holds_seconds
