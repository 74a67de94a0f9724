"""Why jobs of one shape wait, where the answer depends on how long they have waited."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec import refusals
from cotenant.core.model.job import JobSpec, Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.wait_reasons import Reasons

NOW = 1_000_000.0
AT_SERVER = Refusal(Code.FRAGMENTED, "best server has 6", "", {"wanted_replicas": 8.0}, Locality.SERVER)


def waiting(name: str, seconds: float, like: Record | None = None) -> Record:
    record = new_record(name, JobSpec(), "ann", "")
    record.stored.job.create_time.FromNanoseconds(int((NOW - 2 * seconds) * 1e9))
    record.fragmented_seconds = seconds
    if like:
        record.shape = like.shape
    return record


def refused(waited: float, *, since: float, until: float) -> Refusal:
    """What the policy says to a gang at a level that lasts between two waits."""
    return Refusal(
        AT_SERVER.code,
        AT_SERVER.detail,
        numbers=AT_SERVER.numbers,
        locality=AT_SERVER.locality,
        holds_seconds=until - waited,
        held_seconds=waited - since,
        relaxes_to=Locality.RACK,
    )


def test_jobs_of_the_same_needs_share_a_reason_only_while_their_waits_are_of_one_level() -> None:
    reasons, asked = Reasons(NOW), waiting("asked", 100)
    reasons.refuse_shape(asked, refused(100, since=60, until=300), Reasons())
    for seconds, shared in ((59, False), (60, True), (299, True), (300, False)):
        assert reasons.known(waiting("other", seconds, asked)) is shared, seconds
    assert not reasons.known(waiting("of another shape", 100))


def test_each_job_is_told_its_own_time_and_that_runs_down() -> None:
    reasons, asked = Reasons(NOW), waiting("asked", 100)
    younger = waiting("younger", 80, asked)
    reasons.refuse_shape(asked, refused(100, since=60, until=300), Reasons())
    for record, later, told in ((asked, 0, 200), (younger, 0, 220), (younger, 100, 120), (younger, 500, 0)):
        answer = reasons.of(record, NOW + later)
        assert answer is not None
        assert answer[0].holds_seconds == pytest.approx(told)
    assert answer is not None
    assert str(answer[0]) == "FRAGMENTED: best server has 6; relaxes to rack in 0 s"


def test_the_next_cycle_comes_when_the_first_of_them_relaxes() -> None:
    reasons, asked = Reasons(NOW), waiting("asked", 100)
    reasons.refuse_shape(asked, refused(100, since=0, until=300), Reasons())
    assert reasons.holds_seconds == 200
    assert reasons.known(waiting("older", 250, asked))
    assert reasons.holds_seconds == 50


def test_a_reason_that_time_does_not_change_is_that_of_all() -> None:
    reasons, asked = Reasons(NOW), waiting("asked", 100)
    reasons.refuse_shape(asked, Refusal(Code.CAPACITY, "too little is free"), Reasons())
    assert reasons.known(waiting("new", 0, asked))
    assert reasons.holds_seconds == float("inf")


def test_a_refusal_comes_back_from_the_wire_as_it_went() -> None:
    one = refused(100, since=60, until=300.25)
    assert refusals.from_wire(refusals.to_wire(one)) == one
    assert refusals.from_wire(refusals.to_wire(AT_SERVER)) == AT_SERVER
    told = refusals.to_people(one)
    assert told.detail == "best server has 6; relaxes to rack in 4 min"
    assert told.holds.ToTimedelta().total_seconds() == 200.25
    assert "relaxes_to" not in told.numbers


def test_only_the_time_counts_in_which_places_were_in_fragments() -> None:
    job = waiting("job", 0)
    for now, code in ((10, Code.CAPACITY), (25, Code.FRAGMENTED), (30, Code.FRAGMENTED), (70, Code.CAPACITY)):
        before = Reasons(max(NOW, job.aged_to))  # when the cycle before looked at it
        before.refuse_shape(job, Refusal(code, "", ""), Reasons())
        before.age(job, NOW + now)
        before.age(job, NOW + now)  # to look twice counts once
    assert job.fragmented_seconds == 20


def test_a_job_that_came_after_the_cycle_has_not_waited_since_then() -> None:
    before, old = Reasons(NOW), waiting("old", 100)
    before.refuse_shape(old, refused(100, since=0, until=300), Reasons())
    new = waiting("new", 0, old)
    new.stored.job.create_time.FromNanoseconds(int((NOW + 50) * 1e9))
    before.age(new, NOW + 60)
    assert new.fragmented_seconds == 10


def test_each_wait_is_counted_by_itself() -> None:
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
def test_what_is_looked_up_by_shape_is_what_would_be_found_out_for_each_job(
    said: list[tuple[Refusal, bool]], waited: float, behind: bool
) -> None:
    quick, asked, other = Reasons(NOW), waiting("asked", 100), waiting("other", waited)
    other.shape = asked.shape
    for refusal, own in said:
        if own:
            quick.refuse(other, refusal, Reasons())
        else:
            quick.refuse_shape(asked, refusal, Reasons())
    if behind:
        quick.stop_at(asked, AT_SERVER, Reasons())
    thorough = Reasons(NOW, own=quick.own, shapes=quick.shapes, head=quick.head, holds_seconds=quick.holds_seconds)
    twin = waiting("other", waited)
    twin.shape, twin.stored = other.shape, deepcopy(other.stored)
    for reasons, record in ((quick, other), (thorough, twin)):
        for later in (10.0, 25.0):
            reasons.age(record, NOW + later)
    assert quick.known(other) == thorough.known(twin)
    assert (other.fragmented_seconds, other.aged_to) == (twin.fragmented_seconds, twin.aged_to)
    assert quick.holds_seconds == thorough.holds_seconds
