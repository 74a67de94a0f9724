"""Migration on request, and node avoidance."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.services.mesh import Mesh, again, reason, running

from cotenant.codec.errors import from_error
from cotenant.codec.job_events import kind_of
from cotenant.codec.specs import duration, seconds
from cotenant.services.queue.jobs.node_avoidance import AVOIDED_MAX, active, avoid, expires_seconds
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def on(job: job_pb2.Job) -> list[str]:
    return [part.node_id for part in job.attempt.allocations]


async def move(mesh: Mesh, job_id: str, number: int = 1, **fields: object) -> job_pb2.Job:
    request = pb.MoveJobRequest(id=job_id, number=number, **fields)  # type: ignore[arg-type]  # as the message has them
    response: pb.MoveJobResponse = await mesh.jobs.MoveJob(request)
    return response.job


async def begun(mesh: Mesh, *names: str, **fields: int) -> tuple[str, str]:
    """Return a job that runs on the first of some nodes of 2 GPUs."""
    first, *others = names
    await mesh.agent(first, gpus=2, cores=8)
    job_id = await mesh.submit(cores=1, **fields)
    await mesh.reach(job_id, "RUNNING")
    for name in others:
        await mesh.agent(name, gpus=2, cores=8)
    return job_id, first


async def test_a_job_migrates_without_counting_as_a_failure(mesh: Mesh) -> None:
    job_id, first = await begun(mesh, "n1", "n2")
    await move(mesh, job_id, reason="it starves the service beside it")
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert on(job) == ["n2"]
    assert (job.migrations, job.failures, job.preemptions) == (1, 0, 0)
    (avoided,) = job.avoided_nodes
    assert (avoided.node_id, avoided.reason) == (first, "it starves the service beside it")
    assert 3500 < seconds(avoided.until) - time.time() <= 3600
    (order,) = mesh.agents["n1"].stops
    assert order.reason == job_pb2.STOP_REASON_CONTENTION
    assert job.past_attempts[0].stop_detail == "it starves the service beside it"
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    story = [(kind_of(event), event.detail) for event in told.events][3:]
    assert story[0] == ("migration_requested", "it starves the service beside it")
    assert story[2] == ("migrated", "it starves the service beside it")


async def test_a_migrated_job_waits_for_other_nodes_and_says_why(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    other = await mesh.submit(gpus=2, cores=1)
    assert on(await mesh.reach(other, "RUNNING")) == ["n2"]
    await move(mesh, job_id)
    job = await mesh.refused(job_id, "CAPACITY")
    assert job.refusal.detail == "needs 1 GPU, 0 of 2 free; it avoids 1 server: n1"
    assert job.refusal.numbers["avoided_nodes"] == 1
    like_it = await mesh.submit(cores=1)
    assert on(await mesh.reach(like_it, "RUNNING")) == ["n1"], "no other job avoids n1"
    mesh.agents["n2"].finish((other, 1))
    assert on(await mesh.reach(job_id, "RUNNING")) == ["n2"]


async def test_a_job_returns_when_avoidance_expires_without_other_events(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    other = await mesh.submit(gpus=2, cores=1)
    await mesh.reach(other, "RUNNING")
    await move(mesh, job_id, avoid=duration(1.0))
    await mesh.refused(job_id, "CAPACITY")
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert on(job) == ["n1"]
    assert not job.avoided_nodes


async def test_a_job_returns_to_an_avoided_node_if_no_other_could_hold_it(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1")
    await move(mesh, job_id)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert on(job) == ["n1"]
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    assert "attempt 2 on n1; no other node could hold it, so it no longer avoids n1" in [
        event.detail for event in told.events
    ]


async def test_moving_an_ended_attempt_is_refused(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    for number in (2, 7):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await move(mesh, job_id, number)
        assert reason(caught.value) == "ATTEMPT_OVER"
        assert f"attempt {number} of job {job_id} holds no resources" in str(from_error(caught.value))
        assert "is running, attempt 1" in str(from_error(caught.value))
    waiting = await mesh.submit(gpus=2, replicas=2)
    with pytest.raises(grpc.aio.AioRpcError, match="the job is queued"):
        await move(mesh, waiting)
    assert not mesh.agents["n1"].stops
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    await mesh.reach(job_id, "CANCELLED")
    with pytest.raises(grpc.aio.AioRpcError, match="already ended: cancelled"):
        await move(mesh, job_id)


async def test_a_repeated_call_migrates_a_job_once(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    await move(mesh, job_id, request_id="once")
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    job = await move(mesh, job_id, request_id="once")
    assert (job.attempt.number, job.migrations) == (2, 1)
    assert not mesh.agents["n2"].stops


async def test_a_repeat_orders_the_stop_that_placement_missed(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    await mesh.kill("placement")
    request = pb.MoveJobRequest(id=job_id, number=1, request_id="later")
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.jobs.MoveJob(request, timeout=1.0)
    await mesh.start("placement")
    await again(lambda: mesh.jobs.MoveJob(request))
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert on(job) == ["n2"]


async def test_every_invalid_field_of_a_move_request_is_named(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await move(mesh, job_id, -1, avoid=duration(-5.0), reason="a\nb")
    wrong = [violation.field for violation in from_error(caught.value).violations]
    assert wrong == ["number", "avoid", "reason"]
    assert not mesh.agents["n1"].stops


async def test_avoided_nodes_survive_a_queue_restart(mesh: Mesh) -> None:
    job_id, _ = await begun(mesh, "n1", "n2")
    other = await mesh.submit(gpus=2, cores=1)
    await mesh.reach(other, "RUNNING")
    await move(mesh, job_id)
    await mesh.refused(job_id, "CAPACITY")
    await mesh.restart("queue")
    assert [one.node_id for one in (await mesh.refused(job_id, "CAPACITY")).avoided_nodes] == ["n1"]


def test_only_the_newest_unexpired_avoided_nodes_are_kept_once_each() -> None:
    job = job_pb2.Job()
    for number in range(AVOIDED_MAX + 5):
        avoid(job, [f"n{number}", "again"], 60.0, "it failed there", 1000.0 + number)
    assert len(job.avoided_nodes) == AVOIDED_MAX
    assert [one.node_id for one in job.avoided_nodes].count("again") == 1
    assert job.avoided_nodes[-1].node_id == "again"
    assert [one.node_id for one in active(job, 1095.0)] == ["n36", "again"]
    assert expires_seconds(job, 1095.0) == 1.0
    avoid(job, ["never"], 0.0, "not at all", 1000.0)
    assert "never" not in [one.node_id for one in job.avoided_nodes]
