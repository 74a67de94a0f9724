"""Gangs that wait for one server, over the real mesh: each relaxes after its time, and its refusal says when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tests.unit.services.mesh import QUICK, Mesh, running

from cotenant.cli import views
from cotenant.codec import specs
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

HALF_TAKEN = ("n1", "n2")


@asynccontextmanager
async def half_taken(**options: str) -> AsyncIterator[Mesh]:
    """Add two nodes of 4 GPUs, half of each held by a single job."""
    placement = replace(QUICK, placement="locality", options={"locality": options})
    async with running(placement_config=placement) as mesh:
        for node_id in HALF_TAKEN:
            await mesh.agent(node_id, gpus=4, cores=24)
            await mesh.reach(await mesh.submit(gpus=3), "RUNNING")
        yield mesh


async def test_a_gang_relaxes_from_one_server_to_two_nodes() -> None:
    async with half_taken(server_seconds="1.5") as mesh:
        gang = await mesh.submit(gpus=1, replicas=2)
        waiting = await mesh.refused(gang, "FRAGMENTED")
        assert waiting.refusal.detail.endswith("relaxes to anywhere in 2 s")
        assert 0 < specs.seconds(waiting.refusal.holds) <= 1.5
        told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=gang))
        assert "relaxes to anywhere in" in told.summary
        assert views.reason_view(told.job.refusal)["locality"] == "server"
        job = await mesh.reach(gang, "RUNNING")
        assert {part.node_id for part in job.attempt.allocations} == set(HALF_TAKEN)
        waited = specs.seconds(job.attempt.assign_time) - specs.seconds(job.create_time)
        assert 1.5 <= waited < 4


async def test_each_job_of_a_class_relaxes_by_its_own_wait() -> None:
    async with half_taken(server_seconds="1.5") as mesh:
        await mesh.agent("n3", gpus=1, cores=24)
        first = await mesh.submit(gpus=1, replicas=2)
        waiting = await mesh.refused(first, "FRAGMENTED")
        second = await mesh.submit(gpus=1, replicas=2)
        later = await mesh.refused(second, "FRAGMENTED")
        assert specs.seconds(waiting.refusal.holds) <= 1.5
        assert specs.seconds(later.refusal.holds) <= 1.5
        await mesh.reach(first, "RUNNING")
        still = await mesh.refused(second, "CAPACITY")
        assert still.phase == job_pb2.JOB_PHASE_QUEUED


async def test_a_gang_that_insists_on_one_server_never_relaxes() -> None:
    async with half_taken(server_seconds="0.05") as mesh:
        gang = await mesh.submit(gpus=1, replicas=2, locality=job_pb2.LOCALITY_SERVER)
        waiting = await mesh.refused(gang, "FRAGMENTED")
        assert not waiting.refusal.HasField("holds")
        other = await mesh.submit(gpus=1, replicas=2)
        await mesh.reach(other, "RUNNING")
        await mesh.refused(gang, "CAPACITY")
