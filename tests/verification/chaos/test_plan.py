"""A plan is its seed's, and names what there is."""

from __future__ import annotations

from tests.verification.chaos.jobs import STOP_AFTER_SECONDS
from tests.verification.chaos.naming import NAMED, NAMED_SECONDS
from tests.verification.chaos.plan import (
    AGENTS,
    CLIENT,
    DEFAULT,
    DRAWN,
    ELECTED,
    ETCD,
    LEASE_SECONDS,
    MEMBERS,
    MODES,
    NODES,
    PARTS,
    REGRESSIONS,
    SHARES,
    UNDRAWN,
    Fault,
    Mode,
    Step,
    cut_off,
    plan,
)

from cotenant.fail_points import POINTS

STEPS = 2000


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(7, 50) == plan(7, 50) == plan(7, 60)[:50]
    assert plan(7, 50) != plan(8, 50)


def test_every_fault_is_drawn_for_parts_that_there_are() -> None:
    steps = plan(1, STEPS, set(Fault))
    assert {step.fault for step in steps} == set(Fault) == set(SHARES)
    for step in steps:
        assert step.part in (*PARTS, CLIENT, ETCD, *ELECTED, "agent"), step
        assert step.peer in ("", *PARTS, CLIENT), step
        assert step.part != step.peer, step
        assert step.after_seconds > 0, step


def test_what_cannot_be_done_is_not_drawn() -> None:
    assert Fault.CLOCK not in {step.fault for step in plan(1, STEPS, set(Fault) - {Fault.CLOCK})}


def test_packets_between_members_of_etcd_are_cut_off_delayed_and_garbled() -> None:
    within = {step.fault for step in plan(1, STEPS) if step.part.startswith(ETCD) and step.peer.startswith(ETCD)}
    assert within >= {Fault.CUT, Fault.CUT_ONE_WAY, Fault.DELAY, Fault.LOSE, Fault.GARBLE}


def test_every_fail_point_that_a_mesh_comes_to_is_drawn() -> None:
    halts = [step for step in plan(1, 5 * STEPS) if step.fault is Fault.FAIL_POINT]
    assert {step.point.partition("=")[0] for step in halts} == set(DRAWN) == set(POINTS) - set(UNDRAWN)
    for step in halts:
        assert step.part in (*ELECTED, "agent"), step
        assert step.seconds > LEASE_SECONDS, step


def test_a_few_hundred_steps_arm_every_fail_point_and_none_again_before_each_other_one() -> None:
    for seed in range(20):
        points = [step.point.partition("=")[0] for step in plan(seed, 400) if step.fault is Fault.FAIL_POINT]
        assert set(points) == set(DRAWN), seed
        assert len(set(points[: len(DRAWN)])) == len(DRAWN)


def test_some_fail_points_alone_are_drawn_beside_all_faults() -> None:
    steps = plan(1, STEPS, points=("array.changed",))
    assert {step.fault for step in steps} == DEFAULT
    points = {step.point.partition("=")[0] for step in steps if step.fault not in MODES}
    assert points == {"", "array.changed"}


def test_a_store_that_went_back_or_is_another_is_drawn_only_where_that_is_asked_for() -> None:
    assert {step.fault for step in plan(1, STEPS)} == DEFAULT == set(Fault) - REGRESSIONS
    assert {step.fault for step in plan(1, STEPS, REGRESSIONS)} == REGRESSIONS


def test_every_way_in_which_a_fault_can_be_done_is_drawn() -> None:
    steps = plan(1, 2 * STEPS)
    for fault, modes in MODES.items():
        assert {step.point for step in steps if step.fault is fault} == set(modes)
    silent = {step.point for step in steps if step.fault is Fault.BLACK_HOLE and step.part in MEMBERS}
    assert silent == {Mode.SILENT}  # members speak no HTTP/2 that we could answer


def test_parts_are_stopped_again_and_again_for_less_and_more_than_a_lease() -> None:
    stopped = [step.amount for step in plan(1, STEPS) if step.fault is Fault.STUTTER]
    assert min(stopped) < LEASE_SECONDS / 2 < LEASE_SECONDS < max(stopped)


def test_some_faults_of_each_kind_that_has_to_be_named_last_long_enough_for_that() -> None:
    lasting = {step.fault for step in plan(1, 10 * STEPS, set(Fault)) if step.seconds > NAMED_SECONDS}
    assert lasting >= set(NAMED) - REGRESSIONS


def test_pauses_last_shorter_and_longer_than_a_lease() -> None:
    lasted = [step.seconds for step in plan(1, STEPS) if step.fault is Fault.PAUSE]
    assert min(lasted) < 1 < 2 < max(lasted)


def test_nodes_are_alone_for_longer_than_jobs_that_stop_by_themselves_wait() -> None:
    alone = [step.seconds for step in plan(1, STEPS) if step.fault is Fault.ISOLATE and step.part in NODES]
    assert min(alone) < 1 < STOP_AFTER_SECONDS < max(alone)


def test_a_fault_says_which_agents_it_may_cut_off() -> None:
    def cut(fault: Fault, part: str, peer: str = "") -> int:
        return len(cut_off(Step(1, 0.5, fault, part, peer)))

    assert cut_off(Step(1, 0.5, Fault.PAUSE, NODES[1])) == {NODES[1]}
    assert cut(Fault.CUT, NODES[0], "placement-1") == 1
    assert cut(Fault.KILL, "placement-2") == cut(Fault.NO_MAJORITY, "etcd-1", "etcd-2") == AGENTS
    assert cut(Fault.CUT, "queue-1", "predictor-1") == cut(Fault.KILL_JOB, NODES[0]) == 0
