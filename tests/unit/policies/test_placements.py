from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given

from cotenant.conformance.worlds import World, gangs, rng, worlds
from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement import constraints
from cotenant.core.placement.packing import could_hold_all
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count
from cotenant.policies.fgd.policy import FragmentationGradientDescent
from cotenant.policies.first_fit import FirstFit
from cotenant.policies.random_fit import RandomFit
from cotenant.policies.spread import Spread

ALL = (Count(), FirstFit(), Consolidate(), RandomFit(), Spread(), FragmentationGradientDescent())


def workers(replicas: int, gpus: int = 1, cores: int = 0, locality: Locality | None = None) -> Gang:
    return Gang("job", (Part("worker", replicas, Demand(gpus * 1000, cores)),), locality)


def cluster(*free_gpus: int, gpus: int = 8, cores: int = 24) -> Ledger:
    """Nodes of 8 GPUs with these numbers free."""
    ledger = Ledger([NodeShape(gpus, cores)] * len(free_gpus))
    for node, free in enumerate(free_gpus):
        if free < gpus:
            ledger.take(node, Demand(1000), gpus - free)
    return ledger


def places(policy: PlacementPolicy, gang: Gang, ledger: Ledger) -> dict[int, int] | Code:
    """Return the replicas on each node, or why there are none."""
    answer = policy.place(gang, ledger, rng())
    return answer.code if isinstance(answer, Refusal) else on_nodes(answer)


def on_nodes(offer: Offer) -> dict[int, int]:
    counts: dict[int, int] = {}
    for share in offer:
        counts[share.node] = counts.get(share.node, 0) + share.replicas
    return counts


@pytest.mark.parametrize(
    ("free", "replicas", "count", "first_fit", "consolidate"),
    [
        ((8, 8), 8, {0: 8}, {0: 8}, {0: 8}),
        ((2, 4), 4, {0: 2, 1: 2}, {1: 4}, {1: 4}),
        ((2, 2), 4, {0: 2, 1: 2}, {0: 2, 1: 2}, Code.FRAGMENTED),
        ((8, 3, 4), 3, {0: 3}, {0: 3}, {1: 3}),
        ((4, 8, 8), 16, {0: 4, 1: 8, 2: 4}, {0: 4, 1: 8, 2: 4}, {1: 8, 2: 8}),
        ((8, 5, 4, 3), 12, {0: 8, 1: 4}, {0: 8, 1: 4}, {0: 8, 2: 4}),
        ((6, 6, 6), 12, {0: 6, 1: 6}, {0: 6, 1: 6}, {0: 6, 1: 6}),
        ((8, 7), 16, Code.CAPACITY, Code.CAPACITY, Code.CAPACITY),
        ((8, 8), 17, Code.NEVER_FITS, Code.NEVER_FITS, Code.NEVER_FITS),
    ],
)
def test_where_a_gang_goes(
    free: tuple[int, ...],
    replicas: int,
    count: dict[int, int] | Code,
    first_fit: dict[int, int] | Code,
    consolidate: dict[int, int] | Code,
) -> None:
    gang = workers(replicas)
    assert places(Count(), gang, cluster(*free)) == count
    assert places(FirstFit(), gang, cluster(*free)) == first_fit
    assert places(Consolidate(), gang, cluster(*free)) == consolidate


@given(worlds(), gangs(shares=False, roles_max=1))
def test_consolidated_is_the_node_that_loses_least_or_else_the_fewest_nodes(world: World, gang: Gang) -> None:
    """A reference that tries every node, then every set of nodes."""
    ledger, (part,) = world.ledger, gang.parts
    room = ledger.room(part.demand).tolist()
    answer = Consolidate().place(gang, ledger, rng())
    if not part.demand.gpu_milli:
        return
    able = [node for node in range(len(ledger)) if room[node] >= part.replicas]
    if able:
        best = min(able, key=lambda node: (ledger.free_gpus[node], ledger.free_cores[node], node))
        assert isinstance(answer, tuple)
        assert on_nodes(answer) == {best: part.replicas}
    elif gang.locality is Locality.SERVER or (gang.locality is None and could_hold_all(gang, ledger)):
        assert isinstance(answer, Refusal)
    elif isinstance(answer, tuple):
        sizes = range(1, len(ledger) + 1)
        fewest = next(size for size in sizes if any(sum(some) >= part.replicas for some in combinations(room, size)))
        assert len(on_nodes(answer)) == fewest


