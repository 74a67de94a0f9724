"""Suspects that hide each other: what one is denied, the other takes, and so they are held back together."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from benchmarks import contention_node
from benchmarks.contention_node import PEAK, CpuJob, ModelNode, Trainer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.policy import CodaEliminator
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.thresholds import Limits

ONSET, SATURATION = 60, 1.5
BOUND = 30  # windows in which every suspect and every set of them has been tried
ALONE = Limits(suspects_together_max=1)


class Policy(Relief):
    """One node's relief as a policy, so that one can look inside."""

    name, api_version = "relief", 1


def glutton(id: str, demand: float = 3.5, **others: float) -> CpuJob:
    """Make a CPU job that saturates the memory alone, unless it has but one of its eight cores."""
    return contention_node.glutton(id, demand, begin=5.0 * ONSET, **others)


def crowded(*jobs: CpuJob, seed: int = 0, told: bool = False) -> ModelNode:
    return ModelNode([Trainer()], jobs, seed, told=told, saturation=SATURATION)


def acted(node: ModelNode, policy: Policy | CodaEliminator, windows: int) -> list[Directive]:
    return [directive for _, directives in node.run(policy, windows) for directive in directives]


def lasting(node: ModelNode, policy: Policy | CodaEliminator) -> float:
    """The victim's speed, the median of the next five minutes: for some of them one is given back on trial."""
    speeds = []
    for _ in range(60):
        node.run(policy, 1)
        speeds.append(node.trainers[0].speed)
    return median(speeds)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_two_that_hide_each_other_are_found_and_both_keep_a_tenth(seed: int, told: bool) -> None:
    speeds = {}
    for limits in (ALONE, Limits()):
        two = [glutton("one"), glutton("two")]
        node, policy = crowded(*two, seed=seed, told=told), CodaEliminator(limits)
        node.run(policy, ONSET + BOUND)
        speeds[limits.suspects_together_max] = lasting(node, policy)
        if limits != ALONE:
            assert all(speed >= 0.1 * job.speed_alone for job in two for speed in job.speeds[1:])
    assert speeds[1] < 0.95 <= speeds[4]


@pytest.mark.parametrize("seed", range(4))
def test_who_has_no_part_in_it_is_not_held_in_the_end(seed: int) -> None:
    two, innocent = [glutton("one"), glutton("two")], CpuJob("loud", demand=1e9, cores=32, begin=5.0 * ONSET)
    node, policy = crowded(*two, innocent, seed=seed), Policy()
    said = acted(node, policy, ONSET + BOUND)
    assert any(one.job_id == "loud" and "on trial together" in one.reason for one in said), "it is the loudest"
    said = acted(node, policy, 120)
    assert next(one.job_id for one in said if one.throttle == FREE) != ""
    assert innocent.throttle == FREE
    assert sum(job.throttle == FREE for job in two) <= 1, "one that was given back for a try at most"
    held = [at.throttle != FREE for window, _ in node.run(policy, 360) for at in window.attempts if at.job_id == "loud"]
    assert sum(held) <= 36, "but for noise, nothing is done to it in half an hour"


@pytest.mark.parametrize(
    ("seed", "demands"), [(16, (3.5, 3.5)), (71, (3.5, 3.5)), (77, (3.5, 3.5)), (18, (2.2, 2.2, 2.2))]
)
def test_noise_that_speaks_for_one_alone_or_against_all_together_hides_them_no_longer(
    seed: int, demands: tuple[float, ...]
) -> None:
    """By noise the trial of one alone seems to help, or two windows of the trial of all do not."""
    node, policy = crowded(*(glutton(f"cpu-{n}", demand) for n, demand in enumerate(demands)), seed=seed), Policy()
    node.run(policy, ONSET + BOUND)
    assert lasting(node, policy) >= 0.95


def test_each_is_told_with_whom_it_is_held_back() -> None:
    node, policy = crowded(glutton("one"), glutton("two")), Policy()
    said = acted(node, policy, ONSET + BOUND)
    tried = [one for one in said if "together" in one.reason]
    assert [one.job_id for one in tried[:2]] == ["one", "two"]
    assert tried[0].reason.startswith("on trial together with two, as dnn is ")
    assert tried[0].reason.endswith("and holding each alone back brought nothing")
    assert "together with one" in tried[1].reason
    assert (tried[0].victim_job_id, tried[0].throttle) == ("dnn", Throttle(cores=1))


def test_the_one_that_least_speaks_against_is_freed_first_and_at_once() -> None:
    two = [glutton("one"), CpuJob("weak", demand=1.7 * PEAK, cores=4, begin=5.0 * ONSET)]
    node, policy = crowded(*two), Policy()
    node.run(policy, ONSET + 8)
    assert [hold.untested for hold in policy.held.holds.values()] == [True, True]
    first = acted(node, policy, 16)[0]
    assert (first.job_id, first.throttle) == ("weak", FREE)
    assert "may have had no part in it" in first.reason


