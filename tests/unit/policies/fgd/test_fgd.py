from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.worlds import World, emptied, gangs, rng, worlds
from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.packing import hardest_first, room_for_all
from cotenant.core.scheduling.cycle import take
from cotenant.policies.fgd import policy as policy_module
from cotenant.policies.fgd.fragmentation import Measure
from cotenant.policies.fgd.policy import FragmentationGradientDescent as Fgd


def one(name: str, demand: Demand, replicas: int = 1, locality: Locality | None = None) -> Gang:
    return Gang(name, (Part("worker", replicas, demand),), locality)


def told(*workload: str) -> Fgd:
    return Fgd(Fgd.Options(workload=workload))


@given(worlds(nodes_max=4), st.lists(gangs(roles_max=2), max_size=8))
def test_incremental_fragmentation_equals_a_full_computation(world: World, stream: list[Gang]) -> None:
    ledger, policy, forgetful = world.ledger, told("1000/2/3", "500/1/1"), told("1000/2/3", "500/1/1")
    started = []
    for number, gang in enumerate(stream):
        offer = policy.place(gang, ledger, rng())
        forgetful._gradient = None
        assert forgetful.place(gang, ledger, rng()) == offer
        if isinstance(offer, tuple):
            started.append(take(ledger, gang, offer))
        elif started:
            for holding in started.pop(number % len(started)):
                ledger.release(holding)


def slow_place(gang: Gang, ledger: Ledger, workload: dict[Demand, int], among: list[int]) -> Offer | None:
    """Place each replica where it adds the least, with the whole measure computed anew for each of them."""
    trial, offer = ledger.copy(), list[Share]()
    for number in hardest_first(gang):
        part, here = gang.parts[number], dict[int, list[int]]()
        for _ in range(part.replicas):
            found = Measure.of(trial, workload).increases(part.demand, np.arange(len(trial)))
            room = trial.room(part.demand)
            keys = [
                (found.increase[node], trial.free_milli[node], trial.free_cores[node], node)
                for node in among
                if room[node]
            ]
            if not keys:
                return None
            node, gpu = min(keys)[3], int(found.gpu[min(keys)[3]])
            trial.take(node, part.demand, 1, (gpu,) if part.demand.gpu_milli % 1000 else ())
            here.setdefault(node, []).append(gpu)
        shares = part.demand.gpu_milli % 1000 > 0
        offer += [Share(node, number, len(here[node]), tuple(here[node]) if shares else ()) for node in sorted(here)]
    return tuple(offer)


@given(worlds(nodes_max=4), gangs(roles_max=2))
def test_a_gang_goes_to_the_cheapest_node_that_holds_it_else_each_replica_to_its_cheapest(
    world: World, gang: Gang
) -> None:
    ledger, workload = world.ledger, {Demand(1000, 2): 3, Demand(500, 1): 1}
    answer = told("1000/2/3", "500/1/1").place(gang, ledger, rng())
    able = room_for_all(gang, ledger).tolist()
    alone = {node: offer for node in able if (offer := slow_place(gang, ledger, workload, [node])) is not None}
    if alone:
        first = gang.parts[hardest_first(gang)[0]].demand
        increase = Measure.of(ledger, workload).increases(first, np.arange(len(ledger))).increase
        best = min(alone, key=lambda node: (increase[node], ledger.free_milli[node], ledger.free_cores[node], node))
        assert answer == alone[best]
    elif gang.locality is Locality.SERVER:
        assert isinstance(answer, Refusal)
    elif (spread := slow_place(gang, ledger, workload, list(range(len(ledger))))) is not None:
        assert answer == spread
    elif len(gang.parts) == 1:
        assert isinstance(answer, Refusal)


def test_a_share_goes_where_a_task_of_the_workload_can_still_run() -> None:
    ledger = Ledger([NodeShape(2, 8, shareable=True)])
    ledger.take(0, Demand(300), 1, (0,))
    assert told("600/1/1").place(one("a", Demand(300)), ledger, rng()) == (Share(0, 0, 1, (1,)),)
    assert told("1000/1/1").place(one("a", Demand(300)), ledger, rng()) == (Share(0, 0, 1, (0,)),)


