"""Pages of arrays: those of which at least one job matches a filter, gathered in slices and bounded in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.rpc.paging import page_of
from cotenant.rpc.slices import Slices
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.jobs.array_messages import array_message
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import array_service_pb2 as pb

PAGE_BYTES_MAX = 2 * 2**20  # a page ends early; clients accept messages of 4 MiB
SCOPE = "arrays "  # so that a token of ListJobs is not taken for one of ListArrays


async def list_arrays(state: State, request: pb.ListArraysRequest) -> pb.ListArraysResponse:
    """Return a page of the arrays that the caller may see, newest first.

    Raises:
        Problem: INVALID_ARGUMENT for an invalid page size or token.
    """
    view, slices = View(state), Slices()
    chosen = JobFilter(request.filter, view)
    scope = SCOPE + chosen.digest
    page_of([], request.page_size, request.page_token, scope=scope)  # a bad request costs no search
    ids = await _matching_ids(state, view, chosen, slices)
    page, token = page_of(ids, request.page_size, request.page_token, descending=True, scope=scope)
    answer = pb.ListArraysResponse(total_size=len(ids), next_page_token=token)
    room_bytes = PAGE_BYTES_MAX
    for number, array_id in enumerate(page):
        await slices.step()
        array = state.dependency_gate.arrays.get(array_id)
        if array is None or not view.sees_array(array):
            continue  # deleted in between
        message = array_message(array, state.records)
        view.redact(message)
        room_bytes -= message.ByteSize()
        if room_bytes < 0 and answer.arrays:
            _, answer.next_page_token = page_of([*reversed(page)], number, "", descending=True, scope=scope)
            break
        answer.arrays.append(message)
    return answer


async def _matching_ids(state: State, view: View, chosen: JobFilter, slices: Slices) -> Sequence[str]:
    """Return the ids of the arrays of which a job matches, sorted."""
    arrays = state.dependency_gate.arrays
    found: list[str] = []
    for array_id in sorted(chosen.array_ids(state)):
        await slices.step()
        array = arrays.get(array_id)
        if array and view.sees_array(array) and await _matches(state, chosen, array, slices):
            found.append(array_id)
    return found


async def _matches(state: State, chosen: JobFilter, array: Array, slices: Slices) -> bool:
    """Return whether a job of an array matches. Most often one job and the counts by phase tell."""
    if not chosen.matches_array(state.records[next(iter(array.ids))], array.phases):
        return False
    if chosen.by_phase_only:
        return True
    for job_id in list(array.ids):
        await slices.step()
        record = state.records.get(job_id)
        if record is not None and chosen.matches(record):
            return True
    return False
