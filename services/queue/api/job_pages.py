"""Pages of jobs: the one implementation behind `ListJobs`, of leaders and of followers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cotenant.codec import errors
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.services.queue.api.job_filter import JobFilter, folded
from cotenant.services.queue.jobs.job_views import is_basic, view_violations
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


class JobListing:
    """A valid request for a page of jobs, with the filter as its caller sees it.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field.
    """

    def __init__(self, request: pb.ListJobsRequest, view: View) -> None:
        self.filter, self.basic = JobFilter(request.filter, view), is_basic(request.view)
        violations = view_violations(request.view)
        scope = f"jobs/{self.filter.digest}{'/folded' if request.fold_arrays else ''}"
        self._page = PageRequest.check(request.page_size, request.page_token, scope, violations)
        if violations:
            raise errors.invalid(violations)

    async def page(self, ids: Sequence[str], message: Callable[[str], job_pb2.Job | None]) -> pb.ListJobsResponse:
        """Return the page of the jobs with these sorted ids."""
        total = len(ids)
        page = await page_of_messages(ids, message, self._page, descending=True)
        return pb.ListJobsResponse(jobs=page.items, next_page_token=page.next_token, total_size=total)


async def list_jobs(state: State, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
    """Return a page of the jobs that the caller may see.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field.
    """
    view = View(state)
    listing = JobListing(request, view)
    ids = state.ids if listing.filter.matches_all else await listing.filter.matching_ids(state)
    if request.fold_arrays:
        ids = folded(ids, state)

    def message(job_id: str) -> job_pb2.Job | None:
        record = state.records.get(job_id)
        return view.message(record, phases=request.fold_arrays, basic=listing.basic) if record else None

    return await listing.page(ids, message)
