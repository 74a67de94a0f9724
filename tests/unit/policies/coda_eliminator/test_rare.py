"""Rare cases: thresholds near onsets, patience, probation, and victims and suspects that change in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.conformance.contention_node import CpuJob, ModelNode, Trainer, hog
from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import rungs
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.throttled_jobs import ASKED_MAX, Hold, ThrottledJobs

ONSET = 60


class Policy(Relief):
    """One node's relief as a policy, with access to its state."""

    name, api_version = "relief", 1


def acted(node: ModelNode, policy: Policy, windows: int) -> list[Directive]:
    return [directive for _, directives in node.run(policy, windows) for directive in directives]


def throttled() -> tuple[ModelNode, Policy, CpuJob]:
    """A node on which a CPU job was found and is throttled."""
    cpu_job = hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([Trainer()], [cpu_job], seed=1), Policy()
    node.run(policy, ONSET + 8)
    assert cpu_job.throttle == Throttle(cores=1)
    return node, policy, cpu_job


def test_near_a_rare_onset_a_slowdown_of_15_percent_is_mostly_noticed_within_3_windows() -> None:
    noticed = 0
    for seed in range(40):
        node = ModelNode([Trainer()], [hog(0.15, begin=5.0 * ONSET + seed / 8)], seed, reported=False)
        policy = Policy()
        node.run(policy, ONSET)
        noticed += bool(acted(node, policy, 3))
    assert noticed >= 24, "40 % at best without regard to onsets"


@pytest.mark.parametrize("seed", range(3))
def test_pressure_alone_throttles_no_job_far_from_an_onset(seed: int) -> None:
    trainers = [Trainer(f"dnn-{number}", demand=5e9) for number in range(4)]
    node = ModelNode(trainers, [CpuJob(f"cpu-{number}", demand=17.5e9) for number in range(4)], seed)
    assert acted(node, Policy(), 1500) == []


