"""Attempts that reach their time limit: the user's failure, not retried, whatever happens around it."""

from __future__ import annotations

from functools import partial

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import Mesh, running, until

from cotenant.codec import errors, specs
from cotenant.codec.specs import duration
from cotenant.v1 import job_pb2, job_service_pb2

STOPPED, FAILED = job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.ATTEMPT_STATE_FAILED
TIME_LIMIT = job_pb2.STOP_REASON_TIME_LIMIT
MESSAGE = "reached its time limit of 2 h"


async def gang_on_two(mesh: Mesh) -> str:
    """A gang with a replica on each of two nodes."""
    for node_id in ("n1", "n2"):
        await mesh.agent(node_id, gpus=1)
    job_id = await mesh.submit(replicas=2, retries_max=3, time_limit=duration(7200))
    await mesh.reach(job_id, "RUNNING")
    return job_id


def expect_time_limit(job: job_pb2.Job) -> None:
    assert job.phase_reason == MESSAGE
    assert (job.attempt.number, job.attempt.state, job.attempt.stop_reason) == (1, STOPPED, TIME_LIMIT)
    assert (job.attempt.failure.failure_class, job.attempt.failure.blame) == (
        "time_limit",
        job_pb2.FAILURE_BLAME_USER,
    )


async def test_a_job_at_its_time_limit_fails_and_is_not_retried() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit(retries_max=3, time_limit=duration(7200))
        await mesh.reach(job_id, "RUNNING")
        agent.report((job_id, 1), STOPPED, stop_reason=TIME_LIMIT, message=MESSAGE, signs=["xid 48 on GPU-6f1c"])
        expect_time_limit(await mesh.reach(job_id, "FAILED"))


@pytest.mark.parametrize("first", ["n1", "n2"], ids=["the limit is reported first", "the failure is reported first"])
async def test_the_limit_of_one_replica_explains_why_others_failed(first: str) -> None:
    async with running() as mesh:
        job_id = await gang_on_two(mesh)
        for agent in mesh.agents.values():
            agent.refuses_to_stop = True
        for node_id in (first, "n1" if first == "n2" else "n2"):
            if node_id == "n1":
                mesh.agents["n1"].report((job_id, 1), STOPPED, stop_reason=TIME_LIMIT, message=MESSAGE)
            else:
                mesh.agents["n2"].report((job_id, 1), FAILED, code=1, message="rank 1 exited with status 1")
        expect_time_limit(await mesh.reach(job_id, "FAILED"))


async def test_the_other_replicas_are_stopped_for_the_same_reason() -> None:
    async with running() as mesh:
        job_id = await gang_on_two(mesh)
        mesh.agents["n1"].report((job_id, 1), STOPPED, stop_reason=TIME_LIMIT, message=MESSAGE)
        await until(lambda: bool(mesh.agents["n2"].stops))
        assert mesh.agents["n2"].stops[0].reason == TIME_LIMIT


def told(agent: SimulatedAgent) -> float | None:
    """The last limit that an agent was told, in seconds; None: no limit, 0: it was told nothing."""
    if not agent.time_limits:
        return 0
    last = agent.time_limits[-1]
    return last.time_limit.seconds if last.HasField("time_limit") else None


def all_told(mesh: Mesh, seconds: float | None) -> bool:
    """Whether the last limit that each agent was told is this one."""
    return all(told(agent) == seconds for agent in mesh.agents.values())


def limit_of(seconds: float | None) -> job_service_pb2.UpdateJobRequest:
    """A change of a time limit; the job's id is still to be set."""
    request = job_service_pb2.UpdateJobRequest()
    if seconds is not None:
        request.job.spec.time_limit.CopyFrom(duration(seconds))
    request.update_mask.paths.append("spec.time_limit")
    return request


async def test_the_time_limit_of_a_running_job_changes_on_all_of_its_nodes() -> None:
    async with running() as mesh:
        job_id = await gang_on_two(mesh)
        for seconds in (10_800.0, None):
            request = limit_of(seconds)
            request.job.id = job_id
            changed = (await mesh.jobs.UpdateJob(request)).job
            assert changed.spec.HasField("time_limit") is (seconds is not None)
            await until(partial(all_told, mesh, seconds))
        away = mesh.agents["n1"]
        await away.stop()
        away.time_limits.clear()
        away.start()
        await until(lambda: told(away) is None)  # an agent that was away hears of it


async def test_a_limit_that_a_job_has_reached_is_refused_with_what_it_has_run() -> None:
    async with running() as mesh:
        await mesh.agent("n1")
        job_id = await mesh.submit(time_limit=duration(7200))
        runs = await mesh.reach(job_id, "RUNNING")
        request = limit_of(0.001 + specs.seconds(runs.spec.grace))
        request.job.id = job_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.jobs.UpdateJob(request)
        (wrong,) = errors.from_error(caught.value).violations
        assert wrong.field == "spec.time_limit"
        assert wrong.description.startswith("must be longer: the job has run for ")
        waiting = await mesh.submit(gpus=4, time_limit=duration(7200))
        request.job.id = waiting
        assert (await mesh.jobs.UpdateJob(request)).job.spec.time_limit == request.job.spec.time_limit


async def test_a_cancelled_job_stays_cancelled_if_its_limit_comes_first() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit(time_limit=duration(7200))
        await mesh.reach(job_id, "RUNNING")
        agent.refuses_to_stop = True
        await mesh.jobs.CancelJob(job_service_pb2.CancelJobRequest(id=job_id))
        await until(lambda: bool(agent.stops))
        agent.report((job_id, 1), STOPPED, stop_reason=TIME_LIMIT, message=MESSAGE)
        await mesh.reach(job_id, "CANCELLED")
