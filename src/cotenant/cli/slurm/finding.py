"""Finds jobs for the façade's commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.slurm.job_ids import INVALID
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.core.model.job_number import SEPARATOR, number_of
from cotenant.deferred import grpc
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JOB_VIEW_BASIC, GetJobRequest, JobFilter, JobView, ListJobsRequest

T = TypeVar("T")
PAGE_SIZE = 1000
IS_ARRAY = "IS_ARRAY"
_MISSING = ("NOT_FOUND", "INVALID_ARGUMENT")


def call(work: Callable[[Mesh], Awaitable[T]]) -> T:
    """Return the result of some unary calls of the mesh."""
    return with_mesh(Flags(), work, unary=True)


async def list_jobs(mesh: Mesh, wanted: JobFilter, view: JobView.ValueType = JOB_VIEW_BASIC) -> list[Job]:
    """Return all matching jobs, oldest first."""
    found: list[Job] = []
    token = ""
    while True:
        page = await mesh.jobs.ListJobs(
            ListJobsRequest(filter=wanted, page_size=PAGE_SIZE, page_token=token, view=view)
        )
        found += page.jobs
        token = page.next_page_token
        if not token:
            return found[::-1]


async def find_each(
    mesh: Mesh, job_ids: Sequence[str], view: JobView.ValueType = JOB_VIEW_BASIC
) -> dict[str, list[Job]]:
    """Return the job with each id, or the tasks of the array with it; also archived ones. None: an empty list."""
    found: dict[str, list[Job]] = {job_id: [] for job_id in job_ids}
    for job in await list_jobs(mesh, JobFilter(ids=job_ids), view):
        found[job.id] = [job]
    for job_id in [job_id for job_id, jobs in found.items() if not jobs]:
        found[job_id] = await _find(mesh, job_id, view)
    return found


async def _find(mesh: Mesh, job_id: str, view: JobView.ValueType) -> list[Job]:
    if SEPARATOR not in job_id and (tasks := await list_jobs(mesh, JobFilter(array_id=job_id), view)):
        return sorted(tasks, key=lambda job: job.spec.array_task.index)
    try:
        return [(await mesh.jobs.GetJob(GetJobRequest(id=job_id, view=view))).job]
    except grpc.aio.AioRpcError as error:
        if error.code().name in _MISSING:
            return []
        from cotenant.codec.errors import from_error

        if from_error(error).reason == IS_ARRAY:  # all of its jobs are archived
            return []
        raise


async def find_one(mesh: Mesh, job_id: str, failed: str, view: JobView.ValueType = JOB_VIEW_BASIC) -> list[Job]:
    """Return the job, or the tasks of the array, with an id.

    Raises:
        SlurmError: there is none.
    """
    found = (await find_each(mesh, [job_id], view))[job_id]
    if not found:
        raise SlurmError(f"{failed}{INVALID}", prefixed=not failed)
    return found


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs in the order of their numbers, and tasks in that of their indices."""
    return sorted(jobs, key=lambda job: (number_of(job.id.partition(SEPARATOR)[0]), job.spec.array_task.index))
