"""A plan depends on its seed alone, and names existing parts."""

from __future__ import annotations

from tests.verification.chaos.jobs import STOP_AFTER_SECONDS
from tests.verification.chaos.plan import (
    AGENTS,
    CLIENT,
    DEFAULT,
    DRAWN,
    ETCD,
    LEADER_POINTS,
    LEASE_SECONDS,
    MEMBERS,
    MODES,
    NODES,
    PARTS,
    REGRESSIONS,
    SHARES,
    UNDRAWN_POINTS,
    Fault,
    Mode,
    Step,
    cut_off,
    plan,
)
from tests.verification.chaos.status_checker import MUST_BE_NAMED, NAMED_SECONDS_MAX

from cotenant.fail_points import POINTS

STEPS = 2000


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert plan(7, 50) == plan(7, 50) == plan(7, 60)[:50]
    assert plan(7, 50) != plan(8, 50)


def test_every_fault_is_drawn_for_existing_parts() -> None:
    steps = plan(1, STEPS, set(Fault))
    assert {step.fault for step in steps} == set(Fault) == set(SHARES)
    for step in steps:
        assert step.part in (*PARTS, CLIENT, ETCD, *LEADER_POINTS, "agent"), step
        assert step.peer in ("", *PARTS, CLIENT), step
        assert step.part != step.peer, step
        assert step.after_seconds > 0, step


def test_impossible_faults_are_not_drawn() -> None:
    assert Fault.CLOCK not in {step.fault for step in plan(1, STEPS, set(Fault) - {Fault.CLOCK})}


def test_packets_between_members_of_etcd_are_cut_off_delayed_and_garbled() -> None:
    within = {step.fault for step in plan(1, STEPS) if step.part.startswith(ETCD) and step.peer.startswith(ETCD)}
    assert within >= {Fault.CUT, Fault.CUT_ONE_WAY, Fault.DELAY, Fault.LOSE, Fault.GARBLE}


def test_every_fail_point_reached_in_a_mesh_is_drawn() -> None:
    halts = [step for step in plan(1, 5 * STEPS) if step.fault is Fault.FAIL_POINT]
    assert {step.point.partition("=")[0] for step in halts} == set(DRAWN) == set(POINTS) - set(UNDRAWN_POINTS)
    for step in halts:
        assert step.part in (*LEADER_POINTS, "agent"), step
        assert step.seconds > LEASE_SECONDS, step


def test_fail_points_repeat_only_after_all_others_were_armed() -> None:
    for seed in range(20):
        points = [step.point.partition("=")[0] for step in plan(seed, 400) if step.fault is Fault.FAIL_POINT]
        assert set(points) == set(DRAWN), seed
        assert len(set(points[: len(DRAWN)])) == len(DRAWN)


def test_selected_fail_points_are_drawn_with_all_faults() -> None:
    steps = plan(1, STEPS, points=("array.changed",))
    assert {step.fault for step in steps} == DEFAULT
    points = {step.point.partition("=")[0] for step in steps if step.fault not in MODES}
    assert points == {"", "array.changed"}


def test_store_regressions_are_drawn_only_on_request() -> None:
    assert {step.fault for step in plan(1, STEPS)} == DEFAULT == set(Fault) - REGRESSIONS
    assert {step.fault for step in plan(1, STEPS, REGRESSIONS)} == REGRESSIONS


def test_every_mode_of_a_fault_is_drawn() -> None:
    steps = plan(1, 2 * STEPS)
    for fault, modes in MODES.items():
        assert {step.point for step in steps if step.fault is fault} == set(modes)
    silent = {step.point for step in steps if step.fault is Fault.BLACK_HOLE and step.part in MEMBERS}
    assert silent == {Mode.SILENT}  # members do not speak HTTP/2 that we could answer


def test_parts_stutter_for_less_and_more_than_a_lease() -> None:
    stopped = [step.amount for step in plan(1, STEPS) if step.fault is Fault.STUTTER]
    assert min(stopped) < LEASE_SECONDS / 2 < LEASE_SECONDS < max(stopped)


def test_some_faults_of_each_named_kind_last_long_enough() -> None:
    lasting = {step.fault for step in plan(1, 10 * STEPS, set(Fault)) if step.seconds > NAMED_SECONDS_MAX}
    assert lasting >= set(MUST_BE_NAMED) - REGRESSIONS


def test_pauses_last_shorter_and_longer_than_a_lease() -> None:
    lasted = [step.seconds for step in plan(1, STEPS) if step.fault is Fault.PAUSE]
    assert min(lasted) < 1 < 2 < max(lasted)


def test_nodes_are_isolated_for_longer_than_their_jobs_wait() -> None:
    alone = [step.seconds for step in plan(1, STEPS) if step.fault is Fault.ISOLATE and step.part in NODES]
    assert min(alone) < 1 < STOP_AFTER_SECONDS < max(alone)


def test_a_fault_knows_the_agents_it_may_disconnect() -> None:
    def cut(fault: Fault, part: str, peer: str = "") -> int:
        return len(cut_off(Step(1, 0.5, fault, part, peer)))

    assert cut_off(Step(1, 0.5, Fault.PAUSE, NODES[1])) == {NODES[1]}
    assert cut(Fault.CUT, NODES[0], "placement-1") == 1
    assert cut(Fault.KILL, "placement-2") == cut(Fault.NO_MAJORITY, "etcd-1", "etcd-2") == AGENTS
    assert cut(Fault.CUT, "queue-1", "predictor-1") == cut(Fault.KILL_JOB, NODES[0]) == 0
