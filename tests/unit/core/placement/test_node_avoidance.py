"""Gangs that avoid nodes, under every placement policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant import plugins
from cotenant.conformance.placement_streams import ready
from cotenant.conformance.worlds import World, gangs, picture, rng, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code
from cotenant.core.placement.node_avoidance import relax_avoidance
from cotenant.core.scheduling.cycle import place
from cotenant.policies.consolidate import Consolidate

AVOIDED = st.lists(st.sampled_from(["n0", "n1", "n2", "n3", "gone"]), unique=True).map(tuple)
ONE_GPU = (Part("worker", 1, Demand(gpu_milli=1000)),)

FOUND = plugins.discover("cotenant.placement_policies")
every_policy = pytest.mark.parametrize("plugin", FOUND, ids=[plugin.name for plugin in FOUND])


def pair(**fields: object) -> Ledger:
    return Ledger([NodeShape(gpus=2, cores=8)] * 2, ids=("a", "b"))


@every_policy
@settings(max_examples=examples(60))
@given(worlds(racks_max=2), st.lists(st.tuples(gangs(), AVOIDED), min_size=1, max_size=4))
def test_no_gang_is_ever_on_a_node_that_it_avoids(
    plugin: plugins.Plugin, world: World, stream: list[tuple[Gang, tuple[str, ...]]]
) -> None:
    asking = [replace(gang, job_id=f"j{n}", avoided=avoided) for n, (gang, avoided) in enumerate(stream)]
    before, was_open = picture(world.ledger), world.ledger.open.tolist()
    plan = place(asking, world.ledger, ready(plugin), rng())
    assert (picture(world.ledger), world.ledger.open.tolist()) == (before, was_open)
    for start in plan.starts:
        there = {world.ledger.numbers[node_id] for node_id in start.gang.avoided}
        assert there.isdisjoint(share.node for share in start.offer)
        asked = next(gang for gang in asking if gang.job_id == start.gang.job_id)
        known = [node_id for node_id in asked.avoided if node_id in world.ledger.numbers]
        assert [*start.gang.yielded, *start.gang.avoided] == known, "the longest avoided yields first"


@every_policy
@settings(max_examples=examples(60))
@given(worlds(), gangs(roles_max=1), AVOIDED)
def test_who_avoids_all_nodes_that_could_hold_it_starts_as_if_it_avoided_fewer(
    plugin: plugins.Plugin, world: World, gang: Gang, avoided: tuple[str, ...]
) -> None:
    world.ledger.open[:] = True
    empty = Ledger(world.ledger.shapes, world.ledger.racks, world.ledger.numbers)
    alone = place([gang], empty, ready(plugin), rng())
    away = place([replace(gang, avoided=avoided)], empty, ready(plugin), rng())
    if alone.starts and gang.locality is None:
        refusal = away.refusals.get(gang.job_id)
        assert away.starts or (refusal and refusal.code in (Code.FRAGMENTED, Code.QOS)), refusal


def test_what_stands_alike_but_for_what_it_avoids_is_asked_about_apart() -> None:
    ledger = pair()
    ledger.take(0, Demand(gpu_milli=1000), 2)
    asking = [Gang("shy", ONE_GPU, avoided=("b",)), Gang("bold", ONE_GPU), Gang("again", ONE_GPU, avoided=("b",))]
    plan = place(asking, ledger, Consolidate(), rng())
    assert [start.gang.job_id for start in plan.starts] == ["bold"]
    assert plan.refusals["shy"].code is Code.CAPACITY
    assert plan.refusals["shy"].detail == "needs 1 GPU, 0 of 2 free; it avoids 1 server: b"
    assert plan.refusals["shy"].numbers["avoided_nodes"] == 1


def test_a_closed_node_that_could_hold_it_is_waited_for_and_the_avoided_one_is_not_counted_as_closed() -> None:
    ledger = pair()
    ledger.open[0] = False
    plan = place([Gang("shy", ONE_GPU, avoided=("b",))], ledger, Consolidate(), rng())
    refusal = plan.refusals["shy"]
    assert refusal.code is Code.NO_NODES
    assert refusal.detail == "no other node takes work; it avoids 1 server: b"
    assert ledger.open.tolist() == [False, True]


@pytest.mark.parametrize(
    ("avoided", "kept", "yielded"),
    [
        (("a", "b"), ("b",), ("a",)),
        (("b", "a"), ("a",), ("b",)),
        (("a", "gone"), ("a",), ()),
        (("gone",), (), ()),
    ],
)
def test_the_longest_avoided_yields_first(
    avoided: tuple[str, ...], kept: tuple[str, ...], yielded: tuple[str, ...]
) -> None:
    heeded = relax_avoidance(Gang("job", ONE_GPU, avoided=avoided), pair())
    assert (heeded.avoided, heeded.yielded) == (kept, yielded)


def test_avoidance_yields_for_a_gang_that_needs_both_but_not_where_nothing_holds_it_anyway() -> None:
    both = (Part("worker", 2, Demand(gpu_milli=2000)),)
    assert relax_avoidance(Gang("job", both, avoided=("a",)), pair()).yielded == ("a",)
    on_one = Gang("job", both, Locality.SERVER, avoided=("a",))
    assert relax_avoidance(on_one, pair()).avoided == ("a",)


def test_a_broken_policy_leaves_the_nodes_open() -> None:
    class Broken:
        name, api_version = "broken", 1

        def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> object:
            raise ValueError("a bug")

    ledger = pair()
    with pytest.raises(ValueError, match="a bug"):
        place([Gang("job", ONE_GPU, avoided=("a",))], ledger, Broken(), rng())  # type: ignore[arg-type]  # it is broken
    assert ledger.open.all()
