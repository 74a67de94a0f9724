from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cotenant.conformance.worlds import World, emptied, gangs, requests, rng, shapes, specs, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec, Locality, Request, Role
from cotenant.core.model.node import NodeShape, UnhealthyCapacity
from cotenant.core.model.refusal import Code
from cotenant.core.placement.assembly import in_node_order, place_parts
from cotenant.core.placement.capacity_shortage import shortage, shortage_refusal
from cotenant.core.placement.packing import place_on_node, room_for_all
from cotenant.core.placement.unschedulable import fits, in_words, never_fits, no_place, room_on, shapes_of
from cotenant.core.scheduling.cycle import gang_of
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count
from cotenant.policies.requested import Requested


def ledger_of(made_of: Sequence[NodeShape]) -> Ledger:
    return Ledger([replace(shape, count=1) for shape in made_of for _ in range(shape.count)])


cluster_shapes = st.lists(
    st.tuples(shapes(), st.integers(0, 2)).map(lambda drawn: replace(drawn[0], count=drawn[1])), min_size=1, max_size=3
)


@given(specs(), cluster_shapes, st.booleans())
def test_what_is_said_never_to_fit_finds_no_place_on_an_empty_cluster(
    spec: JobSpec, made_of: list[NodeShape], elastic: bool
) -> None:
    if never_fits(spec, made_of, elastic=elastic):
        joined = [replace(shape, count=40) for shape in made_of] if elastic else made_of
        gang = gang_of("job", spec, UNKNOWN, Requested(), joined)
        ledger = ledger_of(joined)
        assert isinstance(Consolidate().place(gang, ledger, rng()), type(no_place(gang, ledger)))
        if spec.locality is not Locality.SERVER:
            assert not isinstance(Count().place(gang, ledger, rng()), tuple)


@given(specs(roles_max=1), cluster_shapes)
def test_a_job_of_one_role_that_may_fit_finds_its_place_on_an_empty_cluster(
    spec: JobSpec, made_of: list[NodeShape]
) -> None:
    ledger = ledger_of(made_of)
    if not len(ledger) or never_fits(spec, made_of, elastic=False):
        return
    offer = Consolidate().place(gang_of("job", spec, UNKNOWN, Requested(), made_of), ledger, rng())
    assert isinstance(offer, tuple), offer


@given(shapes(), requests())
def test_a_request_and_the_demand_it_becomes_are_judged_alike(shape: NodeShape, request: Request) -> None:
    cores = 1 if request.cores is None else request.cores
    demand = Demand(request.gpu_milli, cores, memory_bytes=request.memory_bytes, gpu_type=request.gpu_type)
    assert room_on(shape, request) == Ledger([shape]).room(demand)[0]


@given(worlds(racks_max=3), gangs(), st.sampled_from(Locality))
def test_every_reason_is_true(world: World, gang: Gang, within: Locality) -> None:
    ledger = world.ledger
    assume(not finds_place(gang, ledger, within=within))
    refusal = no_place(gang, ledger, within=within)
    able = np.zeros(len(ledger), dtype=np.bool_)
    for part in gang.parts:
        able |= ledger.room(part.demand, empty=True) > 0
    match refusal.code:
        case Code.NO_NODES if ledger.open.any():
            opened = emptied(ledger)
            opened.open[:] = True
            assert not fits(gang, emptied(ledger), within=within)
            assert fits(gang, opened, within=within)
        case Code.NO_NODES:
            assert not ledger.open.any()
        case Code.NEVER_FITS:
            opened = emptied(ledger)
            opened.open[:] = True
            assert not finds_place(gang, opened, within=within)
        case Code.CAPACITY:
            assert refusal.numbers
            for name in ("gpu_milli", "cores", "memory_bytes"):
                if f"wanted_{name}" in refusal.numbers:
                    assert refusal.numbers[f"wanted_{name}"] > refusal.numbers[f"free_{name}"]
                    assert refusal.numbers[f"wanted_{name}"] <= getattr(gang.needs, name)
        case code:
            assert code is Code.FRAGMENTED
            assert all(want <= free for want, free in zip(gang.needs, ledger.sums(able), strict=True))


