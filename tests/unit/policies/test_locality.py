"""Where `locality` places gangs at each level, against references that try everything, and when it relaxes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import World, emptied, gangs, rng, worlds
from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.scheduling import cycle
from cotenant.policies.locality import WaitsForLocality

SERVER, RACK, ANYWHERE = Locality
SECONDS = {SERVER: 100.0, RACK: 60.0}
POLICY = WaitsForLocality(WaitsForLocality.Options(SECONDS[SERVER], SECONDS[RACK]))
WAITS = st.sampled_from([0.0, 30.0, 59.5, 60.0, 99.5, 100.0, 130.0, 159.5, 160.0, 1e6])


def room_of(gang: Gang, ledger: Ledger, *, empty: bool = False) -> list[int]:
    return [int(room) for room in ledger.room(gang.parts[0].demand, empty=empty)]


def levels_that_could_hold(gang: Gang, ledger: Ledger) -> list[Locality]:
    """Return the levels at which a gang waits, by trying every server and every rack of the empty cluster."""
    room, replicas = room_of(gang, ledger, empty=True), gang.parts[0].replicas
    levels = [SERVER] if any(here >= replicas for here in room) else []
    racks = {rack for rack, takes_work in zip(ledger.racks, ledger.open, strict=True) if takes_work}
    sums = [sum(here for here, of in zip(room, ledger.racks, strict=True) if of == rack) for rack in racks]
    if len(racks) > 1 and any(total >= replicas for total in sums):
        levels.append(RACK)
    return levels


def level_of(gang: Gang, ledger: Ledger) -> tuple[Locality, float]:
    """Return a gang's present level and the time left at it."""
    if gang.locality or not gang.gpu_milli:
        return gang.locality or ANYWHERE, np.inf
    levels = levels_that_could_hold(gang, ledger)
    if gang.parts[0].replicas == 1:
        return (levels or [ANYWHERE])[0], np.inf
    turn = 0.0
    for level in levels:
        turn += SECONDS[level]
        if gang.fragmented_seconds < turn:
            return level, turn - gang.fragmented_seconds
    return ANYWHERE, np.inf


def fewest_of(room: list[int], nodes: list[int], replicas: int) -> int | None:
    """Return the fewest nodes that suffice, by trying every set of them."""
    for size in range(1, len(nodes) + 1):
        if any(sum(room[node] for node in some) >= replicas for some in combinations(nodes, size)):
            return size
    return None


def nodes_of(offer: Offer) -> set[int]:
    return {share.node for share in offer}


@settings(max_examples=examples(250))
@given(worlds(racks_max=3), gangs(shares=False, roles_max=1), WAITS, st.sampled_from([None, *Locality]))
def test_a_gang_gets_the_closest_and_smallest_place_of_its_level(
    world: World, gang: Gang, waited: float, wish: Locality | None
) -> None:
    gang, ledger = replace(gang, fragmented_seconds=waited, locality=wish), world.ledger
    assume(gang.gpu_milli)
    answer = POLICY.place(gang, ledger, rng())
    level, holds = level_of(gang, ledger)
    (part,), room = gang.parts, room_of(gang, ledger)
    if able := [node for node in range(len(ledger)) if room[node] >= part.replicas]:
        assert isinstance(answer, tuple)
        assert nodes_of(answer) == {min(able, key=lambda node: loss(gang, ledger, node))}
        return
    racks = {rack: [node for node, of in enumerate(ledger.racks) if of == rack] for rack in ledger.racks}
    roomy = [rack for rack, nodes in racks.items() if sum(room[node] for node in nodes) >= part.replicas]
    if level is not SERVER and roomy:
        free = {rack: sum(ledger.free_gpus[node] for node in racks[rack] if ledger.open[node]) for rack in roomy}
        least = [rack for rack in roomy if free[rack] == min(free.values())]
        assert isinstance(answer, tuple)
        assert {ledger.racks[node] for node in nodes_of(answer)} == {least[0]}
        assert len(nodes_of(answer)) == fewest_of(room, racks[least[0]], part.replicas)
    elif level is ANYWHERE and sum(room) >= part.replicas:
        assert isinstance(answer, tuple)
        assert len(nodes_of(answer)) == fewest_of(room, list(range(len(ledger))), part.replicas)
    else:
        assert isinstance(answer, Refusal)
        if answer.code is Code.FRAGMENTED:
            assert (answer.locality, answer.holds_seconds) == (level, holds)


