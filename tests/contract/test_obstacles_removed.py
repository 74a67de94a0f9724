"""Whom a refusal names or counts is taken away, and the job starts: the order, reservations, avoidance, ill GPUs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.test_placement_streams import contradiction, every_policy, ready
from tests.contract.test_policies import NOW, histories, installed, taught
from tests.support.worlds import World, emptied, gangs, rng, tables, worlds
from tests.unit.core.scheduling.test_reservations import RULE, Busy, busy

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import JobTable
from cotenant.core.model.node import Illness
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.node_avoidance import yielding
from cotenant.core.policy.cluster_view import Resident
from cotenant.core.policy.protocols import Ended
from cotenant.core.scheduling.admission import Choice, Rules, choose
from cotenant.core.scheduling.cycle import place

RESOURCES = ("gpu_milli", "cores", "memory_bytes")


def chosen(plugin: plugins.Plugin, table: JobTable, history: list[Ended], rules: Rules) -> Choice:
    jobs, policy = table.jobs(NOW), taught(plugin, history)
    return choose(jobs, policy, policy.order(jobs, NOW), table.capacity, now=NOW, rules=rules)


@installed("cotenant.queue_policies")
@settings(max_examples=15)
@given(tables(), histories, st.sampled_from([Rules(), Rules(run_seconds_min=100.0)]))
def test_who_is_outranked_does_not_fit_beside_those_before_it_and_should_run_once_they_are_gone(
    plugin: plugins.Plugin, table: JobTable, history: list[Ended], rules: Rules
) -> None:
    choice, jobs, ids = chosen(plugin, table, history, rules), table.jobs(NOW), list(table.ids)
    if choice.outrankers is None:
        assert not len(choice.outranked)
        return
    assert choice.selected is not None
    waiting = choice.ranked[~jobs.running[choice.ranked]].tolist()
    staying = set(np.flatnonzero(rules.protects(jobs, NOW)).tolist())
    for row in choice.outranked.tolist():
        place_of = waiting.index(row)
        refusal = choice.outrankers.refusal(place_of, ids)
        needs = {name: int(getattr(jobs, name)[row]) for name in RESOURCES}
        ahead = waiting[:place_of]
        assert refusal.numbers["ahead"] == len(ahead)
        if ahead:
            assert refusal.numbers["ahead_gpu_milli"] == int(jobs.gpu_milli[ahead].sum())
            assert f"the nearest, {ids[ahead[-1]]}, has the score" in refusal.detail
        if "head_cores" in refusal.numbers:
            beyond_the_head(plugin, table, history, rules, refusal, row)
            continue
        assert any(need > refusal.numbers[f"left_{name}"] for name, need in needs.items()), refusal
        ranked = choice.ranked.tolist()
        before = {one for one in ranked[: ranked.index(row)] if choice.selected[one]} | staying
        named = choice.outrankers.before(place_of)
        assert set(named) <= before
        assert len(named) == min(2, len(before))
        if any(need > getattr(table.capacity, name) for name, need in needs.items()):
            continue  # it fits into no cluster of this size, and is refused for that elsewhere
        fewer = deepcopy(table)
        for job_id in [ids[one] for one in before]:
            fewer.remove(job_id)
        after, left = chosen(plugin, fewer, history, rules), fewer.row(ids[row])
        assert after.selected is not None
        if not after.selected[left]:  # an order may put others before it once those are gone
            still = after.ranked[~fewer.jobs(NOW).running[after.ranked]].tolist().index(left)
            assert after.outrankers is not None
            assert after.outrankers.before(still), "it waits for nobody, and yet does not run"


def beyond_the_head(
    plugin: plugins.Plugin, table: JobTable, history: list[Ended], rules: Rules, refusal: Refusal, row: int
) -> None:
    """A strict order names who does not fit: it does not, and once it is gone, whoever waited for it alone runs."""
    choice, ids = chosen(plugin, table, history, rules), list(table.ids)
    assert choice.outrankers
    assert choice.outrankers.head
    head = ids[choice.outrankers.head[1]]
    assert f"no further than {head}, " in refusal.detail
    numbers = refusal.numbers
    assert any(numbers[f"head_{name}"] > numbers[f"left_{name}"] for name in RESOURCES), refusal
    fewer = deepcopy(table)
    fewer.remove(head)
    after, left = chosen(plugin, fewer, history, rules), fewer.row(ids[row])
    assert after.selected is not None
    if not after.selected[left]:  # another one is in its way by now, which it is told
        still = after.ranked[~fewer.jobs(NOW).running[after.ranked]].tolist().index(left)
        assert after.outrankers
        now = after.outrankers.refusal(still, list(fewer.ids))
        assert f"no further than {head}, " not in now.detail


@every_policy
@settings(max_examples=12)
@given(busy())
def test_who_waits_for_a_reservation_alone_starts_where_nothing_is_reserved(
    plugin: plugins.Plugin, world: Busy
) -> None:
    plan = place(world.gangs, world.ledger, ready(plugin), rng(), scene=world.scene, reserving=RULE)
    reserved = {one.gang.job_id for one in plan.reservations}
    starts = {start.gang.job_id: start for start in plan.starts}
    if any(start.moves or start.reclaims for start in plan.starts):
        return  # who moved is elsewhere than the scene shows
    for number, gang in enumerate(world.gangs):
        refusal = plan.refusals.get(gang.job_id)
        if refusal is None or refusal.code is not Code.RESERVED:
            continue
        assert any(name in refusal.detail for name in reserved), refusal
        scene = replace(world.scene, all=dict(world.scene.all))
        with world.ledger.undone():
            for other in world.gangs[:number]:
                if (start := starts.get(other.job_id)) is None:
                    continue
                for holding in start.holdings:
                    world.ledger.hold(holding)
                lent = start.reclaimable
                scene.all[other.job_id] = Resident(other, start.holdings, scene.now, reclaimable=lent)
            again = place([gang], world.ledger, ready(plugin), rng(), scene=scene)
        assert again.starts, f"{refusal}, but without the reservation {again.refusals}"


AVOIDED = st.lists(st.sampled_from(["n0", "n1", "n2", "n3"]), unique=True).map(tuple)


@every_policy
@settings(max_examples=15)
@given(worlds(), gangs(roles_max=1), AVOIDED)
def test_who_keeps_away_from_nodes_starts_once_the_others_are_open_and_empty_or_it_does_not_any_more(
    plugin: plugins.Plugin, world: World, gang: Gang, avoided: tuple[str, ...]
) -> None:
    shy = replace(gang, avoided=avoided)
    refusal = place([shy], world.ledger, ready(plugin), rng()).refusals.get(gang.job_id)
    if refusal is None:
        return
    heeded = yielding(shy, world.ledger)
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
    """Draw a cluster of which some GPUs are not well, and the same one with all of them well and free."""
    world = draw(worlds(closed=False))
    lost = [draw(st.sampled_from([0, 0, 1, 2])) for _ in world.ledger.shapes]
    well = [replace(shape, gpus=shape.gpus + ill) for shape, ill in zip(world.ledger.shapes, lost, strict=True)]
    world.ledger.illness = Illness(sum(lost), 0, tuple(well))
    healed = Ledger(well, world.ledger.racks, world.ledger.numbers)
    for holding in (held for holdings in world.taken for held in holdings):
        healed.hold(holding)
    return world, healed


@every_policy
@settings(max_examples=20)
@given(ill_worlds(), gangs(roles_max=1))
def test_gpus_that_are_told_not_to_be_well_would_count_for_the_job_if_they_were(
    plugin: plugins.Plugin, given_: tuple[World, Ledger], gang: Gang
) -> None:
    world, healed = given_
    refusal = place([gang], world.ledger, ready(plugin), rng()).refusals.get(gang.job_id)
    if refusal is None:
        return
    idle = Ledger(world.ledger.illness.shapes_when_well, world.ledger.racks)
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