@given(worlds(racks_max=3), gangs(), st.sampled_from(Locality))
def test_with_the_obstacle_gone_the_gang_starts(world: World, gang: Gang, within: Locality) -> None:
    """A fresh node with room for everything is what every remedy comes to."""
    ledger = world.ledger
    assume(not finds_place(gang, ledger, within=within))
    refusal = no_place(gang, ledger, within=within)
    kinds = {part.demand.gpu_type for part in gang.parts if part.demand.gpu_milli}
    assume(len(kinds - {""}) <= 1)
    plenty = NodeShape(100, 100, memory_bytes=1000, gpu_type=next(iter(kinds - {""}), ""), shareable=True)
    larger = Ledger([*ledger.shapes, plenty])
    larger.open[:-1] = False
    assert finds_place(gang, larger, within=within)
    if refusal.code in (Code.CAPACITY, Code.FRAGMENTED):
        assert fits(gang, emptied(ledger), within=within), "waiting would not help"


@given(worlds(racks_max=3), gangs(roles_max=1), st.sampled_from(Locality))
def test_with_less_of_what_is_blamed_the_gang_would_start(world: World, gang: Gang, within: Locality) -> None:
    ledger = world.ledger
    assume(not finds_place(gang, ledger, within=within))
    refusal = no_place(gang, ledger, within=within)
    (part,) = gang.parts
    relaxed = {
        "fits_without_cores": replace(part.demand, cores=0),
        "fits_without_memory_bytes": replace(part.demand, memory_bytes=0),
    }
    for name, demand in relaxed.items():
        if name in refusal.numbers:
            assert refusal.code is Code.FRAGMENTED
            assert finds_place(Gang("job", (replace(part, demand=demand),)), ledger, within=within)


@given(worlds(), gangs(roles_max=1))
def test_the_numbers_of_a_fragment_are_the_ledgers(world: World, gang: Gang) -> None:
    ledger = world.ledger
    assume(not finds_place(gang, ledger, within=Locality.SERVER))
    refusal = no_place(gang, ledger, within=Locality.SERVER)
    if refusal.code is Code.FRAGMENTED:
        room = np.minimum(ledger.room(gang.parts[0].demand), gang.parts[0].replicas)
        assert refusal.numbers["best_node_replicas"] == room.max() < refusal.numbers["wanted_replicas"]
        assert refusal.numbers["room_replicas"] == room.sum()
        spread = finds_place(gang, ledger, within=Locality.ANYWHERE)
        assert spread == (refusal.numbers["room_replicas"] >= refusal.numbers["wanted_replicas"])


def test_the_numbers_of_fragmented_racks_are_the_ledgers() -> None:
    ledger = Ledger([NodeShape(4, 8)] * 5, racks=["a", "b", "a", "b", "c"])
    for node, taken in enumerate([2, 0, 1, 3, 4]):
        ledger.take(node, Demand(1000), taken)
    refusal = no_place(Gang("job", (Part("worker", 6, Demand(1000)),)), ledger, within=Locality.RACK)
    assert refusal.code is Code.FRAGMENTED
    numbers = {name: refusal.numbers[name] for name in ("best_rack_replicas", "racks_with_room", "best_node_replicas")}
    assert numbers == {"best_rack_replicas": 5, "racks_with_room": 2, "best_node_replicas": 4}


