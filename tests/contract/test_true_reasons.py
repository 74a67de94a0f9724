"""Reasons are true: without the named obstacle a waiting job starts, or waits for something else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.test_placement_streams import every_policy, ready
from tests.support.properties import examples
from tests.support.worlds import World, emptied, gangs, rng, worlds
from tests.unit.services.mesh import BACKFILL, LAS, Mesh, eventually, running

from cotenant import plugins
from cotenant.codec.specs import duration
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.node import HeldNode, NodeShape
from cotenant.core.model.reason_docs import MEANINGS
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Headroom, Tenant
from cotenant.core.placement.unschedulable import fits
from cotenant.core.scheduling.cycle import Plan, place
from cotenant.policies.locality import WaitsForLocality
from cotenant.services.queue.api.server import QueueConfig
from cotenant.v1 import job_service_pb2 as pb

streams = st.lists(gangs(roles_max=1), min_size=1, max_size=5).map(
    lambda made: [replace(gang, job_id=f"job-{number}", tenant="t") for number, gang in enumerate(made)]
)


def planned(plugin: plugins.Plugin, world: World, stream: list[Gang], **more: Any) -> Plan:
    return place(stream, world.ledger, ready(plugin), rng(), **more)


@every_policy
@settings(max_examples=examples(20))
@given(worlds(racks_max=3), streams)
def test_in_a_strict_queue_a_job_is_unblocked_once_the_job_ahead_is_gone(
    plugin: plugins.Plugin, world: World, stream: list[Gang]
) -> None:
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


@every_policy
@settings(max_examples=examples(20))
@given(worlds(), streams, st.integers(0, 6), st.integers(0, 12))
def test_raising_a_limit_by_the_named_amount_admits_the_job(
    plugin: plugins.Plugin, world: World, stream: list[Gang], milli: int, cores: int
) -> None:
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


@every_policy
@settings(max_examples=examples(20))
@given(worlds(racks_max=3), gangs(roles_max=1))
def test_a_single_node_gang_starts_on_an_empty_node_or_after_the_named_time(
    plugin: plugins.Plugin, world: World, gang: Gang
) -> None:
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


@every_policy
@settings(max_examples=examples(20))
@given(worlds(racks_max=3), gangs(roles_max=1), st.data())
def test_jobs_refused_for_held_nodes_fit_only_on_held_nodes(
    plugin: plugins.Plugin, world: World, gang: Gang, data: st.DataObject
) -> None:
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


@given(st.integers(0, 700), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(2, 8))
def test_a_gang_relaxes_its_locality_at_the_named_time(waited: int, taken: list[int], replicas: int) -> None:
    ledger = Ledger([NodeShape(4, 8)] * 4, ["a", "a", "b", "b"])
    for node, count in enumerate(taken):
        ledger.take(node, Demand(1000), count)
    gang = Gang("g", (Part("worker", replicas, Demand(1000)),), fragmented_seconds=waited)

    def refusal(after: float) -> Refusal | None:
        older = replace(gang, fragmented_seconds=waited + after)
        return place([older], ledger, WaitsForLocality(), rng()).refusals.get("g")

    told = refusal(0)
    if told is None or math.isinf(told.holds_seconds):
        return
    before, then = refusal(told.holds_seconds - 0.5), refusal(told.holds_seconds)
    assert before is not None
    assert (before.code, before.locality) == (told.code, told.locality)
    assert then is None or then.locality is told.relaxes_to


# Live ---------------------------------------------------------------------------------------------------------


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    told: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return told


@pytest.mark.parametrize("config", [BACKFILL, QueueConfig(), LAS], ids=["backfill", "strict", "las"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_live_waiting_jobs_start_once_the_named_jobs_are_gone(config: QueueConfig, seed: int) -> None:
    draw = rng(seed)
    async with running(queue_config=config) as mesh:
        for node in ("a", "b"):
            await mesh.agent(node, gpus=4)
        ids = [
            await mesh.submit(
                gpus=int(draw.integers(1, 5)), cores=1, expected_duration=duration(float(draw.integers(100, 1000)))
            )
            for _ in range(7)
        ]

        async def settled() -> bool:
            jobs = [await mesh.job(job_id) for job_id in ids]
            started = [job for job in jobs if job.HasField("refusal")]
            return all(job.refusal.code != "NOT_YET_CONSIDERED" for job in started) and any(started)

        await eventually(settled, seconds=5)
        waits, told = "", pb.ExplainJobResponse()

        async def named_somebody() -> bool:
            """Read one picture: between two reads a job may start, or stop for another."""
            nonlocal waits, told
            waits = [job_id for job_id in ids if (await mesh.job(job_id)).HasField("refusal")][-1]
            told = await explained(mesh, waits)
            return bool(told.ahead or told.ending)

        await eventually(named_somebody, seconds=10)
        named = {job.job_id for job in told.ahead} | {job.job_id for job in told.ending}
        assert told.ahead_count + told.forecast.ending_count >= len(named)
        assert waits not in named
        for job_id in sorted(named):
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
        await mesh.reach(waits, "RUNNING")
