"""Laws of placement policies within a cycle: without the obstacle that a refusal names, the job starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.placement_streams import contradiction, ready
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import World, emptied, gangs, rng, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.node import HeldNode, UnhealthyCapacity
from cotenant.core.model.reason_docs import MEANINGS
from cotenant.core.model.refusal import Code
from cotenant.core.model.tenancy import Headroom, Tenant
from cotenant.core.placement.node_avoidance import relax_avoidance
from cotenant.core.placement.unschedulable import fits
from cotenant.core.scheduling.cycle import Plan, place

streams = st.lists(gangs(roles_max=1), min_size=1, max_size=5).map(
    lambda made: [replace(gang, job_id=f"job-{number}", tenant="t") for number, gang in enumerate(made)]
)


def planned(plugin: plugins.Plugin, world: World, stream: list[Gang], **more: Any) -> Plan:
    """Return the plan of one cycle."""
    return place(stream, world.ledger, ready(plugin), rng(), **more)


@tried(20)
@given(worlds(racks_max=3), streams)
def test_in_a_strict_queue_a_job_is_unblocked_once_the_job_ahead_is_gone(
    plugin: plugins.Plugin, world: World, stream: list[Gang]
) -> None:
    """In a strict queue, a job is unblocked once the job that it waits behind is gone."""
    plan = planned(plugin, world, stream, strict=True)
    held_back = [job_id for job_id, refusal in plan.refusals.items() if refusal.code is Code.BEHIND]
    if not held_back:
        return
    head = next(gang.job_id for gang in stream if gang.job_id in plan.refusals and _blocks(plan, gang.job_id))
    assert all(plan.refusals[job_id].detail.startswith(f"waits behind {head}, ") for job_id in held_back)
    after = planned(plugin, world, [gang for gang in stream if gang.job_id != head], strict=True)
    first = after.refusals.get(held_back[0])
    assert first is None or first.code is not Code.BEHIND


def _blocks(plan: Plan, job_id: str) -> bool:
    return plan.refusals[job_id].code not in (Code.NEVER_FITS, Code.QUOTA)


@tried(20)
@given(worlds(), streams, st.integers(0, 6), st.integers(0, 12))
def test_raising_a_limit_by_the_named_amount_admits_the_job(
    plugin: plugins.Plugin, world: World, stream: list[Gang], milli: int, cores: int
) -> None:
    """Raising a limit by the amount that a refusal names admits the job."""
    tenant = Tenant("t", limit_gpu_milli=1000 * milli, limit_cores=cores)
    plan = planned(plugin, world, stream, headroom=Headroom([tenant]))
    for gang in stream:
        refusal = plan.refusals.get(gang.job_id)
        if refusal is None or refusal.code is not Code.QUOTA:
            continue
        lacks = {
            name: int(refusal.numbers[f"held_{name}"] + refusal.numbers[f"wanted_{name}"])
            for name in ("gpu_milli", "cores")
            if f"limit_{name}" in refusal.numbers
        }
        raised = Tenant(
            "t",
            limit_gpu_milli=lacks.get("gpu_milli", tenant.limit_gpu_milli),
            limit_cores=lacks.get("cores", tenant.limit_cores),
        )
        taken = sum(refusal.numbers.get(f"held_{name}", 0) for name in lacks)
        before = [one for one in stream[: stream.index(gang)] if one.job_id not in plan.refusals] if taken else []
        again = planned(plugin, world, [*before, gang], headroom=Headroom([raised])).refusals.get(gang.job_id)
        assert again is None or again.code is not Code.QUOTA, refusal


@tried(20)
@given(worlds(racks_max=3), gangs(roles_max=1))
def test_a_single_node_gang_starts_on_an_empty_node_or_after_the_named_time(
    plugin: plugins.Plugin, world: World, gang: Gang
) -> None:
    """A refused gang starts on an empty node or after the time that the refusal names."""
    refusal = planned(plugin, world, [gang]).refusals.get(gang.job_id)
    if refusal is None:
        return
    named = [*MEANINGS[refusal.code].numbers]
    assert all(any(number.startswith(one) for one in named) for number in refusal.numbers), refusal
    if refusal.code is Code.FRAGMENTED and refusal.locality is Locality.SERVER:
        best = refusal.numbers["best_node_replicas"]
        assert best < refusal.numbers["wanted_replicas"]
        assert any(_starts_once_empty(plugin, world, gang, node) for node in range(len(world.ledger))), refusal
    if math.isfinite(refusal.holds_seconds):
        older = replace(gang, fragmented_seconds=gang.fragmented_seconds + refusal.holds_seconds)
        after = planned(plugin, world, [older]).refusals.get(gang.job_id)
        assert after is None or (after.code, after.locality) != (refusal.code, refusal.locality)
        assert after is None or after.locality is refusal.relaxes_to


@tried(20)
@given(worlds(racks_max=3), gangs(roles_max=1), st.data())
def test_jobs_refused_for_held_nodes_fit_only_on_held_nodes(
    plugin: plugins.Plugin, world: World, gang: Gang, data: st.DataObject
) -> None:
    """A job refused because nodes are held fits only on those nodes."""
    ledger = world.ledger
    node_ids = data.draw(st.sets(st.sampled_from(sorted(ledger.numbers)), min_size=1))
    ledger.unhealthy = replace(
        ledger.unhealthy, held=tuple(HeldNode(one, "cannot launch", 5.0) for one in sorted(node_ids))
    )
    held = [ledger.numbers[one] for one in node_ids]
    ledger.open[held] = False
    refusal = planned(plugin, world, [gang]).refusals.get(gang.job_id)
    if refusal is None or refusal.code is not Code.NODES_HELD:
        return
    within = gang.locality or Locality.ANYWHERE
    assert not fits(gang, ledger, within=within, empty=True)
    ledger.open[held] = True
    assert fits(gang, ledger, within=Locality.ANYWHERE, empty=True)
    assert refusal.numbers == {"held_nodes": len(node_ids), "next_canary_seconds": 5.0}


def _starts_once_empty(plugin: plugins.Plugin, world: World, gang: Gang, node: int) -> bool:
    empty = emptied(world.ledger)
    with world.ledger.rolled_back():
        for held in [holding for holdings in world.taken for holding in holdings if holding.node == node]:
            world.ledger.release(held)
        return empty.open[node] and not planned(plugin, world, [gang]).refusals


AVOIDED = st.lists(st.sampled_from(["n0", "n1", "n2", "n3"]), unique=True).map(tuple)


@tried(15)
@given(worlds(), gangs(roles_max=1), AVOIDED)
def test_a_job_that_avoids_nodes_starts_on_others_or_when_avoidance_ends(
    plugin: plugins.Plugin, world: World, gang: Gang, avoided: tuple[str, ...]
) -> None:
    """A job that avoids nodes starts on others, or when avoidance ends."""
    shy = replace(gang, avoided=avoided)
    refusal = place([shy], world.ledger, ready(plugin), rng()).refusals.get(gang.job_id)
    if refusal is None:
        return
    heeded = relax_avoidance(shy, world.ledger)
    assert refusal.numbers.get("avoided_nodes", 0) == (
        len(heeded.avoided) if refusal.code is not Code.NEVER_FITS else 0
    )
    others = world.ledger.copy()
    others.open[[others.numbers[name] for name in heeded.avoided]] = False
    assert not contradiction(replace(gang, avoided=()), refusal, others, plugin), refusal
    idle = Ledger(world.ledger.shapes, world.ledger.racks, world.ledger.numbers)
    starts = bool(place([shy], idle, ready(plugin), rng()).starts)
    assert starts == (refusal.code is not Code.NEVER_FITS), refusal
    if "closed_nodes" in refusal.numbers:
        named = {world.ledger.numbers[name] for name in heeded.avoided}
        closed = [node for node in np.flatnonzero(~world.ledger.open).tolist() if node not in named]
        assert refusal.numbers["closed_nodes"] == len(closed), refusal


@st.composite
def ill_worlds(draw: st.DrawFn) -> tuple[World, Ledger]:
    """Draw a cluster with unhealthy GPUs, and the same cluster with all of them healthy and free."""
    world = draw(worlds(closed=False))
    lost = [draw(st.sampled_from([0, 0, 1, 2])) for _ in world.ledger.shapes]
    well = [replace(shape, gpus=shape.gpus + ill) for shape, ill in zip(world.ledger.shapes, lost, strict=True)]
    world.ledger.unhealthy = UnhealthyCapacity(sum(lost), 0, tuple(well))
    healed = Ledger(well, world.ledger.racks, world.ledger.numbers)
    for holding in (held for holdings in world.taken for held in holdings):
        healed.hold(holding)
    return world, healed


@tried(20)
@given(ill_worlds(), gangs(roles_max=1))
def test_unhealthy_gpus_in_a_refusal_would_fit_the_job(
    plugin: plugins.Plugin, given_: tuple[World, Ledger], gang: Gang
) -> None:
    """The unhealthy GPUs that a refusal names would fit the job."""
    world, healed = given_
    refusal = place([gang], world.ledger, ready(plugin), rng()).refusals.get(gang.job_id)
    if refusal is None:
        return
    idle = Ledger(world.ledger.unhealthy.healthy_shapes, world.ledger.racks)
    told = int(refusal.numbers.get("unhealthy_gpus", 0))
    demand = gang.parts[0].demand
    if refusal.code is Code.NO_NODES:
        assert told
        assert not place([gang], emptied(world.ledger), ready(plugin), rng()).starts
    if told:
        more = [well.gpus - now.gpus for well, now in zip(healed.shapes, world.ledger.shapes, strict=True)]
        counted = [ill for node, ill in enumerate(more) if healed.of_type(demand.gpu_type)[node]]
        assert told == sum(counted), refusal
        assert place([gang], idle, ready(plugin), rng()).starts, refusal
    if refusal.code is Code.NEVER_FITS:
        assert not place([gang], idle, ready(plugin), rng()).starts, refusal