def finds_place(gang: Gang, ledger: Ledger, *, within: Locality) -> bool:
    if within is Locality.SERVER:
        return any(place_on_node(gang, ledger, node) is not None for node in room_for_all(gang, ledger).tolist())
    racks = set(ledger.racks) if within is Locality.RACK else {None}
    for rack in racks:
        here = np.array([rack in (None, name) for name in ledger.racks])
        place = lambda part, room: in_node_order(part, np.where(here, room, 0))  # noqa: B023, E731 - used at once
        if place_parts(gang, ledger, place) is not None:
            return True
    return False


def one(gpu_milli: int = 0, cores: int = 0, replicas: int = 1, gpu_type: str = "") -> Gang:
    return Gang("job", (Part("worker", replicas, Demand(gpu_milli, cores, gpu_type=gpu_type)),))


@pytest.mark.parametrize(
    ("gang", "within", "code", "told"),
    [
        (one(1000, 1, replicas=4), Locality.ANYWHERE, Code.CAPACITY, "needs 4 GPUs, 3 of 6 free"),
        (one(1000, 1, replicas=2, gpu_type="T4"), Locality.ANYWHERE, Code.CAPACITY, "needs 2 GPUs (T4), 1 of 2 free"),
        (one(2000, 1, replicas=2), Locality.ANYWHERE, Code.CAPACITY, "needs 4 GPUs, 3 of 6 free"),
        (one(0, 5, replicas=7), Locality.ANYWHERE, Code.CAPACITY, "needs 35 cores, 32 of 40 free"),
        (
            one(1000, 1, replicas=3),
            Locality.SERVER,
            Code.FRAGMENTED,
            "on one server; the best has room for 2, 2 servers together",
        ),
        (one(1000, 7, replicas=3), Locality.ANYWHERE, Code.FRAGMENTED, "room for 2; cores stand in its way"),
        (one(9000, 1), Locality.ANYWHERE, Code.NEVER_FITS, "more than the whole cluster could hold"),
        (
            one(1000, 1, replicas=3),
            Locality.RACK,
            Code.FRAGMENTED,
            "in one rack; the best has room for 2, 2 racks together",
        ),
        (one(1000, 1, replicas=6), Locality.RACK, Code.NEVER_FITS, "more than any one rack could hold"),
        (one(1000, 1, replicas=5), Locality.SERVER, Code.NEVER_FITS, "more than any one server could hold"),
        (one(1000, 1, gpu_type="H200"), Locality.ANYWHERE, Code.NEVER_FITS, "1 GPU (H200)"),
    ],
)
def test_the_reason_fits_the_case(gang: Gang, within: Locality, code: Code, told: str) -> None:
    shapes = [NodeShape(4, 16, gpu_type="A100"), NodeShape(2, 16, gpu_type="T4"), NodeShape(0, 8)]
    ledger = Ledger(shapes, ["a", "b", "b"])
    ledger.take(0, Demand(2000, 4))
    ledger.take(1, Demand(1000, 4))
    refusal = no_place(gang, ledger, within=within)
    assert refusal.code is code, refusal
    assert told in refusal.detail


def test_a_gang_that_waits_for_a_closed_node_says_so() -> None:
    ledger = Ledger([NodeShape(8, 16), NodeShape(2, 16)])
    ledger.open[0] = False
    refusal = no_place(one(1000, 1, replicas=4), ledger)
    assert refusal.code is Code.NO_NODES
    assert "1 server takes no work" in refusal.detail
    ledger.open[:] = False
    assert no_place(one(1000), ledger).detail == "no node takes work"


def test_roles_that_fit_alone_but_not_beside_each_other_say_so() -> None:
    ledger = Ledger([NodeShape(2, 8)])
    gang = Gang("job", (Part("worker", 2, Demand(1000, 3)), Part("ps", 1, Demand(cores=3))))
    assert no_place(gang, ledger).code is Code.NEVER_FITS
    two = Ledger([NodeShape(2, 8), NodeShape(2, 8)])
    two.take(1, Demand(cores=6))
    refusal = no_place(gang, two, within=Locality.ANYWHERE)
    assert refusal.code is Code.FRAGMENTED
    assert "beside its other role" in refusal.detail


