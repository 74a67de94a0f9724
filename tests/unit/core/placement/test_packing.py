from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
from hypothesis import given

from cotenant.conformance.worlds import World, demands, emptied, gangs, picture, replicas_of, worlds
from cotenant.core.capacity import ledger as ledger_module
from cotenant.core.capacity.ledger import Ledger, Overcommitted
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import SpreadBy
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.anti_affinity import SpreadOut
from cotenant.core.placement.packing import could_hold_all, hardest_first, place_on_node, room_for_all
from cotenant.core.scheduling.cycle import take
from cotenant.policies.qos.search import fewest_nodes


@given(worlds(), gangs(shares=False))
def test_a_node_has_room_for_all_exactly_where_all_can_be_taken(world: World, gang: Gang) -> None:
    ledger = world.ledger
    able = set(room_for_all(gang, ledger).tolist())
    for node in np.flatnonzero(ledger.open).tolist():
        typed = all(ledger.of_type(part.demand.gpu_type)[node] for part in gang.parts if part.demand.gpu_milli)
        assert (node in able) == (typed and can_take_all(gang, ledger, node))


def can_take_all(gang: Gang, ledger: Ledger, node: int) -> bool:
    try:
        with ledger.transaction() as transaction:
            for part in gang.parts:
                transaction.take(node, part.demand, part.replicas)
            return True
    except Overcommitted:
        return False


@given(worlds(), gangs())
def test_all_on_one_node_is_whole_and_free(world: World, gang: Gang) -> None:
    before = picture(world.ledger)
    for node in room_for_all(gang, world.ledger).tolist():
        offer = place_on_node(gang, world.ledger, node)
        assert picture(world.ledger) == before
        if offer is not None:
            assert {share.node for share in offer} == {node}
            assert replicas_of(offer, gang) == [part.replicas for part in gang.parts]
            with world.ledger.rolled_back():
                take(world.ledger, gang, offer)


@given(worlds(), gangs(roles_max=1))
def test_nodes_with_room_for_all_are_those_that_are_counted_to_have_it(world: World, gang: Gang) -> None:
    (part,) = gang.parts
    counted = np.flatnonzero(world.ledger.room(part.demand) >= part.replicas)
    assert room_for_all(gang, world.ledger).tolist() == counted.tolist()


@given(worlds(nodes_max=3), demands())
def test_few_kinds_of_node_are_counted_as_many_are(world: World, demand: Demand) -> None:
    ledger = world.ledger
    few, many = ledger.copy(), ledger.copy()
    with mock.patch.object(ledger_module, "KINDS_FEW", 0):
        expected = many.room_by_kind(demand)
    assert few.room_by_kind(demand) == expected


@given(worlds(), gangs())
def test_a_node_could_hold_all_where_it_does_when_empty(world: World, gang: Gang) -> None:
    empty = emptied(world.ledger)
    holds = any(place_on_node(gang, empty, node) is not None for node in room_for_all(gang, empty).tolist())
    assert could_hold_all(gang, world.ledger) == holds


@given(worlds(), gangs())
def test_the_fewest_nodes_are_counted_by_kind_as_node_by_node(world: World, gang: Gang) -> None:
    most = 1
    for part in (part for part in gang.parts if part.demand.gpu_milli):
        reach = np.cumsum(np.sort(world.ledger.room(part.demand, empty=True))[::-1])
        most = max(most, int(np.searchsorted(reach, part.replicas)) + 1)
    assert fewest_nodes(gang, world.ledger) == most
    for least in (2, 4):  # as its spread demands, whether it has GPUs or not
        apart = replace(gang, constraints=(SpreadOut(SpreadBy.NODE, least),))
        assert fewest_nodes(apart, world.ledger) == max(most, least)


def test_parts_that_fit_alone_need_room_for_all_of_them_together() -> None:
    ledger = Ledger([NodeShape(3, 4), NodeShape(3, 3)])
    gang = Gang("job", (Part("worker", 2, Demand(1000, 1)), Part("ps", 1, Demand(1000, 2))))
    assert room_for_all(gang, ledger).tolist() == [0]
    ledger.take(0, Demand(1000))
    assert room_for_all(gang, ledger).tolist() == []


def test_the_hardest_part_is_placed_first() -> None:
    parts = (
        Part("ps", 1, Demand(cores=9)),
        Part("any", 1, Demand(1000, 1)),
        Part("typed", 1, Demand(1000, 1, gpu_type="a100")),
        Part("big", 1, Demand(4000, 1)),
    )
    assert hardest_first(Gang("job", parts)) == [3, 2, 1, 0]