def test_the_cores_that_a_workload_needs_are_left_beside_its_gpus() -> None:
    ledger = Ledger([NodeShape(1, 8), NodeShape(1, 12)])
    assert told("1000/8/1").place(one("a", Demand(cores=4)), ledger, rng()) == (Share(1, 0, 1),)


def test_a_gang_is_kept_on_one_node_if_one_has_room() -> None:
    ledger = Ledger([NodeShape(4, 8), NodeShape(2, 8), NodeShape(2, 8)])
    ledger.take(0, Demand(1000), 2)
    assert told("4000/1/1").place(one("a", Demand(1000), 2), ledger, rng()) == (Share(0, 0, 2),)
    answer = told("4000/1/1").place(one("a", Demand(1000), 5), ledger, rng())
    assert isinstance(answer, tuple)
    assert sum(share.replicas for share in answer) == 5


def test_a_gang_with_server_locality_waits_for_a_server() -> None:
    ledger = Ledger([NodeShape(4, 8), NodeShape(4, 8)])
    for node in (0, 1):
        ledger.take(node, Demand(1000), 2)
    answer = Fgd().place(one("a", Demand(1000), 3, Locality.SERVER), ledger, rng())
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.locality) == (Code.FRAGMENTED, Locality.SERVER)


def test_what_it_learns_is_counted_once_a_job_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "JOBS_MAX", 16)
    monkeypatch.setattr(policy_module, "KINDS_MAX", 8)
    workload = policy_module._Workload({}, alike=False)
    for _ in range(5):
        workload.record(one("same", Demand(1000, 1), 3))
    assert workload.tasks() == {Demand(1000, 1): 3}
    for number in range(200):
        workload.record(one(f"job-{number}", Demand(1000, number)))
        assert len(workload._counts) <= 8
        assert len(workload._jobs) <= 16
    assert len(workload.tasks()) <= 8


def test_kinds_have_equal_weights_unless_popularity_is_selected() -> None:
    for options, weights in (({}, [1, 1]), ({"weights": "popularity"}, [3, 1])):
        policy = plugins.load("cotenant.placement_policies", "fgd", options)
        ledger = Ledger([NodeShape(8, 8)])
        for name in ("a", "b", "c"):
            policy.place(one(name, Demand(1000)), ledger, rng())
        policy.place(one("d", Demand(2000)), ledger, rng())
        assert list(policy._workload.tasks().values()) == weights


@pytest.mark.parametrize("text", ["", "1000", "1000/8", "1500/1/1", "0/1/1", "1000/-1/1", "1000/1/0", "a/b/c"])
def test_a_workload_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(plugins.BadOption) as caught:
        plugins.load("cotenant.placement_policies", "fgd", {"workload": f"1000/1/1,{text},x"})
    assert {violation.field for violation in caught.value.violations} == {"workload"}
    assert "'x'" in str(caught.value)


@given(worlds(), gangs(roles_max=2))
def test_a_single_role_is_placed_whenever_there_is_room(world: World, gang: Gang) -> None:
    """By counting: no replica takes the room of more than one."""
    one_role = Gang(gang.job_id, gang.parts[:1])
    room = world.ledger.room(one_role.parts[0].demand).sum()
    assert isinstance(Fgd().place(one_role, world.ledger, rng()), tuple) == (room >= one_role.parts[0].replicas)
    assert isinstance(Fgd().place(one_role, emptied(world.ledger), rng()), tuple | Refusal)


def test_old_tasks_count_half_and_rare_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "JOBS_MAX", 10)
    workload = policy_module._Workload({}, alike=False)
    often, rare, later = Demand(1000), Demand(2000), Demand(4000)
    for number in range(9):
        workload.record(one(f"often-{number}", often))
    workload.record(one("rare", rare))
    assert workload.tasks() == {often: 4}
    for number in range(10):
        workload.record(one(f"later-{number}", later, replicas=2))
    assert workload.tasks() == {later: 10, often: 2}


def test_the_counts_of_old_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "JOBS_MAX", 10)
    workload = policy_module._Workload({}, alike=False)
    for number in range(1000):
        workload.record(one(f"{number}", Demand(1000)))
    assert workload.tasks()[Demand(1000)] <= 20
