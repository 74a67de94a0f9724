"""Suspects that hide each other: what one is denied, the other takes, so they are throttled together."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance import contention_node
from cotenant.conformance.contention_node import PEAK, CpuJob, ModelNode, Trainer
from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.policy import CodaEliminator
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.thresholds import Thresholds

ONSET, SATURATION = 60, 1.5
BOUND = 30  # windows in which every suspect and every set of them has been tried
ALONE = Thresholds(suspects_together_max=1)


class Policy(Relief):
    """One node's relief as a policy, with access to its state."""

    name, api_version = "relief", 1


def saturator(id: str, demand: float = 3.5, **others: float) -> CpuJob:
    """Return a CPU job that saturates the memory alone, unless it has only one of its eight cores."""
    return contention_node.saturator(id, demand, begin=5.0 * ONSET, **others)


def crowded(*jobs: CpuJob, seed: int = 0, reported: bool = False) -> ModelNode:
    return ModelNode([Trainer()], jobs, seed, reported=reported, saturation=SATURATION)


def acted(node: ModelNode, policy: Policy | CodaEliminator, windows: int) -> list[Directive]:
    return [directive for _, directives in node.run(policy, windows) for directive in directives]


def lasting(node: ModelNode, policy: Policy | CodaEliminator) -> float:
    """Return the victim's median speed over the next five minutes, in some of which a job is released on trial."""
    speeds = []
    for _ in range(60):
        node.run(policy, 1)
        speeds.append(node.trainers[0].speed)
    return median(speeds)


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_two_that_hide_each_other_are_found_and_both_keep_a_tenth(seed: int, reported: bool) -> None:
    speeds = {}
    for thresholds in (ALONE, Thresholds()):
        two = [saturator("one"), saturator("two")]
        node, policy = crowded(*two, seed=seed, reported=reported), CodaEliminator(thresholds)
        node.run(policy, ONSET + BOUND)
        speeds[thresholds.suspects_together_max] = lasting(node, policy)
        if thresholds != ALONE:
            assert all(speed >= 0.1 * job.speed_alone for job in two for speed in job.speeds[1:])
    assert speeds[1] < 0.95 <= speeds[4]


@pytest.mark.parametrize("seed", range(4))
def test_a_job_without_a_part_is_released_in_the_end(seed: int) -> None:
    two, innocent = [saturator("one"), saturator("two")], CpuJob("loud", demand=1e9, cores=32, begin=5.0 * ONSET)
    node, policy = crowded(*two, innocent, seed=seed), Policy()
    directives = acted(node, policy, ONSET + BOUND)
    assert any(one.job_id == "loud" and "on trial together" in one.reason for one in directives), "it is the loudest"
    directives = acted(node, policy, 120)
    assert next(one.job_id for one in directives if one.throttle == FREE) != ""
    assert innocent.throttle == FREE
    assert sum(job.throttle == FREE for job in two) <= 1, "one that was given back for a try at most"
    throttled = [
        at.throttle != FREE for window, _ in node.run(policy, 360) for at in window.attempts if at.job_id == "loud"
    ]
    assert sum(throttled) <= 36, "but for noise, nothing is done to it in half an hour"


@pytest.mark.parametrize(
    ("seed", "demands"), [(16, (3.5, 3.5)), (71, (3.5, 3.5)), (77, (3.5, 3.5)), (18, (2.2, 2.2, 2.2))]
)
def test_noise_in_a_trial_does_not_hide_joint_suspects(seed: int, demands: tuple[float, ...]) -> None:
    """By noise, the trial of one job alone seems to help, or two windows of the joint trial do not."""
    node, policy = crowded(*(saturator(f"cpu-{n}", demand) for n, demand in enumerate(demands)), seed=seed), Policy()
    node.run(policy, ONSET + BOUND)
    assert lasting(node, policy) >= 0.95


def test_a_joint_throttle_names_the_other_jobs() -> None:
    node, policy = crowded(saturator("one"), saturator("two")), Policy()
    directives = acted(node, policy, ONSET + BOUND)
    tried = [one for one in directives if "together" in one.reason]
    assert [one.job_id for one in tried[:2]] == ["one", "two"]
    assert tried[0].reason.startswith("on trial together with two, as dnn is ")
    assert tried[0].reason.endswith("and throttling each alone had no effect")
    assert "together with one" in tried[1].reason
    assert (tried[0].victim_job_id, tried[0].throttle) == ("dnn", Throttle(cores=1))