def test_a_job_that_asks_for_no_cores_is_not_judged_as_if_it_did() -> None:
    bare = NodeShape(gpus=2, cores=0)
    traced = JobSpec(roles=(Role(replicas=2, request=Request(gpu_milli=1000, cores=0)),))
    assert never_fits(traced, [bare], elastic=False) is None
    assert never_fits(JobSpec(roles=(Role(request=Request(gpu_milli=1000)),)), [bare], elastic=False)


def test_a_job_for_one_server_never_fits_where_no_server_is_large_enough() -> None:
    roles = (Role(replicas=4, request=Request(gpu_milli=1000)),)
    two = [NodeShape(2, 8, count=2)]
    assert never_fits(JobSpec(roles=roles), two, elastic=False) is None
    for elastic in (False, True):
        refusal = never_fits(JobSpec(roles=roles, locality=Locality.SERVER), two, elastic=elastic)
        assert refusal is not None
        assert "one server" in refusal.detail


def test_a_job_for_one_server_never_fits_where_its_roles_need_servers_of_different_types() -> None:
    roles = tuple(Role(name, request=Request(1000, 1, gpu_type=kind)) for name, kind in (("a", "A100"), ("b", "T4")))
    shapes = [NodeShape(4, 8, gpu_type="A100"), NodeShape(4, 8, gpu_type="T4")]
    one_server = JobSpec(roles=roles, locality=Locality.SERVER)
    assert never_fits(replace(one_server, locality=None), shapes, elastic=False) is None
    assert never_fits(one_server, shapes, elastic=False) is not None
    assert never_fits(replace(one_server, roles=(replace(roles[0], replicas=4),)), shapes, elastic=False) is None


def test_where_any_number_of_nodes_may_join_only_single_replicas_can_be_too_large() -> None:
    shape = NodeShape(2, 8, count=0)
    many = JobSpec(roles=(Role(replicas=50, request=Request(gpu_milli=2000)),))
    large = JobSpec(roles=(Role(request=Request(gpu_milli=3000)),))
    assert never_fits(many, [shape], elastic=True) is None
    assert never_fits(many, [replace(shape, count=3)], elastic=False) is not None
    refusal = never_fits(large, [shape], elastic=True)
    assert refusal is not None
    assert "'worker' needs 3 GPUs; the largest node has 2 GPUs, 8 cores" in refusal.detail


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(gpu_milli=2000, cores=1), "the job needs 8 GPUs; the whole cluster has 6"),
        (Request(cores=9), "the job needs 36 cores at least; the whole cluster has 30"),
        (Request(cores=1, memory_bytes=3 * 2**30), "the job needs 12 GiB of memory; the whole cluster has 9 GiB"),
    ],
)
def test_roles_that_fit_alone_may_be_too_much_together(request_: Request, told: str) -> None:
    roles = (Role("worker", 2, request_), Role("ps", 2, request_))
    made_of = [NodeShape(2, 10, memory_bytes=3 * 2**30, count=3)]
    refusal = never_fits(JobSpec(roles=roles), made_of, elastic=False)
    assert refusal is not None
    assert told in refusal.detail
    assert never_fits(JobSpec(roles=roles), made_of, elastic=True) is None


def test_a_node_that_could_join_helps_only_where_nodes_may_join() -> None:
    small, absent = NodeShape(2, 8), NodeShape(8, 24, count=0)
    large = JobSpec(roles=(Role(request=Request(gpu_milli=8000)),))
    assert never_fits(large, [small, absent], elastic=True) is None
    assert never_fits(large, [small, absent], elastic=False) is not None


def test_nothing_is_judged_before_a_node_is_known() -> None:
    assert never_fits(JobSpec(roles=(Role(request=Request(gpu_milli=64_000)),)), [], elastic=False) is None


