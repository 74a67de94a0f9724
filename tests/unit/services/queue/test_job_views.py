"""Views of jobs, and pages that every gRPC client accepts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec import errors
from cotenant.v1 import job_pb2, job_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb

ENVIRONMENT_BYTES = 120_000
LARGE = 45
CLIENT_BYTES_MAX = 4 * 2**20  # what gRPC clients receive by default


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def large_spec() -> job_pb2.JobSpec:
    """Return a spec with all that the BASIC view leaves out."""
    large = spec(environment={"FILL": "x" * 1000}, command=["python3", "train.py"], name="large")
    large.roles[0].command.extend(["python3", "worker.py"])
    large.submit_directory.path, large.submit_directory.environment["PATH"] = "/data/ann", "/usr/bin"
    return large


def omitted(job: job_pb2.Job) -> list[bool]:
    spec = job.spec
    parts = (spec.environment, spec.command, spec.roles[0].command, spec.submit_directory.environment)
    return [not part for part in (*parts, job.past_attempts)]


async def test_lists_and_watches_leave_out_what_is_large_unless_asked(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    created: pb.CreateJobResponse = await mesh.jobs.CreateJob(
        pb.CreateJobRequest(spec=job_pb2.JobSpec.FromString(large_spec().SerializeToString()))
    )
    job_id = created.job.id
    mesh.parts["queue"].service.state.records[job_id].stored.job.past_attempts.add(number=1)
    await mesh.reach(job_id, "RUNNING")

    async def told(view: pb.JobView.ValueType) -> list[job_pb2.Job]:
        got = await mesh.jobs.GetJob(pb.GetJobRequest(id=job_id, view=view))
        (listed,) = (await mesh.jobs.ListJobs(pb.ListJobsRequest(view=view))).jobs
        watch = mesh.jobs.WatchJobs(pb.WatchJobsRequest(view=view))
        (watched,) = (await anext(aiter(watch))).jobs
        watch.cancel()
        return [got.job, listed, watched]

    full = await told(pb.JOB_VIEW_FULL)
    assert [omitted(job) for job in full] == [[False] * 5] * 3
    basic = await told(pb.JOB_VIEW_BASIC)
    assert [omitted(job) for job in basic] == [[True] * 5] * 3
    assert [any(omitted(job)) for job in await told(pb.JOB_VIEW_UNSPECIFIED)] == [False, True, True]
    for job in basic:
        assert (job.spec.name, job.spec.submit_directory.path, job.attempt.number) == ("large", "/data/ann", 1)
    agent.finish((job_id, 1))


async def test_an_unknown_view_is_refused_with_all_other_mistakes(mesh: Mesh) -> None:
    asked = pb.ListJobsRequest(view=9, page_size=-1, page_token="?")  # type: ignore[arg-type]  # 9 is none
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.ListJobs(asked)
    found = errors.from_error(refused.value).violations
    assert [one.field for one in found] == ["view", "page_size", "page_token"]
    for call in (
        mesh.jobs.GetJob(pb.GetJobRequest(id="x", view=9)),  # type: ignore[arg-type]  # 9 is none
        anext(aiter(mesh.jobs.WatchJobs(pb.WatchJobsRequest(view=9)))),  # type: ignore[arg-type]  # likewise
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert "view: 9 is not a JobView" in errors.from_error(refused.value).message


async def test_a_stock_client_lists_many_large_jobs(mesh: Mesh) -> None:
    """45 jobs with 120 KB of environment, by a channel with default options: it refuses messages above 4 MiB."""
    ids = set()
    for number in range(LARGE):
        ids.add(await mesh.submit(name=f"job {number}", environment={"FILL": "x" * ENVIRONMENT_BYTES}))

    def read() -> list[pb.ListJobsResponse]:
        pages: list[pb.ListJobsResponse] = []
        token = ""
        with grpc.insecure_channel(f"127.0.0.1:{mesh.ports['queue']}") as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            while not pages or token:
                request = pb.ListJobsRequest(page_size=1000, page_token=token, view=pb.JOB_VIEW_FULL)
                pages.append(stub.ListJobs(request, timeout=60))
                token = pages[-1].next_page_token
        return pages

    pages = await asyncio.to_thread(read)
    assert sum(page.ByteSize() for page in pages) > LARGE * ENVIRONMENT_BYTES > CLIENT_BYTES_MAX
    assert all(page.ByteSize() < CLIENT_BYTES_MAX and page.total_size == LARGE for page in pages)
    seen = [job.id for page in pages for job in page.jobs]
    assert (len(seen), set(seen)) == (LARGE, ids)
    (page,) = [await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=1000))]
    assert (len(page.jobs), page.next_page_token) == (LARGE, "")  # BASIC: on one page
