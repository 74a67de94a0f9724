"""Scenarios of a node with a contention policy, in a closed loop with the model node of the benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.conformance.contention_node import PEAK, CpuJob, ModelNode, Trainer, hog
from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import SUSPENDED
from cotenant.policies.coda_eliminator.policy import CodaEliminator

ONSET = 60  # windows until the CPU job starts: five minutes
HARDWARE = pytest.mark.parametrize(("reported", "enforced"), [(True, True), (True, False), (False, False)])


def directives(story: list[tuple[NodeWindow, list[Directive]]]) -> list[tuple[int, Directive]]:
    return [(number, directive) for number, (_, directives) in enumerate(story) for directive in directives]


@HARDWARE
@pytest.mark.parametrize("slowdown", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_a_victim_is_noticed_within_3_windows_and_well_within_6(
    reported: bool, enforced: bool, slowdown: float, seed: int
) -> None:
    trainer = Trainer()
    cpu_job = hog(slowdown, trainer, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed, reported=reported, enforced=enforced), CodaEliminator()
    assert directives(node.run(policy, ONSET)) == []
    first = directives(node.run(policy, 3))[0][1]
    assert (first.job_id, first.victim_job_id) == ("hog", "dnn")
    assert first.victim_slowdown == pytest.approx(slowdown, abs=0.1)
    node.run(policy, 3)
    assert trainer.speed >= 0.95
    assert cpu_job.speed >= 0.1 * cpu_job.speed_alone


@HARDWARE
def test_a_throttle_is_relaxed_until_a_job_slows_down_and_no_further(reported: bool, enforced: bool) -> None:
    trainer, cpu_job = Trainer(), hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed=3, reported=reported, enforced=enforced), CodaEliminator()
    node.run(policy, ONSET + 12)
    deepest, slowed, speeds = cpu_job.throttle, 0, []
    for _ in range(720):
        node.run(policy, 1)
        slowed += trainer.speed < 0.95
        speeds.append(cpu_job.speed)
    assert deepest != FREE
    assert slowed <= 18, "relapses become rarer: at most a fortieth of an hour is hurt"
    assert max(speeds) > min(speeds)


def test_a_job_that_starts_as_the_victim_falls_is_suspected_first() -> None:
    old, new = CpuJob("old", demand=60e9, cores=32), hog(0.3, begin=5.0 * ONSET)
    new.demand -= old.demand
    node, policy = ModelNode([Trainer(cores=4)], [old, new], seed=1, reported=False), CodaEliminator()
    story = directives(node.run(policy, ONSET + 6))
    assert {directive.job_id for _, directive in story} == {"hog"}
    assert "rose by" in story[0][1].reason


def test_after_a_trial_without_effect_the_next_suspect_is_tried() -> None:
    decoy, guilty = CpuJob("decoy", demand=0.0, cores=16, begin=5.0 * ONSET), hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([Trainer()], [decoy, guilty], seed=2, reported=False), CodaEliminator()
    story = directives(node.run(policy, ONSET + 9))
    assert [directive.job_id for _, directive in story[:3]] == ["decoy", "decoy", "hog"]
    freed = story[1][1]
    assert (freed.share, freed.throttle) == (1.0, FREE)
    assert "had no effect" in freed.reason
    assert decoy.throttle == FREE
    assert guilty.throttle != FREE
    assert node.trainers[0].speed >= 0.95


def test_two_jobs_that_slow_a_victim_together_are_both_throttled() -> None:
    trainer = Trainer()
    both = [hog(0.6, trainer, id=name, begin=5.0 * ONSET) for name in ("one", "two")]
    node = ModelNode([trainer], both, seed=5, enforced=True)
    node.run(CodaEliminator(), ONSET + 12)
    assert all(job.throttle != FREE for job in both)
    assert trainer.speed >= 0.95


def test_a_fall_without_a_cause_becomes_the_baseline() -> None:
    trainer, quiet = Trainer(), CpuJob("quiet", demand=1e9, cores=2)
    node, policy = ModelNode([trainer], [quiet], seed=1), CodaEliminator()
    node.run(policy, ONSET)
    trainer.rate_per_second = 6.0
    assert directives(node.run(policy, 60)) == []
    cpu_job = hog(0.4, begin=node.now)
    node.cpu_jobs = [quiet, cpu_job]
    assert directives(node.run(policy, 4))[0][1].job_id == "hog"


def test_a_victim_or_a_suspect_that_leaves_ends_the_matter() -> None:
    trainer, other = Trainer(), Trainer("other")
    cpu_job = hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer, other], [cpu_job], seed=1, enforced=True), CodaEliminator()
    node.run(policy, ONSET + 8)
    assert cpu_job.throttle != FREE
    node.trainers = []
    assert [directive.share for _, directive in directives(node.run(policy, 2))] == [1.0]
    cpu_job.end = node.now
    assert directives(node.run(policy, 30)) == []


def test_a_new_instance_adopts_applied_throttles() -> None:
    trainer, cpu_job = Trainer(), hog(0.4, begin=5.0 * ONSET)
    node = ModelNode([trainer], [cpu_job], seed=1, enforced=True)
    node.run(CodaEliminator(), ONSET + 8)
    throttled = cpu_job.throttle
    story = directives(node.run(CodaEliminator(), 40))
    assert throttled != FREE
    assert story[0][0] >= 11, "a calm minute first"
    assert FREE != story[0][1].throttle != throttled
    assert (story[0][1].throttle or FREE).bandwidth_percent > throttled.bandwidth_percent


def test_no_job_is_suspended_for_more_than_five_minutes_of_thirty() -> None:
    trainer = Trainer()
    one_core = hog(0.4, trainer, begin=5.0 * ONSET)
    one_core.cores = 1
    node, policy = ModelNode([trainer], [one_core], seed=1), CodaEliminator()
    story = node.run(policy, ONSET + 360)
    suspensions = sum(attempt.throttle.suspended for window, _ in story for attempt in window.attempts)
    assert 12 <= suspensions <= 60
    assert any(directive.throttle == SUSPENDED for _, directive in directives(story))


def test_what_a_node_cannot_do_is_said_again_and_then_given_up() -> None:
    trainer, cpu_job = Trainer(), hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed=1), CodaEliminator()
    node.run(policy, ONSET)
    reported: list[Directive] = []
    for _ in range(20):
        reported += policy.judge(node.window())  # no directive is carried out
    assert [directive.share for directive in reported] == [0.125, 0.125, 0.125, 1.0]
    assert len(reported) <= 5
    assert "cannot" in reported[-1].reason


def test_jobs_of_the_victims_own_gang_are_left_alone() -> None:
    trainer, server = Trainer(), hog(0.5, id="dnn", begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [server], seed=1), CodaEliminator()
    for _ in range(ONSET + 10):
        window = node.window()
        window = replace(
            window,
            attempts=tuple(replace(one, number=2) if one.cpu_job else one for one in window.attempts),
        )
        assert list(policy.judge(window)) == []


def test_a_job_without_a_rate_is_judged_by_its_gpus() -> None:
    trainer, cpu_job = Trainer(reported=False), hog(0.4, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed=1), CodaEliminator()
    story = directives(node.run(policy, ONSET + 4))
    assert "GPU utilisation" in story[0][1].reason


def test_a_job_slowed_from_the_start_is_detected_by_its_prediction() -> None:
    trainer = Trainer(expected=10.0)
    node, policy = ModelNode([trainer], [hog(0.4, trainer)], seed=1), CodaEliminator()
    assert directives(node.run(policy, 12))
    assert trainer.speed >= 0.95


def test_windows_that_may_not_be_judged_and_windows_that_come_twice_change_nothing() -> None:
    trainer, cpu_job = Trainer(), hog(0.6, begin=5.0 * ONSET)
    node, policy = ModelNode([trainer], [cpu_job], seed=1), CodaEliminator()
    node.run(policy, ONSET)
    for _ in range(20):
        window = node.window()
        unsteady = tuple(replace(one, steady=one.cpu_job) for one in window.attempts)
        assert list(policy.judge(replace(window, attempts=unsteady))) == []
        assert list(policy.judge(window)) == []


def test_each_core_count_and_phase_has_a_baseline_of_its_own() -> None:
    policy = CodaEliminator()
    for number in range(80):
        slow = number >= 40
        job = AttemptWindow("dnn", 1, False, 4.0, rate_per_second=5.0 if slow else 10.0, cores=4 if slow else 8)
        cpu = AttemptWindow("cpu", 1, True, 8.0 if slow else 0.0, cores=8)
        assert list(policy.judge(NodeWindow("n1", 5.0 * number, 5.0, (job, cpu), cpu_some_percent=99.0))) == []


def test_a_directive_names_the_victim_its_loss_and_the_reason() -> None:
    node = ModelNode([Trainer()], [hog(0.4, begin=5.0 * ONSET)], seed=1, enforced=True)
    (_, first), *_ = directives(node.run(CodaEliminator(), ONSET + 4))
    assert first.throttle == Throttle(bandwidth_percent=10)
    assert first.reason.startswith("on trial, as dnn's rate is ")
    assert "below its baseline of" in first.reason
    assert "memory bandwidth is at 100 % of the node's peak, and its use rose by" in first.reason
    assert 0 < first.share < 0.2
    assert PEAK == 100e9
