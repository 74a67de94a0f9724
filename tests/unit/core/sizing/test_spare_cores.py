"""Spare cores go where they gain most: compared with trying everything."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.sizing.spare_cores import Borrower, lend


@st.composite
def concave(draw: st.DrawFn) -> list[float]:
    gains = sorted(draw(st.lists(st.integers(0, 20), max_size=4)), reverse=True)
    worth = [1.0]
    for gain in gains:
        worth.append(worth[-1] + gain / 8)
    return worth


@st.composite
def rising(draw: st.DrawFn) -> list[float]:
    worth = [1.0]
    for gain in draw(st.lists(st.integers(0, 20), max_size=4)):
        worth.append(worth[-1] + gain / 8)
    return worth


def best(spare: int, borrowers: list[Borrower]) -> float:
    """Try every way to hand out the cores of one node."""
    ways = product(*(range(len(one.worth)) for one in borrowers))
    return max(
        sum(one.worth[count] for one, count in zip(borrowers, way, strict=True))
        for way in ways
        if sum(count * one.replicas[0] for one, count in zip(borrowers, way, strict=True)) <= spare
    )


def gained(lent: dict[str, int], borrowers: list[Borrower]) -> float:
    return sum(one.worth[lent[one.job_id]] for one in borrowers)


@given(st.lists(concave(), max_size=4), st.integers(0, 9))
def test_with_curves_that_bend_downwards_nothing_is_better(curves: list[list[float]], spare: int) -> None:
    borrowers = [Borrower(str(number), worth, {0: 1}) for number, worth in enumerate(curves)]
    assert abs(gained(lend({0: spare}, borrowers), borrowers) - best(spare, borrowers)) < 1e-9


@given(st.lists(st.tuples(rising(), st.integers(1, 3)), max_size=4), st.integers(0, 9))
def test_with_any_curves_no_more_than_one_step_is_missed(shapes: list[tuple[list[float], int]], spare: int) -> None:
    borrowers = [Borrower(str(number), worth, {0: width}) for number, (worth, width) in enumerate(shapes)]
    step = max((worth[-1] - worth[0] for worth, _ in shapes), default=0.0)
    missed = best(spare, borrowers) - gained(lend({0: spare}, borrowers), borrowers)
    assert -1e-9 <= missed <= step + 1e-9


nodes = st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1, max_size=3)


@given(
    st.lists(st.tuples(rising(), nodes, st.integers(0, 3)), max_size=5),
    st.dictionaries(st.integers(0, 3), st.integers(0, 9)),
)
def test_no_node_lends_more_than_it_has_and_nothing_is_lent_without_gain(
    shapes: list[tuple[list[float], dict[int, int], int]], spare: dict[int, int]
) -> None:
    borrowers = [Borrower(str(number), worth, on, held) for number, (worth, on, held) in enumerate(shapes)]
    lent = lend(spare, borrowers)
    assert lend(spare, reversed(borrowers)) == lent
    for node in {node for one in borrowers for node in one.replicas}:
        assert sum(lent[one.job_id] * one.replicas.get(node, 0) for one in borrowers) <= spare.get(node, 0)
    for one in borrowers:
        count = lent[one.job_id]
        assert 0 <= count < len(one.worth)
        assert count == 0 or one.worth[count] > one.worth[count - 1]


def test_a_lent_core_stays_if_the_gain_elsewhere_may_be_noise() -> None:
    old, new = Borrower("b", [1.0, 1.30], {0: 1}, held=1), Borrower("a", [1.0, 1.31], {0: 1})
    assert lend({0: 1}, [old, new]) == {"a": 0, "b": 1}
    assert lend({0: 1}, [old, new], keep=1.0) == {"a": 1, "b": 0}


def test_a_sill_is_climbed_where_what_is_behind_it_pays() -> None:
    sill = Borrower("a", [1.0, 1.0, 1.0, 2.0], {0: 1})
    assert lend({0: 3}, [sill, Borrower("b", [1.0, 1.2, 1.2, 1.2], {0: 1})]) == {"a": 3, "b": 0}
    assert lend({0: 2}, [sill]) == {"a": 0}


def test_a_gang_grows_in_lock_step_on_all_its_nodes() -> None:
    gang = Borrower("a", [1.0, 2.0, 3.0], {0: 2, 1: 1})
    assert lend({0: 5, 1: 1}, [gang]) == {"a": 1}
    assert lend({0: 5}, [gang]) == {"a": 0}


def test_a_gain_counts_per_core_that_it_takes() -> None:
    """A job of two replicas takes two cores for each step."""
    wide, slim = Borrower("wide", [1.0, 2.5], {0: 2}), Borrower("slim", [1.0, 2.0, 2.9], {0: 1})
    assert lend({0: 2}, [wide, slim]) == {"wide": 0, "slim": 2}
    dear = Borrower("slim", [1.0, 1.7, 2.4], {0: 1})
    assert lend({0: 2}, [wide, dear]) == {"wide": 1, "slim": 0}


@given(st.lists(st.tuples(concave(), st.integers(1, 3)), min_size=1, max_size=4))
def test_the_first_step_is_the_steepest_per_core(shapes: list[tuple[list[float], int]]) -> None:
    borrowers = [Borrower(str(number), worth, {0: width}) for number, (worth, width) in enumerate(shapes)]
    slopes = {
        one.job_id: (one.worth[1] - one.worth[0]) / one.replicas[0]
        for one in borrowers
        if len(one.worth) > 1 and one.worth[1] > 1.0
    }
    lent = lend({0: 3}, borrowers)  # enough for the first step of any of them
    steepest = max(slopes.values(), default=0.0)
    assert not slopes or any(lent[job_id] for job_id, slope in slopes.items() if slope == steepest)
