from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.support.worlds import World, demands, emptied, gangs, picture, replicas_of, worlds

from cotenant.core.capacity import ledger as ledger_module
from cotenant.core.capacity.ledger import Counts, Ledger, Overcommitted
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.placement import packing
from cotenant.core.placement.packing import (
    best_fit,
    best_of,
    could_hold_all,
    fewest,
    fill,
    hardest_first,
    in_node_order,
    place_on_fewest,
    place_on_node,
    place_parts,
    place_parts_anywhere,
    room_for_all,
)
from cotenant.core.scheduling.cycle import take
from cotenant.policies.qos.search import fewest_nodes


def slow_fill(room: list[int], nodes: list[int], replicas: int) -> list[tuple[int, int]] | None:
    placed: dict[int, int] = {}
    for node in nodes:
        for _ in range(room[node]):
            if sum(placed.values()) < replicas:
                placed[node] = placed.get(node, 0) + 1
    return list(placed.items()) if sum(placed.values()) == replicas else None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 12), st.randoms(use_true_random=False))
def test_filling_agrees_with_putting_replicas_one_by_one(room: list[int], replicas: int, chance: object) -> None:
    nodes = list(range(len(room)))
    chance.shuffle(nodes)  # type: ignore[attr-defined]  # hypothesis gives a Random
    assert fill(np.array(room), nodes, replicas) == slow_fill(room, nodes, replicas)


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


def in_full_order(part: Part, ledger: Ledger, used: set[int]) -> list[int]:
    """All nodes with room, as `fewest` ranks them."""
    room = np.minimum(ledger.room(part.demand), part.replicas).tolist()

    def rank(node: int) -> tuple[bool, int, int, int, int, int]:
        free, at_stake = int(ledger.free_gpus[node]), not part.demand.gpu_milli and bool(ledger.has_gpus[node])
        return node not in used, 1 + free if at_stake else 0, -room[node], free, int(ledger.free_cores[node]), node

    return sorted((node for node in range(len(ledger)) if room[node]), key=rank)


@given(worlds(), gangs(roles_max=1), st.sets(st.integers(0, 4), max_size=3))
def test_the_first_nodes_are_those_of_the_full_order(world: World, gang: Gang, used: set[int]) -> None:
    (part,), ledger = gang.parts, world.ledger
    used &= set(range(len(ledger)))
    room = np.minimum(ledger.room(part.demand), part.replicas)
    expected = slow_fill(room.tolist(), in_full_order(part, ledger, used), part.replicas)
    placed = fewest(part, ledger.room(part.demand), ledger, used)
    if placed and len(placed) == 1 and part.demand.gpu_milli:
        assert placed[0][0] == best_fit(ledger, np.flatnonzero(room == part.replicas))
    if placed and part.demand.gpu_milli:  # the rest goes where it fits best
        assert expected is not None
        placed, expected = placed[:-1], expected[:-1]
    assert placed == expected


@settings(max_examples=examples(40))
@given(worlds(), gangs(roles_max=1), st.sets(st.integers(0, 4), max_size=3), st.integers(0, 2))
def test_nodes_are_the_same_found_one_by_one_or_all_at_once(world: World, gang: Gang, used: set[int], few: int) -> None:
    (part,), ledger = gang.parts, world.ledger
    used &= set(range(len(ledger)))
    one_by_one = fewest(part, ledger.room(part.demand), ledger, used)
    with mock.patch.object(packing, "FEW_NODES", few):
        assert fewest(part, ledger.room(part.demand), ledger, used) == one_by_one


