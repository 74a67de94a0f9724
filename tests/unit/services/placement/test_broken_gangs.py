"""Why a gang broke is still known after placement changes its leader, whose memory of ended parts is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.unit.services.mesh import Mesh, running, until

from cotenant.v1 import job_pb2


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


@pytest.mark.parametrize("end", ["lost", "failed", "not launched"])
async def test_a_broken_gang_ends_alike_under_the_next_leader(mesh: Mesh, end: str) -> None:
    one, other = await mesh.agent("n1", gpus=1), await mesh.agent("n2", gpus=1)
    gang = await mesh.submit(replicas=2, retries_max=1)
    await mesh.reach(gang, "RUNNING")
    other.refuses_to_stop = True
    if end == "lost":
        await one.stop()
        one.forget()
        one.start()
    else:
        state = job_pb2.ATTEMPT_STATE_FAILED if end == "failed" else job_pb2.ATTEMPT_STATE_NOT_LAUNCHED
        if end == "not launched":  # as if its agent had not said that it runs
            mesh.parts["placement"].service.cluster.attempts[gang].parts.pop("n1")
        one.report((gang, 1), state, 9, output_tail="giving up\n")
    await mesh.reach(gang, "STOPPING")
    one.forget()
    await mesh.restart("placement")
    await until(lambda: "n1" in mesh.parts["placement"].service.cluster.attempts[gang].parts)
    other.end((gang, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    job = await mesh.reach(gang, "RUNNING", lambda job: job.attempt.number == 2)
    ends = [attempt.state for attempt in job.past_attempts]
    expected = {"lost": [job_pb2.ATTEMPT_STATE_LOST], "failed": [job_pb2.ATTEMPT_STATE_FAILED], "not launched": []}
    assert (ends, job.failures) == (expected[end], 1 if end == "failed" else 0)
    assert job.launch_failures == (1 if end == "not launched" else 0)
    if end == "failed":
        assert job.past_attempts[0].failure.evidence == "giving up"


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_stop_that_was_ordered_but_not_recorded_is_not_a_failure(mesh: Mesh, replicas: int) -> None:
    """The leader that ordered it lost its office before the stop was written, as with a full store."""
    one, other = await mesh.agent("n1", gpus=1), await mesh.agent("n2", gpus=1)
    job_id = await mesh.submit(replicas=replicas, retries_max=0)
    job = await mesh.reach(job_id, "RUNNING")
    (node_id, *_) = [part.node_id for part in job.attempt.allocations]
    other.refuses_to_stop = one.refuses_to_stop = True
    stopped, running_on = (one, other) if node_id == "n1" else (other, one)
    stopped.report((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED, stop_reason=job_pb2.STOP_REASON_CONTENTION)
    if replicas == 2:
        await until(lambda: bool(running_on.stops))
        assert running_on.stops[0].reason == job_pb2.STOP_REASON_CONTENTION
        running_on.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert (job.failures, job.migrations) == (0, 1)
    assert job.past_attempts[0].stop_reason == job_pb2.STOP_REASON_CONTENTION
