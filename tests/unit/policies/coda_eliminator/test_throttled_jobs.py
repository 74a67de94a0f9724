"""What is remembered of throttled attempts: for how long, how often, and how much suspension is left."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.policy.protocols import FREE, AttemptWindow, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import SUSPENDED, rungs
from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS
from cotenant.policies.coda_eliminator.throttled_jobs import ASKED_MAX, PROBATION_SECONDS, Hold, ThrottledJobs

ID = ("cpu", 1)
CPU = AttemptWindow(*ID, cpu_job=True, cores_used=8.0, cores=8)
WINDOW = NodeWindow("n", 100.0, 5.0, (CPU,))
LADDER = rungs(CPU, WINDOW)


def held(rung: int, since: float = 0.0) -> tuple[ThrottledJobs, Hold]:
    throttle = LADDER[rung].throttle if rung >= 0 else FREE
    jobs, hold = ThrottledJobs(), Hold(LADDER, 8, rung, throttle, THRESHOLDS.calm_seconds, since, reason="why")
    jobs.holds[ID] = hold
    return jobs, hold


@given(st.lists(st.tuples(st.floats(1, 2000), st.floats(1, 200)), max_size=12))
def test_suspensions_count_until_they_are_too_long_ago(spans: list[tuple[float, float]]) -> None:
    jobs, now = ThrottledJobs(), 0.0
    past = list[tuple[float, float]]()
    for after, seconds in spans:
        now += after
        past.append((now, seconds))
        jobs.suspensions.setdefault(ID, deque()).append((now, seconds))
        recent = sum(each for when, each in past if now - when <= THRESHOLDS.suspended_within_seconds)
        assert jobs.may_suspend(ID, now) == (recent + THRESHOLDS.calm_seconds <= THRESHOLDS.suspended_seconds_max)


def test_a_suspension_ends_before_it_exceeds_the_maximum_and_the_job_is_asked_to_move() -> None:
    jobs, hold = held(len(LADDER) - 1)
    windows = round(THRESHOLDS.suspended_seconds_max / WINDOW.seconds)
    for number in range(1, windows):
        jobs.limit_suspensions(replace(WINDOW, now=5.0 * number))
        assert hold.throttle == SUSPENDED
        assert not jobs.directives
    jobs.limit_suspensions(replace(WINDOW, now=5.0 * windows))
    assert (hold.rung, hold.moving, hold.since) == (hold.gentlest, 5.0 * windows, 5.0 * windows)
    assert jobs.directives[ID].move
    assert "suspended for 5 min" in jobs.directives[ID].reason


def test_a_free_attempt_is_remembered_through_its_probation_and_a_throttled_one_always() -> None:
    for rung, seconds, known in [
        (-1, PROBATION_SECONDS, True),
        (-1, PROBATION_SECONDS + 0.1, False),
        (0, 10 * PROBATION_SECONDS, True),
    ]:
        jobs, _ = held(rung, since=7.0)
        jobs.forget({ID: CPU}, 7.0 + seconds)
        assert (ID in jobs.holds) == known
        assert jobs.is_throttled(ID) == (rung >= 0 and known)


def test_what_has_left_is_forgotten_whole() -> None:
    jobs, _ = held(0)
    jobs.clear(ID, 0.0)
    jobs.may_suspend(ID, 0.0)
    jobs.forget({}, 1.0)
    assert (jobs.holds, jobs.cleared, jobs.suspensions) == ({}, {}, {})


def test_a_cleared_suspect_is_left_alone_for_twice_as_long_each_time_up_to_sixteen_times() -> None:
    jobs, now = ThrottledJobs(), 50.0
    for times in range(8):
        jobs.clear(ID, now)
        until = now + THRESHOLDS.cleared_seconds * min(16, 2**times)
        assert not jobs.may_be_tried(ID, until - 0.1)
        assert jobs.may_be_tried(ID, until)


def test_an_attempt_may_be_tried_unless_it_is_throttled() -> None:
    assert not held(0)[0].may_be_tried(ID, 0.0)
    assert held(-1)[0].may_be_tried(ID, 0.0)
    assert ThrottledJobs().may_be_tried(ID, 0.0)


@pytest.mark.parametrize(("rung", "proven", "any_proven"), [(0, True, True), (0, False, False), (-1, True, False)])
def test_a_proven_attempt_counts_while_it_is_throttled(rung: int, proven: bool, any_proven: bool) -> None:
    jobs, hold = held(rung)
    hold.proven = proven
    assert jobs.any_proven() == any_proven


def test_a_directive_is_repeated_after_the_first_window_and_then_the_node_is_believed() -> None:
    jobs, hold = held(1)
    told = []
    for _ in range(ASKED_MAX):
        jobs.directives.clear()
        jobs.resend({ID: CPU}, WINDOW)
        told.append(ID in jobs.directives)
    assert told == [False, *[True] * (ASKED_MAX - 1)]
    assert jobs.directives[ID].reason == "why"
    assert jobs.directives[ID].throttle == hold.throttle
    jobs.resend({ID: CPU}, WINDOW)
    assert ID not in jobs.holds, "the node does not throttle it"
    assert not jobs.may_be_tried(ID, WINDOW.now)


def test_a_node_that_throttles_less_than_it_was_asked_is_taken_at_its_word() -> None:
    jobs, hold = held(1)
    milder = replace(CPU, throttle=LADDER[0].throttle)
    for _ in range(ASKED_MAX + 1):
        jobs.resend({ID: milder}, WINDOW)
    assert (hold.rung, hold.throttle, hold.asked) == (0, LADDER[0].throttle, 0)


def test_a_directive_that_is_carried_out_is_not_repeated_and_doubts_are_over() -> None:
    jobs, hold = held(1)
    jobs.resend({ID: CPU}, WINDOW)
    assert hold.asked == 1
    jobs.resend({ID: replace(CPU, throttle=hold.throttle)}, WINDOW)
    assert hold.asked == 0
    assert not jobs.directives


def test_a_throttle_in_force_is_adopted_as_proven_and_a_known_or_free_attempt_is_left() -> None:
    jobs = ThrottledJobs()
    throttled = replace(CPU, throttle=Throttle(cores=4))
    jobs.adopt({ID: throttled, ("free", 1): replace(CPU, job_id="free")}, WINDOW)
    assert list(jobs.holds) == [ID]
    hold = jobs.holds[ID]
    assert (hold.rung, hold.throttle, hold.proven, hold.since, hold.cores) == (0, Throttle(cores=4), True, 100.0, 8)
    jobs.adopt({ID: replace(CPU, throttle=SUSPENDED)}, WINDOW)
    assert jobs.holds[ID] is hold
    assert hold.rung == 0


def test_a_directive_names_the_victim_that_it_is_given_or_that_of_the_attempt_that_is_held() -> None:
    for given_one, held_for, named in [
        ("dnn", None, "dnn"), ("dnn", ("other", 1), "dnn"), ("", ("other", 1), "other"), ("", None, "")
    ]:  # fmt: skip
        jobs, hold = held(0)
        hold.victim = held_for
        jobs.set(ID, hold, 1, 7.0, "why", victim=given_one, slowdown=0.25)
        directive = jobs.directives[ID]
        assert (directive.victim_job_id, directive.victim_slowdown, directive.reason) == (named, 0.25, "why")
