"""Pages of jobs, gathered in slices so that other calls get their turns, and bounded in bytes."""

from __future__ import annotations

import asyncio

from cotenant.rpc.paging import page_of
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

SLICE = 50  # jobs encoded before other calls get a turn; some milliseconds
PAGE_BYTES_MAX = 2 * 2**20  # a page ends early; clients accept messages of 4 MiB


async def list_jobs(state: State, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
    """Return a page of the jobs that the caller may see, newest first.

    Raises:
        Problem: INVALID_ARGUMENT for an invalid page size or token.
    """
    view = View(state)
    chosen = JobFilter(request.filter, view)
    ids = state.ids if chosen.matches_all else await chosen.matching_ids(state)
    scope, size, total = chosen.digest, request.page_size, len(ids)
    page, token = page_of(ids, size, request.page_token, descending=True, scope=scope)
    jobs: list[job_pb2.Job] = []
    room_bytes = PAGE_BYTES_MAX
    for number, job_id in enumerate(page):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        record = state.records.get(job_id)
        if record is None:
            continue  # deleted in between
        jobs.append(view.message(record))
        room_bytes -= jobs[-1].ByteSize()
        if room_bytes < 0 and number + 1 < len(page):
            _, token = page_of([*reversed(page)], number + 1, "", descending=True, scope=scope)
            break
    return pb.ListJobsResponse(jobs=jobs, next_page_token=token, total_size=total)
