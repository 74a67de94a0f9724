"""Arrays: all or nothing, running limits, and changes to the whole array."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import Mesh, again, eventually, running, spec, until

from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.job_array import read_array
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import ARRAYS, IdempotencyKey, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.removal_log import REMOVALS
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Committed, Compare, Conflict, Operation, Put
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

PAGE = 1000


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def wanted(text: str, **fields: Any) -> job_pb2.JobSpec:
    array = read_array(text)
    message = spec(**fields)
    for part in array.ranges:
        message.array.ranges.add(first=part.first, last=part.last, step=part.step)
    message.array.running_max = array.running_max
    return message


async def submit(mesh: Mesh, text: str, request_id: str = "", **fields: Any) -> str:
    request = array_pb.CreateArrayRequest(spec=wanted(text, **fields), request_id=request_id)
    answer = await again(lambda: mesh.arrays.CreateArray(request))
    return str(answer.array.id)


async def tasks(mesh: Mesh, array_id: str) -> dict[int, job_pb2.Job]:
    request = pb.ListJobsRequest(filter=pb.JobFilter(array_id=array_id), page_size=PAGE)
    jobs = (await mesh.jobs.ListJobs(request)).jobs
    return {job.spec.array_task.index: job for job in sorted(jobs, key=lambda job: job.spec.array_task.index)}


async def phases(mesh: Mesh, array_id: str) -> dict[str, int]:
    return counts((await mesh.arrays.GetArray(array_pb.GetArrayRequest(id=array_id))).array)


def counts(array: array_pb.Array) -> dict[str, int]:
    return {job_pb2.JobPhase.Name(one.phase).removeprefix("JOB_PHASE_"): one.count for one in array.phase_counts}


async def stand(mesh: Mesh, array_id: str, **wanted: int) -> None:
    async def so() -> bool:
        return await phases(mesh, array_id) == wanted

    await eventually(so)


async def refusal(call: Awaitable[Any]) -> str:
    """Return the reason of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_error(refused.value).reason


