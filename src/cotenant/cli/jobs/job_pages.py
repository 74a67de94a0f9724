"""Single jobs and arrays in one list: their pages are read side by side, and merged newest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from cotenant.cli.connection import Mesh
from cotenant.v1.array_service_pb2 import Array, ListArraysRequest
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest

PAGE_SIZE_MAX = 1000

Page = tuple[Iterable[Job | Array], str, int]  # the items, the token of the next page, the total


class _List:
    """A list that is read page by page, newest first."""

    def __init__(self, read: Callable[[int, str], Awaitable[Page]]) -> None:
        self._read = read
        self._token, self._ended = "", False
        self.items: deque[Job | Array] = deque()
        self.total = 0

    async def fill(self, size: int) -> None:
        """Read the next page if all items were taken; a page may be empty, and not the last."""
        while not self.items and not self._ended:
            items, self._token, self.total = await self._read(size, self._token)
            self.items.extend(items)
            self._ended = not self._token


async def newest_jobs_and_arrays(mesh: Mesh, wanted: JobFilter, limit: int | None) -> tuple[list[Job | Array], int]:
    """Return single jobs that match, and arrays of which a job matches, up to the limit; and their total number.

    Ids grow with the time of creation, and both lists are in their order.
    """
    single = JobFilter(standalone_only=True)
    single.MergeFrom(wanted)

    async def read_jobs(size: int, token: str) -> Page:
        jobs = await mesh.jobs.ListJobs(ListJobsRequest(filter=single, page_size=size, page_token=token))
        return jobs.jobs, jobs.next_page_token, jobs.total_size

    async def read_arrays(size: int, token: str) -> Page:
        arrays = await mesh.arrays.ListArrays(ListArraysRequest(filter=wanted, page_size=size, page_token=token))
        return arrays.arrays, arrays.next_page_token, arrays.total_size

    lists = [_List(read_jobs), _List(read_arrays)]
    found: list[Job | Array] = []
    while limit is None or len(found) < limit:
        size = PAGE_SIZE_MAX if limit is None else min(PAGE_SIZE_MAX, limit - len(found))
        await mesh.gather(*(one.fill(size) for one in lists))
        present = [one for one in lists if one.items]
        if not present:
            break
        found.append(max(present, key=lambda one: one.items[0].id).items.popleft())
    return found, sum(one.total for one in lists)