def test_the_suspect_with_the_least_evidence_is_released_first_and_completely() -> None:
    two = [saturator("one"), CpuJob("weak", demand=1.7 * PEAK, cores=4, begin=5.0 * ONSET)]
    node, policy = crowded(*two), Policy()
    node.run(policy, ONSET + 8)
    assert [hold.untested for hold in policy.throttled.holds.values()] == [True, True]
    first = acted(node, policy, 16)[0]
    assert (first.job_id, first.throttle) == ("weak", FREE)
    assert "may have had no part in it" in first.reason


def tried_in_vain() -> tuple[ModelNode, Policy, list[Directive]]:
    """A job that becomes slower by itself just as two CPU jobs start that do not affect it."""
    jobs = [CpuJob("one", 1e9, begin=5.0 * ONSET), CpuJob("two", 1e9, begin=5.0 * ONSET)]
    node, policy = crowded(*jobs), Policy()
    node.run(policy, ONSET)
    node.trainers[0].rate_per_second = 6.0
    return node, policy, acted(node, policy, BOUND)


def test_a_trial_together_that_brings_nothing_is_undone_and_all_are_left_alone_for_longer() -> None:
    node, policy, directives = tried_in_vain()
    assert sum("on trial together" in one.reason for one in directives) == 2
    assert "together with one had no effect" in directives[-1].reason
    assert all(job.throttle == FREE for job in node.cpu_jobs)
    assert (policy.trial, policy.throttled.holds) == (None, {})
    assert all(times == 2 and until > node.now + 300 for until, times in policy.throttled.cleared.values())
    assert acted(node, policy, 120) == [], "and what the job is now is its baseline"


def in_trial() -> tuple[ModelNode, Policy]:
    node, policy = crowded(saturator("one"), saturator("two")), Policy()
    for _ in range(ONSET + BOUND):
        node.run(policy, 1)
        if policy.trial and policy.trial.throttled_with:
            break
    return node, policy


def test_a_suspect_that_ends_during_a_trial_releases_the_other() -> None:
    node, policy = in_trial()
    node.cpu_jobs[0].end = node.now
    (freed,) = acted(node, policy, 1)
    assert (freed.job_id, freed.throttle) == ("two", FREE)
    assert "is gone" in freed.reason


def test_a_victim_that_leaves_in_the_midst_of_a_trial_sets_both_free() -> None:
    node, policy = in_trial()
    node.trainers = [Trainer("another")]
    assert {one.job_id for one in acted(node, policy, 1) if one.throttle == FREE} == {"one", "two"}


def test_three_jobs_are_throttled_if_two_are_not_enough_up_to_the_limit() -> None:
    for limit, healthy in ((2, False), (3, True)):
        three = [saturator(name, 2.2) for name in ("one", "two", "three")]
        node, policy = crowded(*three), CodaEliminator(Thresholds(suspects_together_max=limit))
        node.run(policy, ONSET + BOUND)
        assert all((job.throttle != FREE) == healthy for job in three)
        assert (node.trainers[0].speed >= 0.95) == healthy


def test_a_joint_suspension_respects_the_maximum_time() -> None:
    two = [replace(saturator(name), cores=1) for name in ("one", "two")]
    node = crowded(*two)
    story = node.run(CodaEliminator(), ONSET + 360)
    for job in two:
        suspensions = [at.throttle.suspended for window, _ in story for at in window.attempts if at.job_id == job.id]
        assert 5 * sum(suspensions) <= 300 + 5


Rates = st.lists(
    st.tuples(st.floats(0, 20), st.tuples(*[st.floats(0, 16)] * 3), st.booleans()), min_size=1, max_size=80
)


@settings(max_examples=examples(60), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(Rates, st.booleans(), st.lists(st.integers(1, 16), min_size=3, max_size=3))
def test_all_jobs_are_released_at_the_end_for_any_samples(
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
        directives = policy.judge(window)
        assert len({one.job_id for one in directives}) == len(directives)
        for one in directives:
            throttle = one.throttle or FREE
            index = int(one.job_id[-1])
            throttles[index] = throttle
            assert throttle.suspended or throttle.bandwidth_percent >= 10
            assert throttle.suspended or not throttle.cores or 10 * throttle.cores >= cores[index]
    assert throttles == [FREE] * 3
