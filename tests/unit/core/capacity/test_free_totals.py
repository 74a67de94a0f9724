"""Totals by node class, cached while nothing changes, compared with counting node by node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import World, gangs, rng, take_one, worlds
from cotenant.core.capacity.free_totals import current_totals
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.resources import NAMES
from cotenant.core.placement.capacity_shortage import shortage
from cotenant.core.placement.unschedulable import fits, no_place, quick_shortage
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.locality import WaitsForLocality
from cotenant.policies.multi_array.borrowing import counting
from cotenant.policies.multi_array.policy import MultiArray
from cotenant.policies.qos.policy import KeepsPromises


def short_by_nodes(gang: Gang, ledger: Ledger) -> bool:
    for parts in [*((part,) for part in gang.parts), gang.parts]:
        able = np.zeros(len(ledger), dtype=np.bool_)
        for part in parts:
            able |= ledger.room(part.demand, empty=True) > 0
        there = dict(zip(NAMES, ledger.sums(able), strict=True))
        if any(getattr(Gang("", parts).needs, name) > there[name] for name in NAMES):
            return True
    return False


def could_hold_by_nodes(gang: Gang, ledger: Ledger, within: Locality) -> bool:
    (part,) = gang.parts
    room = ledger.room(part.demand, empty=True).tolist()
    return any(each >= part.replicas for each in room) or (within is not Locality.SERVER and sum(room) >= part.replicas)


@settings(max_examples=examples(150))
@given(worlds(nodes_max=6), st.lists(gangs(), min_size=1, max_size=3), st.data())
def test_sums_by_kind_of_node_are_those_by_node_whatever_has_changed(
    world: World, some: list[Gang], data: st.DataObject
) -> None:
    ledger = world.ledger

    def agree() -> None:
        for gang in some:
            short = short_by_nodes(gang, ledger)
            assert (shortage(gang, ledger) is not None) == short
            for within in Locality:  # repeated, as for the next gang that lacks the same
                told = [quick_shortage(gang, ledger, within=within) for _ in range(2)]
                assert told == [no_place(gang, ledger, within=within) if short else None] * 2
            if len(gang.parts) == 1:
                for within in (Locality.SERVER, Locality.ANYWHERE):
                    assert fits(gang, ledger, within=within, empty=True) == could_hold_by_nodes(gang, ledger, within)

    agree()
    node = data.draw(st.integers(0, len(ledger) - 1))
    held = take_one(ledger, node, Demand(data.draw(st.sampled_from([0, 1000])), 1))
    agree()
    with counting(ledger, -(ledger.free_cores // 2)):
        agree()
        with ledger.rolled_back():
            if held is not None:
                ledger.release(held)
            agree()
        agree()
    agree()
    ledger.open[node] = not ledger.open[node]
    agree()
    other = ledger.copy()
    assert quick_shortage(some[0], other, within=Locality.ANYWHERE) is None
    assert shortage(some[0], other) == shortage(some[0], ledger)


@pytest.mark.parametrize("policy", [Consolidate, MultiArray, KeepsPromises, WaitsForLocality])
@settings(max_examples=examples(60))
@given(worlds(nodes_max=4), gangs())
def test_a_policy_answers_the_same_where_it_is_plain_that_too_little_is_free(
    policy: Callable[[], PlacementPolicy], world: World, gang: Gang
) -> None:
    untold, told = world.ledger, world.ledger.copy()
    current_totals(told)
    assert policy().place(gang, told, rng()) == policy().place(gang, untold, rng())
