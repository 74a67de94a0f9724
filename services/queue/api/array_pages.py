"""Pages of arrays: those of which at least one job matches a filter, gathered in slices and bounded in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.rpc.slices import Slices
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.jobs.array_messages import array_message
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import array_service_pb2 as pb


async def list_arrays(state: State, request: pb.ListArraysRequest) -> pb.ListArraysResponse:
    """Return a page of the arrays that the caller may see, newest first.

    Raises:
        Problem: INVALID_ARGUMENT for an invalid page size or token.
    """
    view, slices = View(state), Slices()
    chosen = JobFilter(request.filter, view)
    asked = PageRequest.read(request.page_size, request.page_token, f"arrays/{chosen.digest}")
    ids = await _matching_ids(state, view, chosen, slices)

    def message(array_id: str) -> pb.Array | None:
        array = state.dependency_gate.arrays.get(array_id)
        if array is None or not view.sees_array(array):
            return None  # deleted in between
        made = array_message(array, state.records)
        view.redact(made)
        return made

    page = await page_of_messages(ids, message, asked, descending=True)
    return pb.ListArraysResponse(arrays=page.items, total_size=len(ids), next_page_token=page.next_token)


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
