"""Refusals are true: a job starts once the named obstacle is gone (order, reservations, avoidance, unhealthy GPUs)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.support.properties import examples
from tests.unit.core.scheduling.test_reservations import RULE, Busy, busy

from cotenant import plugins
from cotenant.conformance.placement_streams import ready
from cotenant.conformance.worlds import rng
from cotenant.core.model.refusal import Code
from cotenant.core.policy.cluster_view import RunningJob
from cotenant.core.scheduling.cycle import place

EVERY_POLICY = plugins.discover("cotenant.placement_policies")


@pytest.mark.parametrize("plugin", EVERY_POLICY, ids=[plugin.name for plugin in EVERY_POLICY])
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
