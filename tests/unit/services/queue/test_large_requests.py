"""Large jobs and requests: nothing fails for its size alone, and nothing blocks the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.services.mesh import Mesh, running, spec
from tests.verification.fuzz.calls import recount
from tests.verification.fuzz.inflater import PATTERNS
from tests.verification.fuzz.loop_lag import LoopLag

from cotenant.codec import errors
from cotenant.internal.v1 import placement_service_pb2 as placement_pb
from cotenant.rpc.paging import PAGE_BYTES_MAX
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

ENVIRONMENT_BYTES = 60_000


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as made:
        yield made


def large(count: int, gpus: float = 1) -> array_pb.CreateArrayRequest:
    """Return an array of jobs with large environments."""
    request = array_pb.CreateArrayRequest(spec=spec(gpus=gpus, cores=1))
    request.spec.environment["FILL"] = "x" * ENVIRONMENT_BYTES
    request.spec.array.ranges.add(first=0, last=count - 1, step=1)
    return request


async def test_a_page_of_large_jobs_ends_early_with_a_token(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1, run_seconds=1000)
    await mesh.arrays.CreateArray(large(100))
    seen: list[str] = []
    token = ""
    while True:
        page = await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=1000, page_token=token, view=pb.JOB_VIEW_FULL))
        assert page.ByteSize() < PAGE_BYTES_MAX + 2 * ENVIRONMENT_BYTES
        assert page.total_size == 100
        seen += [job.id for job in page.jobs]
        if not (token := page.next_page_token):
            break
    assert (len(seen), sorted(seen, reverse=True)) == (100, seen)


async def test_many_large_jobs_are_placed_and_explained(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=8, cores=200, run_seconds=0.05)
    await mesh.arrays.CreateArray(large(150))
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1)), timeout=60)
    assert answer.position
    await mesh.all_ended()


async def test_a_plan_that_names_a_job_twice_is_refused(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=4)
    candidates = [placement_pb.Candidate(job_id="a", number=1, spec=spec(gpus=1)) for _ in range(2)]
    candidates[1].spec.roles.add(name="ps", replicas=1).resources.cores = 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.plans.PlanPlacement(placement_pb.PlanPlacementRequest(candidates=candidates))
    assert errors.from_error(refused.value).message == "candidates[1].job_id: 'a' is a duplicate"
    assert list(recount(mesh)) == []


async def test_slow_patterns_do_not_block_the_event_loop(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    lag = LoopLag()
    request = pb.SimulateJobRequest(spec=spec(gpus=1))
    for number in range(40):
        one = request.more.add()
        one.CopyFrom(spec(gpus=1))
        one.progress.regex = f"{PATTERNS[number % 2][:1000]}|(?i)[\\x00-\\x7f]{{{number}}}"
    with lag.watching():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.jobs.SimulateJob(request)
        assert lag.finding() == ""
    assert "progress.regex" in errors.from_error(refused.value).message


@pytest.mark.deep
async def test_pages_and_filters_do_not_block_the_event_loop(mesh: Mesh) -> None:
    lag = LoopLag()
    for _ in range(2):
        request = array_pb.CreateArrayRequest(spec=spec(gpus=1))
        request.spec.array.ranges.add(first=0, last=9_999, step=1)
        await mesh.arrays.CreateArray(request, timeout=60)
    with lag.watching():
        for wanted in (
            pb.JobFilter(node_id="n1"),
            pb.JobFilter(name="other"),
            pb.JobFilter(labels={"a": "b"}),
            pb.JobFilter(phases=[job_pb2.JOB_PHASE_QUEUED]),
        ):
            await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=1000, filter=wanted), timeout=30)
            assert lag.finding() == "", wanted
            await mesh.arrays.ListArrays(array_pb.ListArraysRequest(page_size=1000, filter=wanted), timeout=30)
            assert lag.finding() == "", wanted
        await mesh.jobs.SummarizeFailures(pb.SummarizeFailuresRequest(), timeout=30)
        assert lag.finding() == ""