def loss(gang: Gang, ledger: Ledger, node: int) -> tuple[bool, int, int, int]:
    """Return the cost of a gang on a server: neighbors, if it minds; then remaining GPUs; then cores."""
    minds = gang.gpu_milli >= 2000 and gang.gpu_milli >= 500 * int(ledger.total_gpus[node])
    crowded = minds and bool(ledger.free_gpus[node] < ledger.total_gpus[node])
    return crowded, int(ledger.free_gpus[node]), int(ledger.free_cores[node]), node


@given(worlds(racks_max=3), gangs(roles_max=2), WAITS)
def test_it_relaxes_when_it_said_and_not_before(world: World, gang: Gang, waited: float) -> None:
    relaxes_as_it_says(world.ledger, gang, waited)


@given(st.integers(2, 6), st.integers(1, 2), WAITS)
def test_half_full_servers_make_it_relax_when_it_said(servers: int, taken: int, waited: float) -> None:
    ledger = Ledger([NodeShape(gpus=4, cores=8)] * servers, [f"r{number // 2}" for number in range(servers)])
    for node in range(servers):
        ledger.take(node, Demand(gpu_milli=1000), taken)
    gang = Gang("a", (Part("worker", 4, Demand(gpu_milli=1000)),))
    assert relaxes_as_it_says(ledger, gang, waited) or waited > 0


def relaxes_as_it_says(ledger: Ledger, gang: Gang, waited: float) -> bool:
    """Check the times of a refusal; False if there is none, or none that time changes."""
    gang = replace(gang, fragmented_seconds=waited)
    refusal = POLICY.place(gang, ledger, rng())
    if not isinstance(refusal, Refusal) or refusal.relaxes_to is None:
        return False
    turn = waited + refusal.holds_seconds
    for earlier in (waited - refusal.held_seconds, (waited + turn) / 2, np.nextafter(turn, 0)):
        same = POLICY.place(replace(gang, fragmented_seconds=earlier), ledger, rng())
        assert isinstance(same, Refusal)
        assert (same.detail, same.locality, same.relaxes_to) == (refusal.detail, refusal.locality, refusal.relaxes_to)
        assert earlier + same.holds_seconds == pytest.approx(turn)
    later = POLICY.place(replace(gang, fragmented_seconds=turn), ledger, rng())
    assert isinstance(later, tuple) or later.locality in (refusal.relaxes_to, None)
    return True


@given(worlds(racks_max=3), gangs(roles_max=1), WAITS)
def test_a_refusal_names_the_only_obstacle(world: World, gang: Gang, waited: float) -> None:
    gang = replace(gang, fragmented_seconds=waited)
    refusal = POLICY.place(gang, world.ledger, rng())
    if isinstance(refusal, Refusal) and refusal.code in (Code.CAPACITY, Code.FRAGMENTED):
        offer = POLICY.place(gang, emptied(world.ledger), rng())
        assert isinstance(offer, tuple), "the others leave, and yet it waits"
        if refusal.locality is SERVER:
            assert len(nodes_of(offer)) == 1
        if refusal.locality is RACK:
            assert len({world.ledger.racks[node] for node in nodes_of(offer)}) == 1


@given(worlds(racks_max=3), gangs(), WAITS, WAITS)
def test_gangs_that_are_alike_get_the_same_answer(world: World, gang: Gang, waited: float, longer: float) -> None:
    """Gangs with other waits are equivalent for the stated time, and answers differ only in the time left."""
    waited, longer = sorted((waited, longer))
    one, other = replace(gang, fragmented_seconds=waited), replace(gang, fragmented_seconds=longer)
    same = POLICY.equivalence_key(one) == POLICY.equivalence_key(other)
    assert same == (longer - waited < POLICY.equivalence_seconds(one))
    if same:
        answers = [POLICY.place(gang, world.ledger, rng()) for gang in (one, other)]
        if isinstance(answers[0], Refusal) and isinstance(answers[1], Refusal):
            assert answers[0].after(longer - waited) == answers[1]
        else:
            assert answers[0] == answers[1]


