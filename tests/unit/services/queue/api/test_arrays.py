"""The array API: arrays are created, read, listed and changed as a whole, by calls of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import Mesh, eventually, running, spec
from tests.unit.services.queue.test_shared_tenants import longest_piece

from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.job_array import COUNT_MAX, read_array
from cotenant.services.queue.api.array_pages import list_arrays
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import IdempotencyKey, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.store.memory import MemoryStore
from cotenant.v1 import array_service_pb2 as pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb

QUEUED, RUNNING, SUSPENDED = job_pb2.JOB_PHASE_QUEUED, job_pb2.JOB_PHASE_RUNNING, job_pb2.JOB_PHASE_SUSPENDED
ARRAYS, PIECE_SECONDS_MAX = 5, 0.02  # unsliced it takes 0.04
ATTEMPTS = 4


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def of(first: int, last: int, step: int = 1, running_max: int = 0) -> job_pb2.ArraySpec:
    return job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=first, last=last, step=step)], running_max=running_max)


async def read(mesh: Mesh, array_id: str) -> pb.Array:
    response: pb.GetArrayResponse = await mesh.arrays.GetArray(pb.GetArrayRequest(id=array_id))
    return response.array


async def listed(mesh: Mesh, **conditions: Any) -> list[str]:
    request = pb.ListArraysRequest(filter=jobs_pb.JobFilter(**conditions))
    response: pb.ListArraysResponse = await mesh.arrays.ListArrays(request)
    assert response.total_size == len(response.arrays)
    return [array.id for array in response.arrays]


async def refusal(call: Awaitable[Any]) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_error(refused.value)


# Create and read ---------------------------------------------------------------------------------------------


async def test_an_array_is_returned_as_it_was_submitted(mesh: Mesh) -> None:
    wanted = spec(name="sweep", gpus=1, array=of(0, 20, 2, running_max=3), labels={"team": "a"})
    created: pb.CreateArrayResponse = await mesh.arrays.CreateArray(pb.CreateArrayRequest(spec=wanted))
    array = created.array
    assert (array.spec.name, array.spec.labels["team"], array.spec.array) == ("sweep", "a", wanted.array)
    assert not array.spec.HasField("array_task")
    assert [(one.phase, one.count) for one in array.phase_counts] == [(QUEUED, 11)]
    assert (array.job_count, array.submitter, array.archived) == (11, "anyone", False)
    assert array.HasField("create_time")
    assert not array.HasField("end_time")
    assert await read(mesh, array.id) == array
    await mesh.restart("queue")
    assert await read(mesh, array.id) == array


async def test_an_array_ends_with_the_last_of_its_jobs(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    array_id = await mesh.submit_array(gpus=1, array=of(1, 2))
    for index in (1, 2):
        await mesh.reach(f"{array_id}_{index}", "RUNNING")
        assert not (await read(mesh, array_id)).HasField("end_time")
        agent.finish((f"{array_id}_{index}", 1), code=index - 1)
        await mesh.reach(f"{array_id}_{index}", "SUCCEEDED" if index == 1 else "FAILED")
    array = await read(mesh, array_id)
    ends = [(await mesh.job(f"{array_id}_{index}")).end_time.ToNanoseconds() for index in (1, 2)]
    assert array.end_time.ToNanoseconds() == max(ends)
    assert {job_pb2.JobPhase.Name(one.phase): one.count for one in array.phase_counts} == {
        "JOB_PHASE_SUCCEEDED": 1,
        "JOB_PHASE_FAILED": 1,
    }
    await mesh.restart("queue")
    assert (await read(mesh, array_id)).end_time == array.end_time


async def test_a_dry_run_creates_nothing(mesh: Mesh) -> None:
    request = pb.CreateArrayRequest(spec=spec(array=of(5, 9)), validate_only=True, request_id="once")
    array = (await mesh.arrays.CreateArray(request)).array
    assert (array.id, array.job_count, array.spec.array) == ("", 5, request.spec.array)
    assert [(one.phase, one.count) for one in array.phase_counts] == [(QUEUED, 5)]
    assert await mesh.records_left("queue/") == []


async def test_jobs_and_arrays_are_created_by_calls_of_their_own(mesh: Mesh) -> None:
    """An error names all other bad fields, too."""
    bad = spec(array=of(0, 3), retries_max=-1)
    told = await refusal(mesh.jobs.CreateJob(jobs_pb.CreateJobRequest(spec=bad)))
    assert [one.field for one in told.violations] == ["spec.array", "spec.retries_max"]
    assert "use CreateArray" in told.message
    told = await refusal(mesh.arrays.CreateArray(pb.CreateArrayRequest(spec=spec(retries_max=-1))))
    assert [one.field for one in told.violations] == ["spec.array", "spec.retries_max"]
    assert "use CreateJob" in told.message
    told = await refusal(mesh.arrays.CreateArray(pb.CreateArrayRequest(spec=spec(array=of(9, 1)))))
    assert told.message == "spec.array: has the range 9-1, which is empty"
    await mesh.arrays.CreateArray(pb.CreateArrayRequest(spec=spec(array=of(0, 1)), request_id="once"))
    told = await refusal(mesh.jobs.CreateJob(jobs_pb.CreateJobRequest(spec=spec(), request_id="once")))
    assert told.reason == "REQUEST_ID_REUSED"


async def test_a_call_of_the_wrong_kind_names_the_right_one(mesh: Mesh) -> None:
    array_id, job_id = await mesh.submit_array(array=of(4, 9)), await mesh.submit()
    for name, request in (
        ("Get", jobs_pb.GetJobRequest(id=array_id)),
        ("Cancel", jobs_pb.CancelJobRequest(id=array_id)),
        ("Suspend", jobs_pb.SuspendJobRequest(id=array_id)),
        ("Resume", jobs_pb.ResumeJobRequest(id=array_id)),
    ):
        told = await refusal(getattr(mesh.jobs, f"{name}Job")(request))
        assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "IS_ARRAY")
        call = f"call ArrayService.{name}Array, or name one of its jobs, such as {array_id}_4"
        assert told.message == f"{array_id} is an array of 6 jobs; {call}"
    told = await refusal(mesh.jobs.ExplainJob(jobs_pb.ExplainJobRequest(id=array_id)))
    assert (told.reason, "ArrayService" in told.message) == ("IS_ARRAY", False)
    for arrays_call, message in (
        (mesh.arrays.GetArray, pb.GetArrayRequest),
        (mesh.arrays.CancelArray, pb.CancelArrayRequest),
        (mesh.arrays.SuspendArray, pb.SuspendArrayRequest),
        (mesh.arrays.ResumeArray, pb.ResumeArrayRequest),
    ):
        call_any: Any = arrays_call
        for id_of_a_job in (job_id, f"{array_id}_4"):
            assert (await refusal(call_any(message(id=id_of_a_job)))).reason == "IS_JOB"
        told = await refusal(call_any(message(id=array_id[:-1])))
        assert (told.code, told.reason) == (grpc.StatusCode.NOT_FOUND, "ARRAY_NOT_FOUND")
        assert f"did you mean '{array_id}'?" in told.message
    assert [(one.phase, one.count) for one in (await read(mesh, array_id)).phase_counts] == [(QUEUED, 6)]


# Lists -------------------------------------------------------------------------------------------------------


async def test_arrays_are_listed_newest_first_page_by_page(mesh: Mesh) -> None:
    ids = [await mesh.submit_array(array=of(0, 2)) for _ in range(5)]
    await mesh.submit()
    found, token, pages = [], "", 0
    while pages == 0 or token:
        page = await mesh.arrays.ListArrays(pb.ListArraysRequest(page_size=2, page_token=token))
        found += [array.id for array in page.arrays]
        token, pages = page.next_page_token, pages + 1
        assert page.total_size == 5
    assert (found, pages) == (ids[::-1], 3)


async def test_an_array_matches_if_one_of_its_jobs_does(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    first = await mesh.submit_array(gpus=1, name="first", array=of(0, 2))
    await mesh.reach(f"{first}_0", "RUNNING")
    second = await mesh.submit_array(gpus=1, name="second", tenant="lab", labels={"team": "a"}, array=of(0, 2))
    await mesh.jobs.SuspendJob(jobs_pb.SuspendJobRequest(id=f"{second}_1"))
    renamed = jobs_pb.UpdateJobRequest(job=job_pb2.Job(id=f"{second}_2", spec=job_pb2.JobSpec(name="other")))
    renamed.update_mask.paths.append("spec.name")
    await mesh.jobs.UpdateJob(renamed)
    for conditions, matching in (
        ({"phases": [RUNNING]}, [first]),
        ({"phases": [SUSPENDED, RUNNING]}, [second, first]),
        ({"phases": [job_pb2.JOB_PHASE_FAILED]}, []),
        ({"phases": [77]}, []),  # of a newer client
        ({"tenant": "lab"}, [second]),
        ({"name": "other"}, [second]),
        ({"name": "other", "phases": [SUSPENDED]}, []),  # not the same job
        ({"labels": {"team": "a"}, "phases": [QUEUED]}, [second]),
        ({"node_id": "n1"}, [first]),
        ({"ids": [f"{first}_2", "nothing"]}, [first]),
        ({"array_id": second}, [second]),
        ({"array_id": second, "ids": [f"{first}_2"]}, []),
        ({"array_id": "nothing"}, []),
        ({"standalone_only": True}, []),
    ):
        assert await listed(mesh, **conditions) == matching, conditions


async def test_jobs_can_be_listed_without_the_tasks_of_arrays(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    await mesh.submit_array(array=of(0, 9))
    response = await mesh.jobs.ListJobs(jobs_pb.ListJobsRequest(filter=jobs_pb.JobFilter(standalone_only=True)))
    assert ([job.id for job in response.jobs], response.total_size) == ([job_id], 1)


async def test_bad_pages_are_refused(mesh: Mesh) -> None:
    for _ in range(2):
        await mesh.submit_array(array=of(0, 1))
    of_jobs = (await mesh.jobs.ListJobs(jobs_pb.ListJobsRequest(page_size=1))).next_page_token
    of_arrays = (await mesh.arrays.ListArrays(pb.ListArraysRequest(page_size=1))).next_page_token
    assert of_jobs
    assert of_arrays
    for request, field in (
        (pb.ListArraysRequest(page_size=-1), "page_size"),
        (pb.ListArraysRequest(page_token="nonsense"), "page_token"),
        (pb.ListArraysRequest(page_token=of_jobs), "page_token"),
        (pb.ListArraysRequest(page_token=of_arrays, filter=jobs_pb.JobFilter(name="x")), "page_token"),
    ):
        told = await refusal(mesh.arrays.ListArrays(request))
        assert [one.field for one in told.violations] == [field]
    told = await refusal(mesh.jobs.ListJobs(jobs_pb.ListJobsRequest(page_token=of_arrays)))
    assert [one.field for one in told.violations] == ["page_token"]


async def test_a_page_of_large_arrays_stays_below_what_clients_accept(mesh: Mesh) -> None:
    large = {f"V{number}": "x" * 30_000 for number in range(4)}
    ids = [await mesh.submit_array(environment=large, array=of(0, 1)) for _ in range(45)]
    found: list[str] = []
    token = ""
    while not found or token:
        page = await mesh.arrays.ListArrays(pb.ListArraysRequest(page_token=token))
        assert page.ByteSize() <= 4 * 2**20
        assert page.total_size == len(ids)
        found += [array.id for array in page.arrays]
        token = page.next_page_token
    assert found == ids[::-1]


@pytest.mark.deep
async def test_the_largest_arrays_are_listed_in_slices() -> None:
    state = State()
    arrays = JobArrays(JobStore(MemoryStore(), state))
    for _ in range(ARRAYS):
        every_other = JobSpec(roles=(Role(),), command=("true",), array=read_array(f"0-{2 * COUNT_MAX - 2}:2"))
        await arrays.create(every_other, "eve", "", IdempotencyKey("CreateArray", "", b""))
    for conditions, matching in (({}, ARRAYS), ({"name": "nothing"}, 0), ({"phases": [QUEUED]}, ARRAYS)):
        request, longest = pb.ListArraysRequest(filter=jobs_pb.JobFilter(**conditions)), list[float]()
        answer = await list_arrays(state, request)
        assert answer.total_size == matching
        assert [len(one.spec.array.ranges) for one in answer.arrays] == [1] * matching
        while len(longest) < ATTEMPTS and not (longest and longest[-1] < PIECE_SECONDS_MAX):
            for array in state.dependency_gate.arrays.values():
                array._indexed = 0  # as at the first time
            longest.append(await longest_piece(list_arrays(state, request)))
        assert min(longest) < PIECE_SECONDS_MAX


# Changes -----------------------------------------------------------------------------------------------------


async def test_an_etag_guards_against_changes_of_any_job(mesh: Mesh) -> None:
    array_id = await mesh.submit_array(array=of(0, 120))
    before = (await read(mesh, array_id)).etag
    await mesh.jobs.SuspendJob(jobs_pb.SuspendJobRequest(id=f"{array_id}_7"))
    for call, message in (
        (mesh.arrays.CancelArray, pb.CancelArrayRequest),
        (mesh.arrays.SuspendArray, pb.SuspendArrayRequest),
        (mesh.arrays.ResumeArray, pb.ResumeArrayRequest),
    ):
        call_any: Any = call
        told = await refusal(call_any(message(id=array_id, etag=before)))
        assert (told.code, told.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    fresh = (await read(mesh, array_id)).etag
    await mesh.restart("queue")
    assert (await read(mesh, array_id)).etag == fresh
    suspend = pb.SuspendArrayRequest(id=array_id, etag=fresh, request_id="once")
    array = (await mesh.arrays.SuspendArray(suspend)).array
    assert [(one.phase, one.count) for one in array.phase_counts] == [(SUSPENDED, 121)]
    assert (await mesh.arrays.SuspendArray(suspend)).array == array  # a repeat, although the etag is stale


async def test_ended_jobs_of_an_array_stay_as_they_are(mesh: Mesh) -> None:
    array_id = await mesh.submit_array(array=of(0, 2))
    await mesh.jobs.CancelJob(jobs_pb.CancelJobRequest(id=f"{array_id}_1"))
    etag = (await mesh.job(f"{array_id}_1")).etag
    await mesh.arrays.SuspendArray(pb.SuspendArrayRequest(id=array_id))
    await mesh.arrays.ResumeArray(pb.ResumeArrayRequest(id=array_id))
    array = (await mesh.arrays.CancelArray(pb.CancelArrayRequest(id=array_id))).array
    assert [one.count for one in array.phase_counts] == [3]
    assert (await mesh.job(f"{array_id}_1")).etag == etag


async def test_running_jobs_of_a_cancelled_array_are_stopped(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=2)
    array_id = await mesh.submit_array(gpus=1, array=of(0, 3))
    for index in (0, 1):
        await mesh.reach(f"{array_id}_{index}", "RUNNING")
    await mesh.arrays.CancelArray(pb.CancelArrayRequest(id=array_id))

    async def cancelled() -> bool:
        return [one.phase for one in (await read(mesh, array_id)).phase_counts] == [job_pb2.JOB_PHASE_CANCELLED]

    await eventually(cancelled)