def test_best_fit_counts_cores_where_gpus_are_even() -> None:
    ledger = cluster(4, 4, 4)
    ledger.take(1, Demand(cores=10))
    ledger.take(2, Demand(cores=10))
    assert places(Consolidate(), workers(2), ledger) == {1: 2}


def test_a_gang_with_locality_anywhere_does_not_wait_for_one_node() -> None:
    assert places(Consolidate(), workers(4, locality=Locality.ANYWHERE), cluster(2, 2)) == {0: 2, 1: 2}


def test_a_gang_too_large_for_any_server_with_server_locality_never_starts() -> None:
    assert places(Consolidate(), workers(9, locality=Locality.SERVER), cluster(8, 8)) == Code.NEVER_FITS


def test_a_gang_whose_only_large_node_is_cordoned_spreads_over_open_nodes() -> None:
    ledger = Ledger([NodeShape(8, 24), NodeShape(4, 24), NodeShape(4, 24)])
    ledger.open[0] = False
    assert places(Consolidate(), workers(8), ledger) == {1: 4, 2: 4}


def test_cpu_gangs_keep_away_from_gpus_that_others_could_use() -> None:
    ledger = Ledger([NodeShape(8, 24), NodeShape(8, 24), NodeShape(0, 8)])
    ledger.take(1, Demand(8000, 8))
    cpu = workers(2, gpus=0, cores=4)
    for expected in ({2: 2}, {1: 2}, {1: 2}, {0: 2}):
        assert places(Consolidate(), cpu, ledger) == expected
        answer = Consolidate().place(cpu, ledger, rng())
        assert isinstance(answer, tuple)
        for share in answer:
            ledger.take(share.node, cpu.parts[0].demand, share.replicas)


def test_a_cpu_gang_would_rather_be_apart_than_strand_gpus_or_wait() -> None:
    ledger = Ledger([NodeShape(8, 24), NodeShape(0, 4), NodeShape(0, 4)])
    assert places(Consolidate(), workers(2, gpus=0, cores=4), ledger) == {1: 1, 2: 1}
    assert places(Consolidate(), workers(3, gpus=0, cores=4), ledger) == {0: 1, 1: 1, 2: 1}
    assert places(Consolidate(), workers(3, gpus=0, cores=4, locality=Locality.SERVER), ledger) == {0: 3}


def test_parameter_servers_go_where_their_workers_are() -> None:
    gang = Gang("job", (Part("ps", 2, Demand(cores=2)), Part("worker", 16, Demand(1000, 1))))
    assert places(Consolidate(), gang, cluster(8, 8, 8)) == {0: 10, 1: 8}


def test_a_role_that_fits_beside_the_others_on_one_node_does() -> None:
    gang = Gang("job", (Part("ps", 1, Demand(cores=8)), Part("worker", 4, Demand(1000, 3))))
    ledger = cluster(4, 8)
    ledger.take(0, Demand(cores=8))
    assert places(Consolidate(), gang, ledger) == {1: 5}
    assert places(FirstFit(), gang, ledger) == {1: 5}


def test_shares_of_several_sizes_are_tried_before_they_are_offered() -> None:
    """Three times 0.6 and twice 0.5 make 2.8 GPUs, but do not fit on three."""
    gang = Gang("job", (Part("a", 3, Demand(600)), Part("b", 2, Demand(500))))
    tight, wide = NodeShape(3, 8, shareable=True), NodeShape(4, 8, shareable=True)
    for policy in (FirstFit(), Consolidate()):
        assert places(policy, gang, Ledger([tight, wide])) == {1: 5}
        assert isinstance(places(policy, gang, Ledger([tight])), Code)


@pytest.mark.parametrize("policy", ALL[1:], ids=lambda policy: policy.name)
def test_a_gang_with_server_locality_waits_for_one_server(policy: PlacementPolicy) -> None:
    assert places(policy, workers(4, locality=Locality.SERVER), cluster(3, 2)) is Code.FRAGMENTED


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_a_gang_with_rack_locality_gets_the_fullest_sufficient_rack_or_waits(policy: PlacementPolicy) -> None:
    ledger = Ledger([NodeShape(2, 8)] * 5, ["a", "b", "a", "b", "b"])
    ledger.take(0, Demand(1000), 2)
    gang = workers(4, locality=Locality.RACK)
    offer = constraints.place(policy, gang, ledger, rng())
    assert not isinstance(offer, Refusal)
    assert {ledger.racks[share.node] for share in offer} == {"b"}
    ledger.take(1, Demand(1000), 2)
    ledger.take(3, Demand(1000), 1)
    refusal = constraints.place(policy, gang, ledger, rng())
    assert isinstance(refusal, Refusal)
    assert refusal.code in (Code.CAPACITY, Code.FRAGMENTED)
    never = constraints.place(policy, workers(9, locality=Locality.RACK), ledger, rng())
    assert isinstance(never, Refusal)
    assert never.code is Code.NEVER_FITS


