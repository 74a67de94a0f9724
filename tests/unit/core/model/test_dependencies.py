"""Dependencies, topological order, and cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.dependencies import Condition, Counts, DependencyCycle, Verdict, topological_order, verdict

GRAPHS = st.integers(1, 8).flatmap(
    lambda count: st.fixed_dictionaries(
        {one: st.lists(st.integers(0, count - 1), max_size=3, unique=True) for one in range(count)}
    )
)


@given(GRAPHS)
def test_an_order_respects_dependencies_or_reports_a_cycle(before: dict[int, list[int]]) -> None:
    try:
        order = topological_order(before)
    except DependencyCycle as circle:
        members = circle.members
        assert len(set(members)) == len(members)
        for one, following in zip(members, (*members[1:], members[0]), strict=True):
            assert following in before[one]
    else:
        assert sorted(order) == sorted(before)
        assert all(order.index(first) < order.index(one) for one in before for first in before[one])


def test_what_waits_for_nothing_keeps_its_order() -> None:
    assert topological_order({0: [], 1: [], 2: []}) == [0, 1, 2]


def test_a_long_chain_is_no_deep_recursion() -> None:
    chain = {one: [one + 1] for one in range(5000)} | {5000: []}
    assert topological_order(chain) == list(range(5000, -1, -1))


@pytest.mark.parametrize(
    ("left", "failed", "after", "after_ok", "after_fail"),
    [
        (2, 0, Verdict.OPEN, Verdict.OPEN, Verdict.OPEN),
        (2, 1, Verdict.OPEN, Verdict.NEVER, Verdict.OPEN),
        (0, 1, Verdict.MET, Verdict.NEVER, Verdict.MET),
        (0, 0, Verdict.MET, Verdict.MET, Verdict.NEVER),
    ],
)
def test_a_condition_depends_on_jobs_left_and_jobs_failed(
    left: int, failed: int, after: Verdict, after_ok: Verdict, after_fail: Verdict
) -> None:
    assert verdict(Condition.AFTER, Counts(left, failed)) is after
    assert verdict(Condition.AFTER_OK, Counts(left, failed)) is after_ok
    assert verdict(Condition.AFTER_FAIL, Counts(left, failed)) is after_fail


@pytest.mark.parametrize(
    ("unstarted", "never_ran", "after_started"),
    [(0, 0, Verdict.MET), (1, 0, Verdict.OPEN), (1, 1, Verdict.NEVER), (0, 1, Verdict.NEVER)],
)
def test_a_start_is_awaited_until_all_have_run_or_one_never_will(
    unstarted: int, never_ran: int, after_started: Verdict
) -> None:
    counts = Counts(left=3, unstarted=unstarted, never_ran=never_ran)
    assert verdict(Condition.AFTER_STARTED, counts) is after_started
