"""Refusals of equivalence classes: against a list of all refusals, and what is forgotten when."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.listed_refusals import ListedRefusals

from cotenant.conformance.worlds import World, gangs, rng, worlds
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.gang_allocation import release_all
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.equivalence import UNAFFECTED_BY_ROOM, ClassRefusals, answers_for_class, room_on
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.first_fit import FirstFit

CAPACITY = Refusal(Code.CAPACITY, "too little is free")
RESERVED = Refusal(Code.RESERVED, "its places are reserved")
TIMES = st.sampled_from([math.inf, math.inf, 60.0, 300.0])
CODES = st.sampled_from([Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.RESERVED])
REFUSALS = st.builds(Refusal, CODES, st.text("ab", max_size=2), holds_seconds=TIMES, held_seconds=TIMES)
KEYS, WAITS, BOUND = st.sampled_from("xy"), st.sampled_from([0.0, 50.0, 100.0, 400.0]), st.sampled_from([(), ("a",)])


@given(st.lists(st.tuples(KEYS, REFUSALS, WAITS, BOUND), max_size=6), KEYS, WAITS, BOUND)
def test_a_gang_gets_the_first_refusal_of_its_class_that_holds_for_it(
    said: list[tuple[str, Refusal, float, Hashable]], key: str, waited: float, bound: Hashable
) -> None:
    quick, slow = ClassRefusals[str](), ListedRefusals[str]()
    for one in said:
        if slow.get(one[0], one[2], one[3]) is None:  # a known refusal is not asked for again
            quick.add(*one)
            slow.add(*one)
    assert quick.get(key, waited, bound) == slow.get(key, waited, bound)
    assert quick.get(key, waited) == slow.get(key, waited)
    if key not in quick.divided:
        assert quick.get(key, waited, bound) == quick.uniform.get(key)


@given(REFUSALS, WAITS)
def test_a_refusal_that_answers_for_its_class_does_so_at_any_wait(refusal: Refusal, waited: float) -> None:
    refusals = ClassRefusals[str]()
    refusals.add("x", refusal, 50.0, ("a",))
    assert answers_for_class(refusal) == (refusals.uniform.get("x") == refusal)
    assert not answers_for_class(replace(refusal, code=Code.NEVER_FITS))


def test_a_refusal_for_the_whole_class_is_kept_over_later_ones() -> None:
    refusals = ClassRefusals[str]()
    refusals.add("x", CAPACITY, 0)
    refusals.add("x", Refusal(Code.FRAGMENTED, "later", holds_seconds=5), 0)
    refusals.add("x", RESERVED, 0, ("a",))
    assert not refusals.divided
    assert refusals.get("x", 0, ("a",)) == CAPACITY


def test_a_refusal_by_reservations_holds_for_gangs_bound_alike_until_a_gang_starts() -> None:
    refusals = ClassRefusals[str]()
    refusals.add("x", RESERVED, 0, ("a",))
    refusals.add("y", CAPACITY, 0)
    assert refusals.any_reserved
    assert refusals.divided == {"x"}
    assert (refusals.get("x", 0, ("a",)), refusals.get("x", 0, ("b",)), refusals.get("x", 0)) == (RESERVED, None, None)
    refusals.forget_reserved()
    assert (refusals.get("x", 0, ("a",)), refusals.get("y", 0)) == (None, CAPACITY)


def test_more_room_changes_the_refusals_that_it_can_help() -> None:
    refusals = ClassRefusals[Code]()
    for code in Code:
        refusals.add_uniform(code, Refusal(code, ""))
    refusals.forget_helped(lambda code: code is not Code.QUOTA)
    assert refusals.uniform.keys() == UNAFFECTED_BY_ROOM | {Code.QUOTA}


def test_nothing_is_left_after_clearing() -> None:
    refusals = ClassRefusals[str]()
    refusals.add("x", CAPACITY, 0)
    refusals.add("y", Refusal(Code.FRAGMENTED, "", holds_seconds=5), 0)
    refusals.add("z", RESERVED, 0)
    refusals.clear()
    assert [refusals.get(key, 0) for key in "xyz"] == [None, None, None]
    assert not refusals.divided


@pytest.mark.parametrize("policy", [Consolidate(), FirstFit()], ids=lambda policy: policy.name)
@given(worlds(), gangs(), st.integers(0, 20))
def test_what_is_released_where_a_gang_has_no_room_does_not_help_it(
    policy: PlacementPolicy, world: World, gang: Gang, ended: int
) -> None:
    if not world.taken or not isinstance(policy.place(gang, world.ledger, rng()), Refusal):
        return
    released = world.taken[ended % len(world.taken)]
    release_all(world.ledger, released)
    if not room_on({held.node for held in released}, gang, world.ledger):
        assert isinstance(policy.place(gang, world.ledger, rng()), Refusal)
