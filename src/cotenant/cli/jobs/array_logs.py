"""The output of all tasks of an array, each line prefixed with the task's index."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.cli import views
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.follow import Output, follow, is_gang, try_copy_output
from cotenant.cli.jobs.job_pages import PAGE_SIZE_MAX
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import CommandError
from cotenant.cli.watch import Removed, changes
from cotenant.core.model.lifecycle import ENDED, AttemptState
from cotenant.deferred import asyncio
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest, ReadLogsRequest

STREAMS_MAX = 16  # tasks that are followed at once; each takes two streams of the queue

NewOutput = Callable[[str, bool], Output]  # by label, and whether ranks are shown


async def print_array(mesh: Mesh, array: Array, request: ReadLogsRequest, new_output: NewOutput) -> None:
    """Print what the tasks of an array have written so far, by index.

    Raises:
        CommandError: none of them has started.
    """
    listing, found = ListJobsRequest(filter=JobFilter(array_id=array.id), page_size=PAGE_SIZE_MAX), list[Job]()
    while True:
        page = await mesh.jobs.ListJobs(listing)
        found += (job for job in page.jobs if job.HasField("attempt"))
        if not page.next_page_token:
            break
        listing.page_token = page.next_page_token
    if not found:
        raise CommandError(f"{array.id} has no output yet", hint="wait for it with `cotenant logs -f`")
    for job in sorted(found, key=lambda job: job.spec.array_task.index):
        await try_copy_output(mesh, _request_for(request, job), _output_for(job, request, new_output))


async def follow_array(mesh: Mesh, array: Array, request: ReadLogsRequest, new_output: NewOutput) -> None:
    """Print the output of an array's tasks as they run, until all have ended.

    A task that starts while the maximum number of tasks is followed is printed, from its beginning, once one has ended.
    """
    slots = asyncio.Semaphore(STREAMS_MAX)
    following: dict[str, asyncio.Task[None]] = {}

    async def print_task(job: Job) -> None:
        async with slots:
            await follow(
                mesh, job.id, _request_for(request, job), _output_for(job, request, new_output), lambda changed: None
            )

    try:
        async for job in changes(mesh, JobFilter(array_id=array.id), until_ended=True):
            if isinstance(job, Removed) or job.id in following or not _has_output(job):
                continue
            following[job.id] = asyncio.ensure_future(print_task(job))
            for task in following.values():
                if task.done():
                    task.result()
        await asyncio.gather(*following.values())
    finally:
        for task in following.values():
            task.cancel()


def _has_output(job: Job) -> bool:
    """Return whether a task has begun to run."""
    return job.HasField("attempt") and (phase_of(job) in ENDED or views.state_of(job.attempt) != AttemptState.ASSIGNED)


def _request_for(request: ReadLogsRequest, job: Job) -> ReadLogsRequest:
    own = ReadLogsRequest()
    own.CopyFrom(request)
    own.id = job.id
    return own


def _output_for(job: Job, request: ReadLogsRequest, new_output: NewOutput) -> Output:
    return new_output(str(job.spec.array_task.index), is_gang(job) and not request.HasField("rank"))