def workers(replicas: int, job_id: str = "job", waited: float = 0.0) -> Gang:
    return Gang(job_id, (Part("worker", replicas, Demand(1000)),), fragmented_seconds=waited)


def cluster(*free_gpus: int, racks: str = "") -> Ledger:
    """Nodes of 8 GPUs with these numbers free, in racks of one letter."""
    ledger = Ledger([NodeShape(8, 24)] * len(free_gpus), racks)
    for node, free in enumerate(free_gpus):
        if free < 8:
            ledger.take(node, Demand(1000), 8 - free)
    return ledger


@pytest.mark.parametrize(
    ("gpus", "free", "expected"),
    [
        (1, (8, 5, 7), {1}),  # a single GPU comes from the most used server
        (2, (8, 5, 7), {1}),  # a small gang too
        (4, (8, 5, 4), {0}),  # a large one has its own server
        (4, (7, 5, 4), {2}),  # unless no server is empty
    ],
)
def test_servers_are_dedicated_to_large_gangs(gpus: int, free: tuple[int, ...], expected: set[int]) -> None:
    offer = POLICY.place(workers(gpus), cluster(*free), rng())
    assert isinstance(offer, tuple)
    assert nodes_of(offer) == expected


def test_small_gangs_balance_the_cores_if_asked_to() -> None:
    balancing = WaitsForLocality(parse(WaitsForLocality.Options, {"balance_cores": "true"}))
    ledger = cluster(8, 5, 7)
    ledger.take(1, Demand(cores=12), 1)
    for gpus, expected in ((1, {2}), (2, {2}), (4, {0})):  # a large one still has its own server
        offer = balancing.place(workers(gpus), ledger, rng())
        assert isinstance(offer, tuple)
        assert nodes_of(offer) == expected, gpus


def test_the_smallest_rack_that_suffices_is_taken() -> None:
    offer = POLICY.place(workers(9, waited=200), cluster(8, 8, 5, 4, 8, 3, racks="aabbcc"), rng())
    assert isinstance(offer, tuple)
    assert nodes_of(offer) == {2, 3}


def test_a_refusal_gives_the_time_and_level_of_relaxation() -> None:
    refusal = POLICY.place(workers(8, waited=40), cluster(6, 5, 3, racks="aab"), rng())
    assert str(refusal) == (
        "FRAGMENTED: needs 8 replicas of 1 GPU on one server; the best has room for 6, 3 servers together for 8 or more"
        "; relaxes to rack in 60 s"
    )


def test_an_infinite_timeout_gives_no_time_of_relaxation() -> None:
    patient = WaitsForLocality(parse(WaitsForLocality.Options, {"server_seconds": "inf"}))
    refusal = patient.place(workers(8, waited=1e9), cluster(6, 5, 3), rng())
    assert isinstance(refusal, Refusal)
    assert (refusal.locality, refusal.holds_seconds) == (SERVER, np.inf)
    assert "relaxes" not in str(refusal)


def test_in_one_cycle_the_older_gang_relaxes_and_the_younger_waits_for_its_own_time() -> None:
    waits = {"a": 10.0, "b": 50.0, "c": 160.0}
    gangs = [workers(8, name, waited) for name, waited in waits.items()]
    plan = cycle.place(gangs, cluster(6, 5, racks="ab"), POLICY, rng())
    assert [start.gang.job_id for start in plan.starts] == ["c"]
    assert {name: refusal.holds_seconds for name, refusal in plan.refusals.items()} == {"a": 90.0, "b": 50.0}
    assert plan.valid_seconds == 50.0


def test_options_below_nothing_are_named_together() -> None:
    with pytest.raises(BadOption, match=r"server_seconds.*dedicated_share"):
        parse(WaitsForLocality.Options, {"server_seconds": "-1", "dedicated_share": "-2"})
