"""Reasons are true: without the named obstacle a waiting job starts, or waits for something else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.mesh import BACKFILL, LAS, Mesh, eventually, running

from cotenant.codec.specs import duration
from cotenant.conformance.worlds import rng
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.scheduling.cycle import place
from cotenant.policies.locality import WaitsForLocality
from cotenant.services.queue.api.server import QueueConfig
from cotenant.v1 import job_service_pb2 as pb


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