def test_nodes_are_grouped_by_shape() -> None:
    a, b = NodeShape(8, 24), NodeShape(0, 24)
    assert shapes_of(Ledger([a, b, a])) == (replace(a, count=2), b)


def test_a_demand_is_written_in_words() -> None:
    assert (
        in_words(Demand(500, 1, memory_bytes=3 * 2**30, gpu_type="T4"))
        == "0.5 GPUs (T4) and 1 core and 3 GiB of memory"
    )
    assert in_words(Demand()) == "nothing"


@pytest.mark.parametrize(
    ("demand", "told"),
    [
        (Demand(460), "no server shares its GPUs"),
        (Demand(460, gpu_type="T4"), "no server shares its GPUs of type T4"),
        (Demand(1000, gpu_type="V100M16|V100M32"), "no server has GPUs of type V100M16 or V100M32"),
    ],
)
def test_it_is_said_where_no_server_has_such_gpus_or_shares_them(demand: Demand, told: str) -> None:
    shapes = (NodeShape(0, 8, shareable=True), NodeShape(2, 8, gpu_type="T4"))
    refusal = no_place(Gang("job", (Part("worker", 1, demand),)), Ledger(shapes))
    assert (refusal.code, told in refusal.detail) == (Code.NEVER_FITS, True), refusal.detail
    spec = JobSpec(roles=(Role(request=Request(demand.gpu_milli, 1, memory_bytes=0, gpu_type=demand.gpu_type)),))
    never = never_fits(spec, shapes, elastic=True)
    assert never is not None
    assert told in never.detail


def test_several_types_are_told_as_alternatives() -> None:
    assert in_words(Demand(2000, gpu_type="V100M16|V100M32")) == "2 GPUs (V100M16 or V100M32)"


@pytest.mark.parametrize(("gpus", "cores", "ill"), [(3, 1, 1.0), (3, 8, 1.0), (2, 8, None)])
def test_unhealthy_gpus_are_named_only_where_gpus_are_too_few(gpus: int, cores: int, ill: float | None) -> None:
    ledger = ledger_of([NodeShape(3, 16), NodeShape(4, 16)])
    ledger.unhealthy = UnhealthyCapacity(1, 1, (NodeShape(4, 16), NodeShape(4, 16)))
    ledger.take(1, Demand(1000, 4), 4)
    ledger.take(0, Demand(1000, 4), 1)
    found = shortage(one(1000, cores, gpus), ledger)
    refusal = shortage_refusal(found, ledger) if found else None
    assert refusal is not None
    assert refusal.numbers.get("unhealthy_gpus") == ill
    assert ("1 GPU is unhealthy and not counted" in refusal.detail) == (ill is not None)


def test_of_two_roles_the_shortage_is_that_of_the_one_for_which_too_little_is_free() -> None:
    ledger = ledger_of([NodeShape(4, 8)])
    worker, server = Part("worker", 8, Demand(1000, 0)), Part("ps", 2, Demand(0, 1))
    found = shortage(Gang("job", (worker, server)), ledger)
    assert found is not None
    assert (tuple(found.parts), found.wanted.gpu_milli, found.wanted.cores) == ((worker,), 8000, 0)
    together = (replace(worker, replicas=2, demand=Demand(1000, 2)), replace(server, replicas=6))
    assert (found := shortage(Gang("job", together), ledger))
    assert (tuple(found.parts), found.wanted.cores) == (together, 10)


@pytest.mark.parametrize(("cores", "fits_there"), [(4, True), (3, False)])
def test_a_job_on_one_server_with_auto_cores_needs_one_for_each_replica(cores: int, fits_there: bool) -> None:
    roles = (Role("worker", 3, Request(1000)), Role("ps", 1, Request(cores=None)))
    spec = JobSpec(roles=roles, locality=Locality.SERVER)
    assert (never_fits(spec, [NodeShape(4, cores)], elastic=True) is None) == fits_there
