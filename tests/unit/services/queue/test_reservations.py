"""A starving gang gets a reservation, over the real mesh: its start is known, and no other job takes its places."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.services.mesh import WAIT_SECONDS, Mesh, running

from cotenant.codec.specs import duration
from cotenant.core.scheduling.admission import Rules
from cotenant.services.queue.api.server import QueueConfig
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

SOON = QueueConfig(options={"fifo": {"mode": "backfill"}}, rules=Rules(reserve_after_seconds=0.2))


async def reserved(mesh: Mesh, job_id: str) -> job_pb2.Job:
    """Wait until a job has a reservation."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            if "reserved" in (job := await mesh.job(job_id)).refusal.detail:
                return job
            await asyncio.sleep(0.01)


async def test_a_starving_gang_gets_a_reservation_and_is_not_overtaken() -> None:
    async with running(queue_config=SOON) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        first = await mesh.submit(gpus=3, expected_duration=duration(1000))
        await mesh.reach(first, "RUNNING")
        gang = await mesh.submit(gpus=2, replicas=2)
        waiting = await reserved(mesh, gang)
        assert "reserved: estimated start in 17 min" in waiting.refusal.detail
        assert 900 < waiting.refusal.numbers["reserved_start_seconds"] <= 1000
        assert (await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=gang))).summary.count("estimated start in") == 1
        small = await mesh.submit(gpus=1)
        held_back = await mesh.refused(small, "RESERVED")
        assert f"are reserved for {gang}, which has waited for" in held_back.refusal.detail
        assert f"{gang} starts" in held_back.refusal.remedy
        told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=small))
        assert told.forecast.start.ToTimedelta().total_seconds() > 900, "what is free now is not promised to it"
        told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=gang))
        assert told.forecast.start.ToTimedelta().total_seconds() == pytest.approx(1000, abs=100)
        short = await mesh.submit(gpus=1, expected_duration=duration(60))
        await mesh.reach(short, "RUNNING")
        await mesh.restart("queue", "placement")
        await reserved(mesh, gang)
        for job_id in (first, short):
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
        await mesh.reach(gang, "RUNNING")
        await mesh.refused(small, "CAPACITY")


async def test_a_reservation_holds_on_every_page_of_a_cycle() -> None:
    """More jobs of different classes wait than fit on a page; none of them may pass."""
    async with running(queue_config=SOON) as mesh:
        await mesh.agent("n1", gpus=4, cores=200)
        first = await mesh.submit(gpus=3, cores=3, expected_duration=duration(1000))
        await mesh.reach(first, "RUNNING")
        gang = await mesh.submit(gpus=4, cores=4)
        await reserved(mesh, gang)
        others = [await mesh.submit(gpus=1, cores=1 + number) for number in range(80)]
        await asyncio.gather(*(mesh.refused(other, "RESERVED") for other in others))