def test_onsets_that_are_not_rare_count_less() -> None:
    trainer, policy = AttemptWindow("dnn", 1, False, 4.0, 10.0, cores=4), Policy()
    for number in range(720):
        cpu = AttemptWindow("cpu", 1, True, 8.0 if number // 20 % 2 else 0.0, cores=8)
        policy.judge(NodeWindow("n", 5.0 * number, 5.0, (trainer, cpu)))
    assert policy.state.exposure > 0.02


def test_an_attempt_has_no_more_baselines_than_an_allocator_tries_core_counts() -> None:
    policy = Policy()
    for number in range(100):
        policy.judge(NodeWindow("n", 5.0 * number, 5.0, (AttemptWindow("dnn", 1, False, 4.0, 10.0, cores=number),)))
    assert len(policy.state.baselines["dnn", 1]) == 8


def test_a_released_job_is_remembered_for_a_while_and_then_dropped() -> None:
    node, policy, cpu_job = throttled()
    cpu_job.demand = 1e9
    while cpu_job.throttle != FREE:
        node.run(policy, 1)
    node.run(policy, 20)
    assert [hold.rung for hold in policy.throttled.holds.values()] == [-1]
    node.run(policy, 50)
    assert policy.throttled.holds == {}


def test_a_victim_with_high_traffic_does_not_throttle_others_forever() -> None:
    trainer = Trainer(demand=70e9)
    cpu_job = hog(0.4, trainer, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed=1), Policy()
    node.run(policy, ONSET + 6)
    before = cpu_job.throttle
    cpu_job.demand = 0.0
    node.run(policy, 60)
    assert cpu_job.throttle == before != FREE, "for five minutes the memory was not calm"
    node.run(policy, 70)
    assert cpu_job.throttle.cores > before.cores


def test_each_fruitless_trial_leaves_a_suspect_in_peace_for_twice_as_long_up_to_16_times() -> None:
    policy, until = Policy(), []
    for _ in range(6):
        policy.throttled.clear(("cpu", 1), now=0.0)
        until.append(policy.throttled.cleared["cpu", 1][0])
    assert until == [300, 600, 1200, 2400, 4800, 4800]


def test_a_job_that_starts_after_a_fall_without_cause_is_not_suspected() -> None:
    trainer, quiet = Trainer(), CpuJob("quiet", demand=1e9, cores=2)
    node, policy = ModelNode([trainer], [quiet], seed=1), Policy()
    node.run(policy, ONSET)
    trainer.rate_per_second = 6.0
    node.run(policy, 30)
    node.cpu_jobs = [quiet, CpuJob("late", demand=0.0, begin=node.now)]
    assert acted(node, policy, 20) == []


def test_a_trial_ends_when_its_victim_can_no_longer_be_judged() -> None:
    cpu_job = hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([Trainer()], [cpu_job], seed=1), Policy()
    while cpu_job.throttle == FREE:
        node.run(policy, 1)
    for _ in range(15):
        window = node.window()
        unsteady = tuple(replace(one, steady=one.cpu_job) for one in window.attempts)
        node.apply(policy.judge(replace(window, attempts=unsteady)))
    assert cpu_job.throttle == FREE


def test_a_ladder_follows_the_cores_of_its_job() -> None:
    node, policy, cpu_job = throttled()
    cpu_job.cores, cpu_job.demand = 2, 1e9
    first = acted(node, policy, 20)[0]
    assert first.throttle == FREE, "one core of two is the gentlest rung"


def test_all_throttles_are_released_at_once_without_gpu_jobs() -> None:
    alone = AttemptWindow("cpu", 1, True, 1.0, cores=8, throttle=Throttle(cores=1))
    (directive,) = Policy().judge(NodeWindow("n", 5.0, 5.0, (alone,)))
    assert (directive.throttle, directive.share) == (FREE, 1.0)


def test_a_silence_does_not_count_as_an_arrival() -> None:
    node, policy = ModelNode([Trainer()], [CpuJob("cpu", demand=1e9)], seed=1), Policy()
    node.run(policy, ONSET)
    node.now += 600.0
    node.run(policy, 1)
    assert policy.state.onset == ""


def test_a_one_core_job_without_bandwidth_limits_is_suspended_and_then_moved() -> None:
    trainer, one_core = Trainer(), hog(0.4, begin=5.0 * ONSET)
    one_core.cores = 1
    node, policy = ModelNode([trainer], [one_core], seed=1), Policy()
    directives = acted(node, policy, ONSET + 720)
    assert any(directive.move for directive in directives)
    assert one_core.moved


def test_a_throttled_attempt_that_was_resized_gets_the_ladder_of_its_new_size() -> None:
    attempt = AttemptWindow("cpu", 1, True, 8.0, cores=8, throttle=Throttle(cores=4))
    window, jobs, id = NodeWindow("n1", 100.0, 5.0, (attempt,)), ThrottledJobs(), ("cpu", 1)
    jobs.adopt({id: attempt}, window)
    hold = jobs.holds[id]
    assert (hold.rung, hold.cores) == (0, 8)
    larger = replace(attempt, cores=16)
    jobs.resend({id: larger}, window)
    assert (hold.rung, hold.cores, hold.ladder) == (1, 16, rungs(larger, window))


@pytest.mark.parametrize(("carried_out", "rung"), [(Throttle(cores=4), 0), (Throttle(cores=2), 1), (FREE, None)])
def test_what_an_agent_does_not_carry_out_is_repeated_and_then_taken_as_it_is(
    carried_out: Throttle, rung: int | None
) -> None:
    attempt = AttemptWindow("cpu", 1, True, 8.0, cores=8, throttle=carried_out)
    window, jobs, id = NodeWindow("n1", 100.0, 5.0, (attempt,)), ThrottledJobs(), ("cpu", 1)
    ladder = rungs(attempt, window)
    jobs.holds[id] = hold = Hold(ladder, 8, 2, ladder[2].throttle, wait=60.0, since=0.0, reason="it is slow")
    for asked in range(1, ASKED_MAX + 1):
        jobs.directives.clear()
        jobs.resend({id: attempt}, window)
        assert (hold.rung, hold.asked, len(jobs.directives)) == (2, asked, int(asked > 1))
    jobs.directives.clear()
    jobs.resend({id: attempt}, window)
    if rung is None:
        assert (jobs.holds, list(jobs.directives), list(jobs.cleared)) == ({}, [id], [id])
    else:
        assert (jobs.holds[id].rung, jobs.holds[id].throttle, jobs.directives) == (rung, carried_out, {})
