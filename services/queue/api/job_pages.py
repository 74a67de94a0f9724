"""Pages of jobs, gathered in slices between which other calls have their turn, and bounded in bytes."""

from __future__ import annotations

import asyncio

from cotenant.rpc.paging import page_of
from cotenant.services.queue.api.job_filter import Filter, folded
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

SLICE = 50  # jobs written between two turns of others; some milliseconds
PAGE_BYTES_MAX = 2 * 2**20  # a page ends early; clients take answers of 4 MiB


async def list_jobs(state: State, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
    """Return a page of the jobs that the caller may see, newest first.

    Raises:
        Problem: INVALID_ARGUMENT for a page that cannot be.
    """
    view = View(state)
    chosen = Filter(request.filter, view)
    ids = state.ids if chosen.everything else await chosen.found(state)
    if request.fold_arrays:
        ids = folded(ids, state)
    scope, size, total = chosen.digest, request.page_size, len(ids)
    page, token = page_of(ids, size, request.page_token, descending=True, scope=scope)
    jobs: list[job_pb2.Job] = []
    room_bytes = PAGE_BYTES_MAX
    for number, job_id in enumerate(page):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        record = state.records.get(job_id)
        if record is None:
            continue  # it was forgotten meanwhile
        jobs.append(view.message(record, phases=request.fold_arrays))
        room_bytes -= jobs[-1].ByteSize()
        if room_bytes < 0 and number + 1 < len(page):
            _, token = page_of([*reversed(page)], number + 1, "", descending=True, scope=scope)
            break
    return pb.ListJobsResponse(jobs=jobs, next_page_token=token, total_size=total)