async def violations(call: Awaitable[Any]) -> list[str]:
    """Return the fields that a refused call names."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return [one.field for one in from_error(refused.value).violations]


def holding(agent: SimulatedAgent) -> list[str]:
    return [job_id for (job_id, _), one in agent.attempts.items() if one.state == job_pb2.ATTEMPT_STATE_RUNNING]


async def test_tasks_of_an_array_know_their_index(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    array_id = await submit(mesh, "1,3,8-9", gpus=1)
    found = await tasks(mesh, array_id)
    assert {index: job.id for index, job in found.items()} == {index: f"{array_id}_{index}" for index in (1, 3, 8, 9)}
    await stand(mesh, array_id, RUNNING=4)
    assigned = agent.assignments[f"{array_id}_8", 1].spec.array_task
    assert (assigned.array_id, assigned.index, assigned.count) == (array_id, 8, 4)
    agent.finish((f"{array_id}_3", 1), code=2)
    await stand(mesh, array_id, RUNNING=3, FAILED=1)
    assert (await tasks(mesh, array_id))[3].phase == job_pb2.JOB_PHASE_FAILED


async def test_the_running_limit_holds_and_waiting_tasks_say_so(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    most: list[int] = []
    agent.on_report = lambda report: most.append(len(holding(agent)))
    array_id = await submit(mesh, "0-5%2", gpus=1)
    await stand(mesh, array_id, RUNNING=2, QUEUED=4)
    assert sorted(holding(agent)) == [f"{array_id}_0", f"{array_id}_1"]
    told = (await tasks(mesh, array_id))[5].refusal
    assert told.code == "ARRAY_LIMIT"
    assert told.detail == f"array {array_id} runs at most 2 of its jobs at once: 2 hold resources, 4 wait"
    assert dict(told.numbers) == {"running_max": 2, "holding": 2, "waiting": 4}
    assert not [one for one in mesh.parts["queue"].service.state.table.ids if one.endswith(("_2", "_5"))]
    for _ in range(6):
        await until(lambda: bool(holding(agent)))
        agent.finish((holding(agent)[0], 1))
    await stand(mesh, array_id, SUCCEEDED=6)
    assert max(most) == 2
    assert [job_id for job_id, _ in agent.assignments] == [f"{array_id}_{index}" for index in range(6)]


async def test_the_running_limit_survives_restarts_and_priority_changes(mesh: Mesh) -> None:
    """Running tasks are not the first in order: that is the highest priority, then the lowest index."""
    agent = await mesh.agent("n1")
    array_id = await submit(mesh, "0-5%2", gpus=1)
    await stand(mesh, array_id, RUNNING=2, QUEUED=4)
    raised = pb.UpdateJobRequest(job=job_pb2.Job(id=f"{array_id}_5", spec=job_pb2.JobSpec(priority=9)))
    raised.update_mask.paths.append("spec.priority")
    await mesh.jobs.UpdateJob(raised)
    await mesh.restart("queue", "placement")
    await stand(mesh, array_id, RUNNING=2, QUEUED=4)
    agent.finish((f"{array_id}_1", 1))
    await mesh.reach(f"{array_id}_5", "RUNNING")
    await stand(mesh, array_id, RUNNING=2, QUEUED=3, SUCCEEDED=1)
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=f"{array_id}_5"))
    await mesh.reach(f"{array_id}_2", "RUNNING")
    await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=f"{array_id}_5"))
    await mesh.refused(f"{array_id}_5", "ARRAY_LIMIT")
    assert len(holding(agent)) == 2


async def test_arrays_are_cancelled_suspended_and_resumed_as_one(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=3)
    array_id = await submit(mesh, "0-149", gpus=1)
    await stand(mesh, array_id, RUNNING=3, QUEUED=147)
    suspend = array_pb.SuspendArrayRequest(id=array_id, request_id="s")
    suspended = (await mesh.arrays.SuspendArray(suspend)).array
    assert (suspended.id, counts(suspended)["SUSPENDED"]) == (array_id, 147)
    await stand(mesh, array_id, SUSPENDED=150)
    await mesh.arrays.ResumeArray(array_pb.ResumeArrayRequest(id=array_id))
    await stand(mesh, array_id, RUNNING=3, QUEUED=147)
    await mesh.arrays.SuspendArray(suspend)  # a repeat
    await stand(mesh, array_id, RUNNING=3, QUEUED=147)
    await mesh.arrays.CancelArray(array_pb.CancelArrayRequest(id=array_id))
    await stand(mesh, array_id, CANCELLED=150)
    ended = (await mesh.arrays.CancelArray(array_pb.CancelArrayRequest(id=array_id))).array
    assert counts(ended) == {"CANCELLED": 150}
    assert ended.end_time.ToNanoseconds() >= max(
        one.end_time.ToNanoseconds() for one in (await tasks(mesh, array_id)).values()
    )
    await mesh.arrays.SuspendArray(suspend)  # a repeat, after the end
    assert await refusal(mesh.arrays.SuspendArray(array_pb.SuspendArrayRequest(id=array_id))) == "ARRAY_ENDED"
    assert await refusal(mesh.arrays.ResumeArray(array_pb.ResumeArrayRequest(id=array_id))) == "ARRAY_ENDED"


async def test_dependents_wait_for_all_tasks_of_an_array(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    array_id = await submit(mesh, "0-2", gpus=1)
    job_id = await mesh.submit(dependencies=[job_pb2.Dependency(id=array_id)])
    await stand(mesh, array_id, RUNNING=3)
    assert (await mesh.job(job_id)).refusal.detail == f"waits for 1 job to succeed: {array_id} (3 running)"
    for index in range(3):
        agent.finish((f"{array_id}_{index}", 1))
    await mesh.reach(job_id, "RUNNING")
    second = await submit(mesh, "0-2", gpus=1, dependencies=[job_pb2.Dependency(id=job_id)])
    third = await submit(mesh, "0-2", gpus=1, dependencies=[job_pb2.Dependency(id=second)])
    agent.finish((job_id, 1))
    await stand(mesh, second, RUNNING=3)
    agent.finish((f"{second}_1", 1), code=1)
    await stand(mesh, third, CANCELLED=3)
    assert ": 2 running, 1 failed" in (await tasks(mesh, third))[0].phase_reason


async def test_bad_arrays_are_refused_with_their_fields(mesh: Mesh) -> None:
    large = wanted("0-9999", environment={"DATA": "x" * 10_000})
    none = spec()
    none.array.SetInParent()
    own = spec()
    own.array_task.array_id = "a"
    for message, fields in ((large, ["spec.array"]), (none, ["spec.array"]), (own, ["spec.array_task", "spec.array"])):
        assert await violations(mesh.arrays.CreateArray(array_pb.CreateArrayRequest(spec=message))) == fields
    assert await violations(mesh.jobs.CreateJob(pb.CreateJobRequest(spec=own))) == ["spec.array_task"]
    assert await mesh.records_left("queue/") == []


# All or none -------------------------------------------------------------------------------------------------


async def test_an_array_with_a_lost_answer_is_created_once(mesh: Mesh) -> None:
    request = array_pb.CreateArrayRequest(spec=wanted("0-249"), request_id="once")
    store = mesh.parts["queue"].store
    for transactions_before in range(4):  # three with the jobs, and the array's own
        request.request_id = f"once {transactions_before}"
        store.lose_answer_after = transactions_before
        first = await again(lambda: mesh.arrays.CreateArray(request))
        assert first.array.id == (await mesh.arrays.CreateArray(request)).array.id
        listed = await mesh.jobs.ListJobs(pb.ListJobsRequest())
        total = 250 * (transactions_before + 1)
        assert listed.total_size == total

        async def settled() -> bool:
            return len(await mesh.records_left("queue/jobs/")) == total  # noqa: B023  # waited for before the next turn

        await eventually(settled)
    await mesh.restart("queue")
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 1000
    assert len(await mesh.records_left("queue/arrays/")) == 4


async def test_an_unfinished_array_is_invisible_and_deleted(mesh: Mesh) -> None:
    store = mesh.parts["queue"].store
    store.cut_after = 2
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.arrays.CreateArray(array_pb.CreateArrayRequest(spec=wanted("0-249")), timeout=1.0)
    assert len(await mesh.records_left("queue/jobs/")) == 200
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 0
    await mesh.restart("queue")
    assert await mesh.records_left("queue/") == []


async def test_a_late_commit_of_an_array_fails_after_its_jobs_were_deleted() -> None:
    """Its transaction was in flight when it was taken for lost, and all of its jobs were deleted."""

    class Late(MemoryStore):
        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
            for put in (one for one in operations if isinstance(one, Put) and one.key.startswith(ARRAYS)):
                await arrays.job_store.array_recovery.settle(put.key.removeprefix(ARRAYS))
            return await super().transact(compares, operations)

    store, state = Late(), State()
    arrays = JobArrays(JobStore(store, state))
    job = JobSpec(roles=(Role(),), command=("true",), array=read_array("0-249"))
    with pytest.raises(Problem):
        await arrays.create(job, "somebody", "", IdempotencyKey("CreateArray", "once", b""))
    assert (await store.list("")).entries == ()
    assert not state.records


async def test_concurrent_calls_with_one_request_id_create_one_array(mesh: Mesh) -> None:
    request = array_pb.CreateArrayRequest(spec=wanted("0-149"), request_id="once")
    answers = await asyncio.gather(*(mesh.arrays.CreateArray(request) for _ in range(3)))
    assert len({answer.array.id for answer in answers}) == 1
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 150
    assert len(await mesh.records_left("queue/jobs/")) == 150


async def test_arrays_are_deleted_as_a_whole(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    array_id = await submit(mesh, "0-2", gpus=1, request_id="once")
    await stand(mesh, array_id, RUNNING=3)
    for index in (0, 1):
        agent.finish((f"{array_id}_{index}", 1))
    await stand(mesh, array_id, RUNNING=1, SUCCEEDED=2)
    service = mesh.parts["queue"].service
    service.retention._kept_max = 0
    await service.retention.sweep(time.time())
    assert len(await tasks(mesh, array_id)) == 3
    agent.finish((f"{array_id}_2", 1))
    await stand(mesh, array_id, SUCCEEDED=3)
    await service.retention.sweep(time.time())
    assert await mesh.records_left("queue/") == [f"{REMOVALS}{1:016d}"]
    assert await tasks(mesh, array_id) == {}