def tried_in_vain() -> tuple[ModelNode, Policy, list[Directive]]:
    """A job that becomes slower by itself just as two CPU jobs come, neither of which hurts it."""
    jobs = [CpuJob("one", 1e9, begin=5.0 * ONSET), CpuJob("two", 1e9, begin=5.0 * ONSET)]
    node, policy = crowded(*jobs), Policy()
    node.run(policy, ONSET)
    node.trainers[0].rate_per_second = 6.0
    return node, policy, acted(node, policy, BOUND)


def test_a_trial_together_that_brings_nothing_is_undone_and_all_are_left_alone_for_longer() -> None:
    node, policy, said = tried_in_vain()
    assert sum("on trial together" in one.reason for one in said) == 2
    assert "together with one brought nothing" in said[-1].reason
    assert all(job.throttle == FREE for job in node.cpu_jobs)
    assert (policy.look, policy.held.holds) == (None, {})
    assert all(times == 2 and until > node.now + 300 for until, times in policy.held.cleared.values())
    assert acted(node, policy, 120) == [], "and what the job is now is its baseline"


def in_trial() -> tuple[ModelNode, Policy]:
    node, policy = crowded(glutton("one"), glutton("two")), Policy()
    for _ in range(ONSET + BOUND):
        node.run(policy, 1)
        if policy.look and policy.look.held_with:
            break
    return node, policy


def test_one_that_leaves_in_the_midst_of_a_trial_sets_the_other_free() -> None:
    node, policy = in_trial()
    node.cpu_jobs[0].end = node.now
    (freed,) = acted(node, policy, 1)
    assert (freed.job_id, freed.throttle) == ("two", FREE)
    assert "not there any more" in freed.reason


def test_a_victim_that_leaves_in_the_midst_of_a_trial_sets_both_free() -> None:
    node, policy = in_trial()
    node.trainers = [Trainer("another")]
    assert {one.job_id for one in acted(node, policy, 1) if one.throttle == FREE} == {"one", "two"}


def test_three_are_held_where_two_are_not_enough_and_no_more_than_the_limit() -> None:
    for limit, well in ((2, False), (3, True)):
        three = [glutton(name, 2.2) for name in ("one", "two", "three")]
        node, policy = crowded(*three), CodaEliminator(Limits(suspects_together_max=limit))
        node.run(policy, ONSET + BOUND)
        assert all((job.throttle != FREE) == well for job in three)
        assert (node.trainers[0].speed >= 0.95) == well


def test_who_can_only_stand_still_is_not_suspended_with_others_beyond_its_time() -> None:
    two = [replace(glutton(name), cores=1) for name in ("one", "two")]
    node = crowded(*two)
    story = node.run(CodaEliminator(), ONSET + 360)
    for job in two:
        stood = [at.throttle.suspended for window, _ in story for at in window.attempts if at.job_id == job.id]
        assert 5 * sum(stood) <= 300 + 5


Rates = st.lists(
    st.tuples(st.floats(0, 20), st.tuples(*[st.floats(0, 16)] * 3), st.booleans()), min_size=1, max_size=80
)


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(Rates, st.booleans(), st.lists(st.integers(1, 16), min_size=3, max_size=3))
def test_whatever_the_samples_everybody_is_freed_at_the_end(
    rates: list[tuple[float, tuple[float, ...], bool]], enforced: bool, cores: list[int]
) -> None:
    policy, throttles = Policy(), [FREE] * 3
    moments = [(10.0, (1.0, 1.0, 1.0), False)] * 24 + rates
    calm = [(10.0, (0.0, 0.0, 0.0), False)] * 1800
    for number, (rate, used, pressed) in enumerate([*moments, *calm]):
        if number > len(moments) + 24 and all(throttle == FREE for throttle in throttles):
            break
        cpu = [
            AttemptWindow(f"cpu-{one}", 1, True, min(used[one], cores[one]), cores=cores[one], throttle=throttles[one])
            for one in range(3)
        ]
        training = AttemptWindow("dnn", 1, False, 8.0, rate, cores=8)
        window = NodeWindow(
            "n1",
            5.0 * number,
            5.0,
            (training, *cpu),
            cpu_some_percent=90.0 if pressed else 0.0,
            bandwidth_enforced=enforced,
        )
        said = policy.judge(window)
        assert len({one.job_id for one in said}) == len(said)
        for one in said:
            throttle = one.throttle or FREE
            index = int(one.job_id[-1])
            throttles[index] = throttle
            assert throttle.suspended or throttle.bandwidth_percent >= 10
            assert throttle.suspended or not throttle.cores or 10 * throttle.cores >= cores[index]
    assert throttles == [FREE] * 3