@given(worlds(), st.lists(st.booleans(), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_keys_in_one_number_choose_as_one_after_the_other(world: World, able: list[bool], crowded: list[bool]) -> None:
    count = len(world.ledger)
    marked = np.array(able[:count])
    for few in (None, np.array(crowded[:count])):
        nodes = np.flatnonzero(marked)
        assert best_of(world.ledger, marked, few) == (best_fit(world.ledger, nodes, few) if len(nodes) else None)


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


@given(worlds(), gangs(roles_max=1))
def test_replicas_of_one_kind_find_places_on_many_nodes_where_there_are_enough(world: World, gang: Gang) -> None:
    (part,) = gang.parts
    offer = place_parts(gang, world.ledger, lambda part, room: in_node_order(room, part.replicas))
    enough = int(np.minimum(world.ledger.room(part.demand), part.replicas).sum()) >= part.replicas
    assert (offer is not None) == enough


@given(worlds(), gangs())
def test_parts_on_many_nodes_do_not_get_in_each_others_way(world: World, gang: Gang) -> None:
    before = picture(world.ledger)
    offer = place_parts(gang, world.ledger, lambda part, room: in_node_order(room, part.replicas))
    assert picture(world.ledger) == before
    with world.ledger.rolled_back():
        assert offer is None or take(world.ledger, gang, offer)


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


def test_a_part_that_may_go_anywhere_leaves_the_rare_gpus_to_those_who_need_them() -> None:
    ledger = Ledger([NodeShape(1, 4, gpu_type="A100"), NodeShape(1, 4, gpu_type="T4")])
    gang = Gang("job", (Part("any", 1, Demand(1000)), Part("typed", 1, Demand(1000, gpu_type="a100"))))
    offer = place_parts(gang, ledger, lambda part, room: in_node_order(room, part.replicas))
    assert offer is not None
    assert {(share.part, share.node) for share in offer} == {(1, 0), (0, 1)}


def on_two(*shapes: NodeShape, gpu_milli: int, workers: int) -> tuple[Ledger, Gang]:
    """Return a cluster, and a gang of workers that need A100s beside two servers that may have any GPU."""
    worker = Part("worker", workers, Demand(gpu_milli, gpu_type="a100"))
    return Ledger(shapes), Gang("job", (worker, Part("ps", 2, Demand(1000))))


def test_parts_that_get_in_each_others_way_by_a_policys_rule_go_to_the_fewest_nodes() -> None:
    ledger, gang = on_two(NodeShape(1, 8, shareable=True, gpu_type="A100"), NodeShape(8, 8), gpu_milli=300, workers=3)

    def first(part: Part, room: Counts) -> list[tuple[int, int]] | None:
        return in_node_order(room, part.replicas)

    assert place_parts(gang, ledger, first) is None
    offer = place_parts_anywhere(gang, ledger, first)
    assert offer is not None
    assert {(share.part, share.node, share.replicas) for share in offer} == {(0, 0, 3), (1, 1, 2)}


def test_a_part_that_needs_a_type_comes_first_where_a_larger_one_would_take_its_gpus() -> None:
    shapes = NodeShape(8, 8, shareable=True, gpu_type="A100"), NodeShape(1, 8), NodeShape(1, 8)
    ledger, gang = on_two(*shapes, gpu_milli=500, workers=16)
    offer = place_on_fewest(gang, ledger)
    assert offer is not None
    assert {(share.part, share.node, share.replicas) for share in offer} == {(0, 0, 16), (1, 1, 1), (1, 2, 1)}


@given(worlds(), gangs())
def test_whatever_any_rule_finds_room_for_is_taken_and_nothing_else(world: World, gang: Gang) -> None:
    before = picture(world.ledger)
    offer = place_parts_anywhere(gang, world.ledger, lambda part, room: in_node_order(room, part.replicas))
    assert picture(world.ledger) == before
    if offer is None:
        assert place_on_fewest(gang, world.ledger) is None
    else:
        with world.ledger.rolled_back():
            assert take(world.ledger, gang, offer)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_a_part_without_gpus_goes_where_it_strands_the_fewest(nodes: list[tuple[int, int]]) -> None:
    """First to nodes that have no GPUs, then to those with the fewest free; all have the same room."""
    ledger = Ledger([NodeShape(gpus, 8) for gpus, _ in nodes])
    for node, (gpus, taken) in enumerate(nodes):
        ledger.take(node, Demand(1000), min(gpus, taken))
    placed = fewest(Part("worker", 1, Demand(cores=2)), ledger.room(Demand(cores=2)), ledger, set())
    assert placed is not None
    ((chosen, count),) = placed
    at_stake = [(gpus > 0, gpus - min(gpus, taken)) for gpus, taken in nodes]
    assert (at_stake[chosen], count) == (min(at_stake), 1)
