"""Which throttle is changed first, and from which second on: the orders and bounds of relief, one at a time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest

from cotenant.core.policy.protocols import FREE, AttemptWindow, NodeWindow
from cotenant.policies.coda_eliminator.baselines import Baseline
from cotenant.policies.coda_eliminator.ladder import rungs
from cotenant.policies.coda_eliminator.node_state import RATE, Victim
from cotenant.policies.coda_eliminator.relief import PATIENCE, RELAPSE_SECONDS, Relief
from cotenant.policies.coda_eliminator.suspects import Attempt
from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS
from cotenant.policies.coda_eliminator.throttled_jobs import Hold

NOW = 10_000.0
DNN = AttemptWindow("dnn", 1, False, 8.0, 7.0, cores=8)
ONE, TWO = (AttemptWindow(name, 1, True, 8.0, cores=8) for name in ("one", "two"))
FIRST, SECOND = ("one", 1), ("two", 1)
WINDOW = NodeWindow("n", NOW, 5.0, (DNN, ONE, TWO))
LADDER = rungs(ONE, WINDOW)
GENTLEST = len(LADDER) - 2


def hold(rung: int, since: float = 0.0) -> Hold:
    throttle = LADDER[rung].throttle if rung >= 0 else FREE
    return Hold(LADDER, 8, rung, throttle, THRESHOLDS.calm_seconds, since, victim=("dnn", 1), proven=True)


def node(holds: dict[Attempt, Hold]) -> tuple[Relief, Victim]:
    """Return a node where these attempts are throttled, and a job that is far below its baseline."""
    relief, baseline = Relief(), Baseline(rate=10.0, windows=10**6, trusted=True)
    relief.state.cpu, relief.state.gpu_jobs = {FIRST: ONE, SECOND: TWO}, frozenset({"dnn"})
    relief.throttled.holds = holds
    return relief, Victim(DNN, baseline, RATE)


@pytest.mark.parametrize(("ago", "recent"), [(RELAPSE_SECONDS, True), (RELAPSE_SECONDS + 0.1, False)])
def test_a_throttle_was_relaxed_recently_to_the_end_of_three_minutes(ago: float, recent: bool) -> None:
    one = hold(-1)
    one.returned = NOW - ago
    relief, _ = node({FIRST: one})
    assert relief._recent(NOW) == ([FIRST] if recent else [])


def test_what_was_relaxed_last_is_restored_first_and_ties_go_by_name() -> None:
    for returned, order in (
        ((60.0, 30.0), [SECOND, FIRST]),
        ((30.0, 60.0), [FIRST, SECOND]),
        ((9.0, 9.0), [FIRST, SECOND]),
    ):
        one, two = hold(0), hold(0)
        one.returned, two.returned = (NOW - ago for ago in returned)
        assert node({SECOND: two, FIRST: one})[0]._recent(NOW) == order


@pytest.mark.parametrize(
    ("wait", "next_wait"), [(60.0, 120.0), (THRESHOLDS.calm_seconds_max, THRESHOLDS.calm_seconds_max)]
)
def test_a_rung_that_was_relaxed_too_early_is_restored_and_waits_twice_as_long_up_to_the_maximum(
    wait: float, next_wait: float
) -> None:
    one = hold(0)
    one.before, one.returned, one.wait = 1, NOW, wait
    relief, victim = node({FIRST: one})
    relief._restore(FIRST, victim, WINDOW)
    assert (one.rung, one.wait, one.returned) == (1, next_wait, -math.inf)
    assert relief.throttled.directives[FIRST].throttle == LADDER[1].throttle


@pytest.mark.parametrize(("suspended_before", "rung"), [(0.0, len(LADDER) - 1), (300.0, GENTLEST)])
def test_a_suspension_is_restored_only_if_the_job_was_not_suspended_for_too_long(
    suspended_before: float, rung: int
) -> None:
    one = hold(0)
    one.before, one.returned = len(LADDER) - 1, NOW
    relief, victim = node({FIRST: one})
    if suspended_before:
        relief.throttled.suspensions[FIRST] = deque([(NOW, suspended_before)])
    relief._restore(FIRST, victim, WINDOW)
    assert one.rung == rung


def test_a_rung_that_is_in_force_already_is_not_set_again() -> None:
    one = hold(1)
    one.before, one.returned = 1, NOW
    relief, victim = node({FIRST: one})
    relief._restore(FIRST, victim, WINDOW)
    assert relief.throttled.directives == {}
    assert one.rung == 1


@pytest.mark.parametrize(("since", "changed"), [((1.0, 2.0), SECOND), ((2.0, 1.0), FIRST)])
def test_of_proven_attempts_the_one_throttled_last_is_throttled_further(
    since: tuple[float, float], changed: Attempt
) -> None:
    holds = {FIRST: hold(0, since[0]), SECOND: hold(0, since[1])}
    relief, victim = node(holds)
    relief._deepen(victim, 0.3, 2, WINDOW)
    assert {id: one.rung for id, one in holds.items()} == {FIRST: 0, SECOND: 0} | {changed: 1}


def test_an_attempt_at_its_gentlest_rung_is_passed_over_while_another_can_still_run_slower() -> None:
    holds = {FIRST: hold(GENTLEST - 1, 1.0), SECOND: hold(GENTLEST, 2.0)}
    relief, victim = node(holds)
    relief._deepen(victim, 0.3, 2, WINDOW)
    assert (holds[FIRST].rung, holds[SECOND].rung) == (GENTLEST, GENTLEST)


def test_attempts_that_are_free_or_unproven_are_not_throttled_further() -> None:
    one, two = hold(-1, 5.0), hold(0, 4.0)
    two.proven = False
    relief, victim = node({FIRST: one, SECOND: two})
    relief.state.cpu = {}
    relief._deepen(victim, 0.3, 2, WINDOW)
    assert (one.rung, two.rung, relief.throttled.directives) == (-1, 0, {})


def test_if_nothing_gentler_is_left_the_newest_is_suspended_else_asked_to_move_and_not_again_soon() -> None:
    holds = {FIRST: hold(GENTLEST, 1.0), SECOND: hold(GENTLEST, 2.0)}
    relief, victim = node(holds)
    relief.state.cpu = {}
    relief._deepen(victim, 0.3, 2, WINDOW)
    assert (holds[FIRST].rung, holds[SECOND].rung) == (GENTLEST, GENTLEST + 1)
    holds = {FIRST: hold(GENTLEST, 1.0)}
    relief, victim = node(holds)
    relief.state.cpu = {}
    relief.throttled.suspensions[FIRST] = deque([(NOW, THRESHOLDS.suspended_seconds_max)])
    for now, moves in (
        (NOW, True),
        (NOW + THRESHOLDS.cleared_seconds, False),
        (NOW + THRESHOLDS.cleared_seconds + 1.0, True),
    ):
        relief.throttled.directives.clear()
        relief._deepen(victim, 0.3, 2, replace(WINDOW, now=now))
        assert [one.move for one in relief.throttled.directives.values()] == [True] * moves
        assert holds[FIRST].rung == GENTLEST


@pytest.mark.parametrize(
    ("healthy", "calm", "held", "relaxed"),
    [
        (60.0, 60.0, 60.0, True),
        (59.9, 60.0, 60.0, False),
        (60.0, 59.9, 60.0, False),
        (60.0, 60.0, 59.9, False),
        (1.0, 0.0, PATIENCE * 60.0, True),
        (1.0, 0.0, PATIENCE * 60.0 - 0.1, False),
        (0.0, 0.0, PATIENCE * 60.0, False),
    ],
)
def test_a_rung_is_relaxed_after_a_calm_minute_or_ten_if_memory_is_never_calm(
    healthy: float, calm: float, held: float, relaxed: bool
) -> None:
    one = hold(1, NOW - held)
    relief, _ = node({FIRST: one})
    relief.healthy_since, relief.calm_since = NOW - healthy, NOW - calm
    relief._relax(WINDOW)
    assert one.rung == (0 if relaxed else 1)
    if relaxed:
        assert (one.before, one.returned, one.since) == (1, NOW, NOW)
        assert (relief.healthy_since, relief.calm_since) == (NOW, NOW)


def test_one_rung_at_a_time_is_relaxed_but_all_at_once_if_their_job_is_gone() -> None:
    holds = {FIRST: hold(1), SECOND: hold(1)}
    relief, _ = node(holds)
    relief.healthy_since = relief.calm_since = 0.0
    relief._relax(WINDOW)
    assert sorted(one.rung for one in holds.values()) == [0, 1]
    relief.state.gpu_jobs = frozenset({"another"})
    relief._relax(WINDOW)
    assert [one.rung for one in holds.values()] == [-1, -1]


def test_an_attempt_that_was_proven_only_with_others_is_released_whole_without_calm_memory() -> None:
    one = hold(1)
    one.untested = True
    relief, _ = node({FIRST: one})
    relief.healthy_since, relief.calm_since = NOW - THRESHOLDS.calm_seconds, math.inf
    relief._relax(WINDOW)
    assert (one.rung, one.untested) == (-1, False)
