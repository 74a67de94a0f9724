"""Refusals are true: a job starts once the named obstacle is gone (order, reservations, avoidance, unhealthy GPUs)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.test_placement_streams import contradiction, every_policy, ready
from tests.contract.test_policies import NOW, histories, installed, taught
from tests.support.properties import examples
from tests.support.worlds import World, emptied, gangs, rng, tables, worlds
from tests.unit.core.scheduling.test_reservations import RULE, Busy, busy

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import JobTable
from cotenant.core.model.node import UnhealthyCapacity
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.resources import NAMES
from cotenant.core.placement.node_avoidance import relax_avoidance
from cotenant.core.policy.cluster_view import RunningJob
from cotenant.core.policy.protocols import EndedJob
from cotenant.core.scheduling.admission import Choice, Rules, choose
from cotenant.core.scheduling.cycle import place


def chosen(plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules) -> Choice:
    jobs, policy = table.jobs(NOW), taught(plugin, history)
    return choose(jobs, policy, policy.order(jobs, NOW), table.capacity, now=NOW, rules=rules)


@installed("cotenant.queue_policies")
@settings(max_examples=examples(15))
@given(tables(), histories, st.sampled_from([Rules(), Rules(run_seconds_min=100.0)]))
def test_an_outranked_job_starts_once_the_jobs_ahead_are_gone(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules
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
        needs = {name: int(column[row]) for name, column in zip(NAMES, jobs.needs, strict=True)}
        ahead = waiting[:place_of]
        assert refusal.numbers["ahead"] == len(ahead)
        if ahead:
            assert refusal.numbers["ahead_gpu_milli"] == int(jobs.gpu_milli[ahead].sum())
            assert f"the nearest, {ids[ahead[-1]]}, has score" in refusal.detail
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
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules, refusal: Refusal, row: int
) -> None:
    """A strict order names the job that does not fit; once that job is gone, the jobs that waited only for it run."""
    choice, ids = chosen(plugin, table, history, rules), list(table.ids)
    assert choice.outrankers
    assert choice.outrankers.head
    head = ids[choice.outrankers.head[1]]
    assert f"no further than {head}, " in refusal.detail
    numbers = refusal.numbers
    assert any(numbers[f"head_{name}"] > numbers[f"left_{name}"] for name in NAMES), refusal
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
@settings(max_examples=examples(12))
@given(busy())
def test_a_job_blocked_by_a_reservation_starts_without_it(plugin: plugins.Plugin, world: Busy) -> None:
    plan = place(world.gangs, world.ledger, ready(plugin), rng(), cluster_view=world.cluster_view, reserving=RULE)
    reserved = {one.gang.job_id for one in plan.reservations}
    starts = {start.gang.job_id: start for start in plan.starts}
    if any(start.moves or start.reclaims for start in plan.starts):
        return  # who moved is elsewhere than the scene shows
    for number, gang in enumerate(world.gangs):
        refusal = plan.refusals.get(gang.job_id)
        if refusal is None or refusal.code is not Code.RESERVED:
            continue
        assert any(name in refusal.detail for name in reserved), refusal
        cluster_view = replace(world.cluster_view, all=dict(world.cluster_view.all))
        with world.ledger.rolled_back():
            for other in world.gangs[:number]:
                if (start := starts.get(other.job_id)) is None:
                    continue
                for holding in start.holdings:
                    world.ledger.hold(holding)
                lent = start.reclaimable
                cluster_view.all[other.job_id] = RunningJob(other, start.holdings, cluster_view.now, reclaimable=lent)
            again = place([gang], world.ledger, ready(plugin), rng(), cluster_view=cluster_view)
        assert again.starts, f"{refusal}, but without the reservation {again.refusals}"


AVOIDED = st.lists(st.sampled_from(["n0", "n1", "n2", "n3"]), unique=True).map(tuple)


@every_policy
@settings(max_examples=examples(15))
@given(worlds(), gangs(roles_max=1), AVOIDED)
def test_a_job_that_avoids_nodes_starts_on_others_or_when_avoidance_ends(
    plugin: plugins.Plugin, world: World, gang: Gang, avoided: tuple[str, ...]
) -> None:
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


@every_policy
@settings(max_examples=examples(20))
@given(ill_worlds(), gangs(roles_max=1))
def test_unhealthy_gpus_in_a_refusal_would_fit_the_job(
    plugin: plugins.Plugin, given_: tuple[World, Ledger], gang: Gang
) -> None:
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
