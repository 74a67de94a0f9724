"""A launch that fails before the user's program is executed costs the job nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.job_events import kind_of
from cotenant.services.queue.jobs import launch_failures
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

READ_ONLY = "memory control group: Read-only file system"
NO_DIRECTORY = "the working directory /data/carol does not exist"
DIRECTORY = job_pb2.LAUNCH_CAUSE_WORKING_DIRECTORY


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def story(mesh: Mesh, job_id: str) -> list[str]:
    explained: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return [f"{kind_of(event)} {event.detail}" for event in explained.events]


async def two_nodes_of_which_the_first_tried_cannot_launch(
    mesh: Mesh, reason: str = READ_ONLY, cause: job_pb2.LaunchCause.ValueType = job_pb2.LAUNCH_CAUSE_CGROUP
) -> list[str]:
    """Add two nodes; the returned list gets the first node that is tried, which cannot launch."""
    sick: list[str] = []

    def refuse(order: agent_pb2.Assignment) -> str:
        node_id = order.allocation.node_id
        sick[:] = sick or [node_id]
        return reason if node_id in sick else ""

    for node_id in ("n1", "n2"):
        agent = await mesh.agent(node_id)
        agent.launch_cause, agent.cannot_launch = cause, refuse
    return sick


async def test_a_launch_failure_moves_the_job_at_no_cost(mesh: Mesh) -> None:
    sick = await two_nodes_of_which_the_first_tried_cannot_launch(mesh)
    job_id = await mesh.submit(gpus=1)
    job = await mesh.reach(job_id, "RUNNING")
    assert [part.node_id for part in job.attempt.allocations] == list({"n1", "n2"}.difference(sick))
    assert (job.failures, job.launch_failures, len(job.past_attempts)) == (0, 1, 0)
    assert [one.node_id for one in job.avoided_nodes] == sick
    told = await story(mesh, job_id)
    assert f"not_launched on {sick[0]}: {READ_ONLY}; tried elsewhere" in told
    assert not [line for line in told if line.startswith("failed")]


async def test_a_launch_failure_of_one_node_requeues_the_gang(mesh: Mesh) -> None:
    for node_id in ("n1", "n2", "n3"):
        await mesh.agent(node_id, gpus=2, cores=8)
    mesh.agents["n2"].cannot_launch = lambda order: READ_ONLY
    gang = await mesh.submit(gpus=2, replicas=2)
    job = await mesh.reach(gang, "RUNNING")
    assert sorted(part.node_id for part in job.attempt.allocations) == ["n1", "n3"]
    assert job.failures == 0
    (stop,) = [order for agent in mesh.agents.values() for order in agent.stops]
    assert stop.reason == job_pb2.STOP_REASON_GANG_BROKEN


async def test_a_failure_caused_by_an_unlaunched_peer_does_not_fail_the_job(mesh: Mesh) -> None:
    for node_id in ("n1", "n2"):
        await mesh.agent(node_id, gpus=2, cores=8)
    for agent in mesh.agents.values():
        agent.answers_assignments = False
    gang = await mesh.submit(gpus=2, replicas=2)
    one, two = mesh.agents.values()
    await until(lambda: (gang, 1) in one.assignments and (gang, 1) in two.assignments)
    one.report((gang, 1), job_pb2.ATTEMPT_STATE_FAILED, 1)
    two.refuse((gang, 1), READ_ONLY)
    await until(lambda: (gang, 1) in one.acked and (gang, 1) in two.acked)
    job = await mesh.job(gang)
    assert (job.failures, job.launch_failures) == (0, 1)
    assert job.attempt.state != job_pb2.ATTEMPT_STATE_FAILED


async def test_a_launched_attempt_cannot_become_unlaunched(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit(gpus=1)
    await mesh.reach(job_id, "RUNNING")
    agent.refuse((job_id, 1), READ_ONLY)
    job = await mesh.reach(job_id, "FAILED")
    assert job.attempt.state == job_pb2.ATTEMPT_STATE_FAILED


async def test_a_working_directory_missing_on_one_node_is_tried_on_another(mesh: Mesh) -> None:
    lacks = await two_nodes_of_which_the_first_tried_cannot_launch(mesh, NO_DIRECTORY, DIRECTORY)
    job = await mesh.reach(await mesh.submit(gpus=1), "RUNNING")
    assert [part.node_id for part in job.attempt.allocations] == list({"n1", "n2"}.difference(lacks))


async def test_a_working_directory_missing_on_all_nodes_fails_the_job(mesh: Mesh) -> None:
    for node_id in ("n1", "n2"):
        agent = await mesh.agent(node_id)
        agent.launch_cause, agent.cannot_launch = DIRECTORY, lambda order: NO_DIRECTORY
    job = await mesh.reach(await mesh.submit(gpus=1), "FAILED")
    assert NO_DIRECTORY in job.phase_reason
    assert {one.node_id for one in job.avoided_nodes} == {"n1", "n2"}


@pytest.mark.parametrize("cause", [DIRECTORY, job_pb2.LAUNCH_CAUSE_ENVIRONMENT])
def test_a_job_fails_after_too_many_nodes_without_what_it_needs(cause: job_pb2.LaunchCause.ValueType) -> None:
    job = job_pb2.Job()
    for number in range(launch_failures.DIRECTORY_NODES_MAX - 1):
        job.attempt.launch_failure.CopyFrom(job_pb2.LaunchFailure(cause=cause, node_id=f"n{number}"))
        assert launch_failures.can_launch_elsewhere(job, now=0.0)
        launch_failures.avoid_node(job, now=0.0)
    job.attempt.launch_failure.node_id = "another"
    assert not launch_failures.can_launch_elsewhere(job, now=0.0)


def test_an_unknown_submitter_is_retried_at_growing_intervals() -> None:
    job = job_pb2.Job()
    job.attempt.launch_failure.CopyFrom(job_pb2.LaunchFailure(cause=job_pb2.LAUNCH_CAUSE_USER, node_id="n1"))
    waits = []
    for _ in range(8):
        waits.append(launch_failures.wait_seconds(job, now=0.0))
        launch_failures.avoid_node(job, now=0.0)
    assert waits == [0, 30, 60, 120, 240, 480, 600, 600]


async def test_an_unknown_submitter_waits_longer_each_time_and_holds_no_node(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    agent.launch_cause, agent.cannot_launch = job_pb2.LAUNCH_CAUSE_USER, lambda order: "this node has no user 'carol'"
    job_id = await mesh.submit(gpus=1)
    job = await mesh.refused(job_id, "BACK_OFF")
    assert (job.failures, job.launch_failures) == (0, 2)
    assert (await mesh.node("n1")).state == node_pb2.NODE_STATE_READY


async def test_a_held_gpu_does_not_make_the_job_avoid_its_node(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit(gpus=1)
    await mesh.reach(job_id, "RUNNING")
    agent.fail((job_id, 1), "RuntimeError: CUDA error: uncorrectable ECC error encountered", signs=["xid 48 on GPU-1"])
    job = await mesh.reach(job_id, "QUEUED", lambda job: job.attempt.number == 1)
    assert job.attempt.failure.blame == job_pb2.FAILURE_BLAME_INFRASTRUCTURE
    assert not job.avoided_nodes


async def test_what_a_launch_is_fetching_is_explained_until_it_is_there(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    agent.answers_assignments = False
    job_id = await mesh.submit(gpus=1)
    await mesh.reach(job_id, "STARTING")

    def tell(phrase: str) -> None:
        report = agent_pb2.ProgressReport(job_id=job_id, number=1, progress=job_pb2.Progress(launch=phrase))
        agent.send(progress=[report])

    async def summary() -> str:
        explained: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
        return explained.summary

    async def says(words: str) -> bool:
        return words in await summary()

    tell("n1 is fetching its folder: 1.2 of 3.4 GB")
    await eventually(lambda: says("attempt 1; n1 is fetching its folder: 1.2 of 3.4 GB"))
    tell("")

    async def is_over() -> bool:
        return "fetching" not in await summary()

    await eventually(is_over)
