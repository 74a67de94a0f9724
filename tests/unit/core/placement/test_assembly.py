from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.core.placement.test_scores import slow_best_fit

from cotenant.conformance.worlds import World, gangs, picture, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.placement import assembly
from cotenant.core.placement.assembly import (
    fewest,
    fill,
    in_node_order,
    in_score_order,
    place_on_best,
    place_on_fewest,
    place_parts,
    place_parts_anywhere,
)
from cotenant.core.placement.packing import able_to_hold, place_on_node
from cotenant.core.scheduling.cycle import take


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
    placed = fewest(gang, part, ledger.room(part.demand), ledger, used)
    if placed and len(placed) == 1 and part.demand.gpu_milli:
        assert placed[0][0] == slow_best_fit(ledger, np.flatnonzero(room == part.replicas).tolist())
    if placed and part.demand.gpu_milli:  # the rest goes where it fits best
        assert expected is not None
        placed, expected = placed[:-1], expected[:-1]
    assert placed == expected


@settings(max_examples=examples(40))
@given(worlds(), gangs(roles_max=1), st.sets(st.integers(0, 4), max_size=3), st.integers(0, 2))
def test_nodes_are_the_same_found_one_by_one_or_all_at_once(world: World, gang: Gang, used: set[int], few: int) -> None:
    (part,), ledger = gang.parts, world.ledger
    used &= set(range(len(ledger)))
    one_by_one = fewest(gang, part, ledger.room(part.demand), ledger, used)
    with mock.patch.object(assembly, "FEW_NODES", few):
        assert fewest(gang, part, ledger.room(part.demand), ledger, used) == one_by_one


@given(worlds(), gangs(roles_max=1))
def test_replicas_of_one_kind_find_places_on_many_nodes_where_there_are_enough(world: World, gang: Gang) -> None:
    (part,) = gang.parts
    offer = place_parts(gang, world.ledger, in_node_order)
    enough = int(np.minimum(world.ledger.room(part.demand), part.replicas).sum()) >= part.replicas
    assert (offer is not None) == enough


@given(worlds(), gangs())
def test_parts_on_many_nodes_do_not_get_in_each_others_way(world: World, gang: Gang) -> None:
    before = picture(world.ledger)
    offer = place_parts(gang, world.ledger, in_node_order)
    assert picture(world.ledger) == before
    with world.ledger.rolled_back():
        assert offer is None or take(world.ledger, gang, offer)


def test_a_part_that_may_go_anywhere_leaves_the_rare_gpus_to_those_who_need_them() -> None:
    ledger = Ledger([NodeShape(1, 4, gpu_type="A100"), NodeShape(1, 4, gpu_type="T4")])
    gang = Gang("job", (Part("any", 1, Demand(1000)), Part("typed", 1, Demand(1000, gpu_type="a100"))))
    offer = place_parts(gang, ledger, in_node_order)
    assert offer is not None
    assert {(share.part, share.node) for share in offer} == {(1, 0), (0, 1)}


def on_two(*shapes: NodeShape, gpu_milli: int, workers: int) -> tuple[Ledger, Gang]:
    """Return a cluster, and a gang of workers that need A100s beside two servers that may have any GPU."""
    worker = Part("worker", workers, Demand(gpu_milli, gpu_type="a100"))
    return Ledger(shapes), Gang("job", (worker, Part("ps", 2, Demand(1000))))


def test_parts_that_get_in_each_others_way_by_a_policys_rule_go_to_the_fewest_nodes() -> None:
    ledger, gang = on_two(NodeShape(1, 8, shareable=True, gpu_type="A100"), NodeShape(8, 8), gpu_milli=300, workers=3)

    assert place_parts(gang, ledger, in_node_order) is None
    offer = place_parts_anywhere(gang, ledger, in_node_order)
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
    offer = place_parts_anywhere(gang, world.ledger, in_node_order)
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
    part = Part("worker", 1, Demand(cores=2))
    placed = fewest(Gang("job", (part,)), part, ledger.room(part.demand), ledger, set())
    assert placed is not None
    ((chosen, count),) = placed
    at_stake = [(gpus > 0, gpus - min(gpus, taken)) for gpus, taken in nodes]
    assert (at_stake[chosen], count) == (min(at_stake), 1)


@given(worlds(), gangs())
def test_a_gang_goes_to_the_best_node_that_holds_it(world: World, gang: Gang) -> None:
    able = able_to_hold(gang, world.ledger)
    before = picture(world.ledger), able.tolist()
    nodes = np.flatnonzero(able).tolist()
    offers = {node: offer for node in nodes if (offer := place_on_node(gang, world.ledger, node)) is not None}
    expected = offers[slow_best_fit(world.ledger, list(offers))] if offers else None
    assert place_on_best(gang, world.ledger, able) == expected
    assert (picture(world.ledger), able.tolist()) == before


@given(worlds(), gangs(roles_max=1), st.lists(st.integers(-3, 3), min_size=5, max_size=5))
def test_replicas_fill_nodes_in_the_order_of_their_scores(world: World, gang: Gang, drawn: list[int]) -> None:
    (part,), ledger = gang.parts, world.ledger
    room = ledger.room(part.demand)
    place = in_score_order(gang, ledger, {lambda _: np.array(drawn[: len(ledger)]): 0.5})
    order = sorted(range(len(ledger)), key=lambda node: (drawn[node], node))
    assert place(part, room) == slow_fill(np.minimum(room, part.replicas).tolist(), order, part.replicas)