def test_count_ignores_locality() -> None:
    assert places(Count(), workers(4, locality=Locality.SERVER), cluster(2, 2)) == {0: 2, 1: 2}


def test_a_type_is_found_anywhere_in_the_name_of_a_gpu() -> None:
    ledger = Ledger([NodeShape(8, 24, gpu_type="Tesla T4"), NodeShape(8, 24, gpu_type="NVIDIA A100-SXM4-80GB")])
    gang = Gang("job", (Part("worker", 2, Demand(1000, gpu_type="a100")),))
    for policy in ALL:
        assert places(policy, gang, ledger) == {1: 2}


def test_any_of_several_gpu_types_suffices() -> None:
    ledger = Ledger([NodeShape(8, 24, gpu_type=name) for name in ("T4", "V100M16", "P100", "V100M32")])
    gang = Gang("job", (Part("worker", 16, Demand(1000, gpu_type="V100M16 | v100m32")),))
    for policy in ALL:
        assert places(policy, gang, ledger) == {1: 8, 3: 8}


def test_a_job_without_requests_is_placed_too() -> None:
    for policy in ALL:
        assert isinstance(places(policy, workers(3, gpus=0), cluster(0)), dict)


@pytest.mark.parametrize(
    ("free", "replicas", "locality", "spread"),
    [
        ((8, 8), 1, None, {0: 1}),
        ((4, 8), 1, None, {1: 1}),
        ((4, 8, 6), 4, None, {1: 3, 2: 1}),
        ((8, 8, 8), 6, None, {0: 2, 1: 2, 2: 2}),
        ((8, 1, 0), 9, None, {0: 8, 1: 1}),
        ((4, 6, 5), 4, Locality.SERVER, {1: 4}),
        ((4, 4), 5, Locality.SERVER, Code.FRAGMENTED),
        ((4, 4), 9, None, Code.CAPACITY),
    ],
)
def test_spread_takes_the_emptiest_node_for_each_replica(
    free: tuple[int, ...], replicas: int, locality: Locality | None, spread: dict[int, int] | Code
) -> None:
    assert places(Spread(), workers(replicas, locality=locality), cluster(*free)) == spread


def test_spread_counts_in_shares_of_what_a_node_has() -> None:
    ledger = Ledger([NodeShape(8, 24), NodeShape(2, 24)])
    ledger.take(0, Demand(1000), 5)
    assert places(Spread(), workers(1), ledger) == {1: 1}
    assert places(Spread(), workers(2), ledger) == {1: 2}
    ledger.take(1, Demand(1000))
    assert places(Spread(), workers(2), ledger) == {0: 1, 1: 1}


def test_spread_keeps_cpu_gangs_off_nodes_with_gpus_while_others_have_room() -> None:
    ledger = Ledger([NodeShape(8, 24), NodeShape(0, 8), NodeShape(0, 4)])
    assert places(Spread(), workers(3, gpus=0, cores=2), ledger) == {1: 2, 2: 1}
    assert places(Spread(), workers(7, gpus=0, cores=2), ledger) == {0: 1, 1: 4, 2: 2}


def test_chance_gives_every_node_with_room_its_turn() -> None:
    ledger = cluster(8, 0, 8, 3)
    drawn = {seed: RandomFit().place(workers(2), ledger, rng(seed)) for seed in range(60)}
    assert all(isinstance(offer, tuple) for offer in drawn.values())
    counts = [on_nodes(offer) for offer in drawn.values() if isinstance(offer, tuple)]
    assert {node for places in counts for node in places} == {0, 2, 3}
    assert places(RandomFit(), workers(19), ledger) == {0: 8, 2: 8, 3: 3}
    assert places(RandomFit(), workers(4, locality=Locality.SERVER), cluster(3, 4, 3)) == {1: 4}
    assert places(RandomFit(), workers(4, locality=Locality.SERVER), cluster(3, 3)) == Code.FRAGMENTED
