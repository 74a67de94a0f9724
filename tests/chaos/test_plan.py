"""A plan is its seed's, and names what there is."""

from __future__ import annotations

from tests.chaos.jobs import STOP_AFTER_SECONDS
from tests.chaos.plan import (
    AGENTS,
    CLIENT,
    DRAWN,
    ELECTED,
    ETCD,
    LEASE_SECONDS,
    NODES,
    PARTS,
    SHARES,
    UNDRAWN,
    Fault,
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
    steps = plan(1, STEPS)
    assert {step.fault for step in steps} == set(Fault) == set(SHARES)
    for step in steps:
        assert step.part in (*PARTS, CLIENT, *ELECTED, "agent"), step
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
    assert {step.fault for step in steps} == set(Fault)
    assert {step.point.partition("=")[0] for step in steps} == {"", "array.changed"}


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
