"""Pages of jobs: the one implementation behind `ListJobs`, of leaders and of followers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cotenant.codec import errors
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.api.job_order import JobOrder
from cotenant.services.queue.jobs.job_views import is_basic, view_violations
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
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
        self._order = JobOrder(request.order_by, violations)
        scope = f"jobs/{self.filter.digest}/{self._order.scope}"
        token = request.page_token if self._order.valid else ""  # it cannot be checked without an order
        self._page = PageRequest.check(request.page_size, token, scope, violations, fits=self._order.fits)
        if violations:
            raise errors.invalid(violations)

    async def page(
        self, ids: Sequence[str], records: Mapping[str, Record], message: Callable[[Record], job_pb2.Job]
    ) -> pb.ListJobsResponse:
        """Return the page of the jobs with these sorted ids."""

        def message_of(job_id: str) -> job_pb2.Job | None:
            record = records.get(job_id)  # None: deleted in between
            return message(record) if record else None

        total, asked = len(ids), self._page
        if self._order.by_id:
            page = await page_of_messages(ids, message_of, asked, descending=self._order.descending)
        else:
            found = (records.get(job_id) for job_id in list(ids))
            keys = await self._order.next_keys(found, asked.after, asked.size + 1)
            page = await asked.fill(keys, message_of)
        return pb.ListJobsResponse(jobs=page.items, next_page_token=page.next_token, total_size=total)


async def list_jobs(state: State, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
    """Return a page of the jobs that the caller may see.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field.
    """
    view = View(state)
    listing = JobListing(request, view)
    ids = state.ids if listing.filter.matches_all else await listing.filter.matching_ids(state)

    def message(record: Record) -> job_pb2.Job:
        return view.message(record, basic=listing.basic)

    return await listing.page(ids, state.records, message)
