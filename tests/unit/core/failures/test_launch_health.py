"""Which nodes are held because launches fail there, and when they take work again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.failures.launch_health import (
    RECENT_MAX,
    Hold,
    HoldRules,
    LaunchFailure,
    NodeLaunches,
    Outcomes,
    QuickFailure,
    Suspicion,
    canary_gone,
    canary_started,
    did_well,
    failed_quickly,
    launch_failed,
    launched,
    may_try,
    restored,
    subject_of,
)
from cotenant.core.model.lifecycle import LaunchCause

RULES, UNKNOWN = HoldRules(), NodeLaunches()
OF_JOBS = (
    LaunchCause.WORKING_DIRECTORY,
    LaunchCause.UPLOAD,
    LaunchCause.ENVIRONMENT,
    LaunchCause.IMAGE,
    LaunchCause.SECRET,
    LaunchCause.MOUNT,
)
CAUSES = [cause for cause in LaunchCause if cause not in OF_JOBS]
TIMES = st.floats(0.0, 1e6)


def refused(at: float, attempt: str, cause: LaunchCause = LaunchCause.CGROUP) -> tuple[LaunchFailure, str]:
    return LaunchFailure(at, subject_of(attempt, "carol", cause), cause, "read-only"), attempt


def after(*failures: tuple[LaunchFailure, str], known: NodeLaunches = UNKNOWN) -> NodeLaunches:
    for failure, attempt in failures:
        known = launch_failed(known, failure, attempt, RULES)
    return known


def held(at: float = 0.0) -> NodeLaunches:
    return after(*(refused(at, f"job/{number}") for number in range(RULES.failures)))


@given(st.lists(st.sampled_from(CAUSES), min_size=3, max_size=3), TIMES)
def test_launches_in_a_row_that_fail_hold_a_node_whatever_the_cause(causes: list[LaunchCause], at: float) -> None:
    known = NodeLaunches()
    for number, cause in enumerate(causes):
        failure = LaunchFailure(at, subject_of(f"{number}/1", f"user-{number}", cause), cause, "")
        known = launch_failed(known, failure, f"{number}/1")
    assert known.hold is not None
    assert known.hold.suspicion is Suspicion.CANNOT_LAUNCH


@given(st.lists(st.booleans(), max_size=30))
def test_a_node_is_held_only_after_so_many_failures_with_no_success_between(outcomes: list[bool]) -> None:
    known, row = NodeLaunches(), 0
    for number, well in enumerate(outcomes):
        known = launched(known) if well else after(refused(float(number), f"{number}/1"), known=known)
        row = 0 if well else row + 1
        assert (known.hold is not None) == (row >= RULES.failures)


def test_failures_that_are_too_old_do_not_count() -> None:
    old, new = (refused(at, f"job/{at}") for at in (0.0, RULES.window_seconds + 1))
    assert after(old, old, new, new).hold is None
    assert len(after(old, new).failures) == 1


def test_one_unknown_user_holds_no_node_and_several_do() -> None:
    one = [refused(0.0, f"job/{number}", LaunchCause.USER) for number in range(9)]
    assert after(*one).hold is None
    several = [
        (LaunchFailure(0.0, subject_of("job", name, LaunchCause.USER), LaunchCause.USER, ""), f"{name}/1")
        for name in ("carol", "dave", "erin")
    ]
    assert after(*several).hold is not None


@pytest.mark.parametrize("cause", OF_JOBS)
def test_what_a_job_alone_needs_says_nothing_of_the_node(cause: LaunchCause) -> None:
    missing = [refused(0.0, f"job/{number}", cause) for number in range(9)]
    assert after(*missing) == NodeLaunches()


@given(st.integers(1, 40), TIMES)
def test_each_canary_that_fails_doubles_the_wait_up_to_a_limit(canaries: int, at: float) -> None:
    known = held(at)
    for number in range(canaries):
        assert known.hold is not None
        now = known.hold.next_canary
        assert may_try(known, now)
        name = f"canary/{number}"
        known = canary_started(known, name)
        assert not may_try(known, now + 1e9)  # one at a time
        known = after(refused(now, name), known=known)
        assert known.hold is not None
        wait = known.hold.next_canary - now
        assert wait == pytest.approx(min(600.0, 10.0 * 2 ** (number + 1)), abs=1e-3)


def test_an_attempt_that_was_under_way_before_the_hold_does_not_delay_the_canary() -> None:
    known = held()
    assert after(refused(5.0, "late/1"), known=known) == known


def test_a_launch_ends_the_hold_of_a_node_that_could_not_launch() -> None:
    assert launched(canary_started(held(), "canary/1")) == NodeLaunches()


def test_a_canary_that_is_cancelled_lets_another_one_be_tried_at_once() -> None:
    known = canary_gone(canary_started(held(), "canary/1"), "canary/1")
    assert may_try(known, 10.0)
    assert known == held()


def quick(number: int, tenant: str, job: str = "", program: str = "") -> QuickFailure:
    return QuickFailure(float(number), tenant, job or f"job-{number}", program or f"program-{number}")


def all_quick(
    *failures: QuickFailure, well: frozenset[str] = frozenset({"a", "b"}), alike: frozenset[str] = frozenset()
) -> NodeLaunches:
    known = NodeLaunches()
    for failure in failures:
        known = failed_quickly(known, failure, f"{failure.job}/1", well_elsewhere=well, fail_elsewhere=alike)
    return known


def test_jobs_of_two_tenants_that_do_well_elsewhere_make_a_black_hole() -> None:
    known = all_quick(quick(0, "a"), quick(1, "b"), quick(2, "a"))
    assert known.hold is not None
    assert known.hold.suspicion is Suspicion.FAILS_JOBS


@given(st.lists(st.integers(0, 5), max_size=60))
def test_one_tenant_never_makes_a_black_hole(jobs: list[int]) -> None:
    assert all_quick(*(quick(at, "a", f"job-{job}") for at, job in enumerate(jobs))).hold is None


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=40), st.sets(st.sampled_from(["a", "b", "c"]), max_size=1))
def test_without_two_tenants_that_do_well_elsewhere_there_is_no_black_hole(tenants: list[str], well: set[str]) -> None:
    failures = [quick(at, tenant) for at, tenant in enumerate(tenants)]
    assert all_quick(*failures, well=frozenset(well)).hold is None


@given(st.lists(st.sampled_from(["a", "b"]), max_size=40))
def test_programs_that_fail_on_other_nodes_too_make_no_black_hole(tenants: list[str]) -> None:
    failures = [quick(at, tenant, program="import torch") for at, tenant in enumerate(tenants)]
    assert all_quick(*failures, alike=frozenset({"import torch"})).hold is None


def test_the_tasks_of_an_array_count_as_one_job() -> None:
    failures = [quick(0, "a", "array-1"), quick(1, "b", "array-2"), quick(2, "a", "array-1"), quick(3, "b", "array-2")]
    assert all_quick(*failures).hold is None


def test_an_attempt_that_does_well_clears_the_suspicion() -> None:
    known = did_well(all_quick(quick(0, "a"), quick(1, "b")))
    assert failed_quickly(known, quick(2, "a"), "job-2/1", well_elsewhere={"a", "b"}).hold is None


def test_a_launch_alone_does_not_end_the_hold_of_a_black_hole() -> None:
    known = canary_started(all_quick(quick(0, "a"), quick(1, "b"), quick(2, "a")), "canary/1")
    assert launched(known).hold == known.hold
    assert did_well(known).hold is None


def test_a_canary_that_fails_quickly_keeps_a_black_hole_held_for_longer() -> None:
    known = canary_started(all_quick(quick(0, "a"), quick(1, "b"), quick(2, "a")), "canary/1")
    failed = failed_quickly(known, replace(quick(50, "b"), at=50.0), "canary/1")
    assert failed.hold is not None
    assert (failed.hold.failed_canaries, failed.hold.next_canary) == (1, 70.0)


def test_a_new_leader_tries_a_held_node_after_the_first_interval() -> None:
    known = restored(Suspicion.CANNOT_LAUNCH, "cannot launch: read-only", 7, 100.0)
    assert known.hold == Hold(Suspicion.CANNOT_LAUNCH, "cannot launch: read-only", 110.0, 7)


def test_elsewhere_is_another_node_within_the_window() -> None:
    seen = Outcomes(window_seconds=60.0)
    seen.well("a", "n1", 0.0)
    seen.failed("python", "n1", 0.0)
    assert seen.well_elsewhere({"a", "b"}, "n2", 50.0) == {"a"}
    assert seen.well_elsewhere({"a"}, "n1", 50.0) == set()
    assert seen.fail_elsewhere({"python"}, "n2", 61.0) == set()
    seen.forget(61.0)
    assert seen == Outcomes(window_seconds=60.0)


GAPS = st.sampled_from([0.0, 100.0, 150.0, RULES.window_seconds, RULES.window_seconds + 1])
LIMITS = st.builds(HoldRules, failures=st.integers(0, 3), quick_jobs=st.integers(0, 3), quick_tenants=st.integers(1, 3))


@given(st.lists(st.tuples(GAPS, st.integers(0, 3)), min_size=1, max_size=8), LIMITS)
def test_a_node_is_held_when_so_many_launches_failed_within_the_window(
    failures: list[tuple[float, int]], rules: HoldRules
) -> None:
    known, at, last = NodeLaunches(), 0.0, dict[int, float]()
    for gap, subject in failures:
        at += gap
        last = {one: then for one, then in last.items() if at - then <= rules.window_seconds} | {subject: at}
        failure = LaunchFailure(at, f"{subject}", LaunchCause.DISK, "full")
        known = launch_failed(known, failure, f"{subject}", rules)
        if rules.failures and len(last) >= rules.failures:
            assert known.hold == Hold(Suspicion.CANNOT_LAUNCH, "cannot launch: full", at + rules.canary_seconds)
            return
        assert known.hold is None
        assert {one.subject for one in known.failures} == {f"{one}" for one in last}


@given(st.lists(st.tuples(GAPS, st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=8), LIMITS)
def test_a_node_is_a_black_hole_when_so_many_jobs_of_so_many_tenants_failed_within_the_window(
    failures: list[tuple[float, str, int]], rules: HoldRules
) -> None:
    known, at, last = NodeLaunches(), 0.0, dict[int, tuple[float, str]]()
    for gap, tenant, job in failures:
        at += gap
        last = {one: then for one, then in last.items() if at - then[0] <= rules.window_seconds} | {job: (at, tenant)}
        failure = QuickFailure(at, tenant, f"{job}")
        known = failed_quickly(known, failure, f"{job}/1", rules, well_elsewhere={"a", "b"})
        counted = [one for _, one in last.values() if one in "ab"]
        if rules.quick_jobs and len(counted) >= rules.quick_jobs and len(set(counted)) >= rules.quick_tenants:
            assert known.hold is not None
            assert (known.hold.suspicion, known.hold.next_canary) == (Suspicion.FAILS_JOBS, at + rules.canary_seconds)
            assert not may_try(known, known.hold.next_canary - 0.1)
            assert known.quick == ()
            return
        assert known.hold is None
        assert {one.job for one in known.quick} == {f"{one}" for one in last}


def test_failures_remembered_of_a_node_are_few_and_the_latest() -> None:
    never = HoldRules(failures=0, quick_jobs=0)
    known = NodeLaunches()
    for number in range(RECENT_MAX + 5):
        known = launch_failed(known, *refused(1.0, f"job/{number}"), never)
        known = failed_quickly(known, quick(1, "a", f"job-{number}"), "x", never)
    assert [one.subject for one in known.failures] == [f"job/{number}" for number in range(5, RECENT_MAX + 5)]
    assert [one.job for one in known.quick] == [f"job-{number}" for number in range(5, RECENT_MAX + 5)]


def test_an_outcome_counts_to_the_end_of_its_window() -> None:
    seen = Outcomes(window_seconds=60.0)
    seen.well("a", "n1", 0.0)
    seen.failed("python", "n1", 0.0)
    for now, counts in ((60.0, True), (60.1, False)):
        assert seen.well_elsewhere({"a"}, "n2", now) == ({"a"} if counts else set())
        assert seen.fail_elsewhere({"python"}, "n2", now) == ({"python"} if counts else set())
        seen.forget(now)
        assert (seen == Outcomes(window_seconds=60.0)) != counts
