"""Watching jobs: a stream of changes that survives restarts of the queue, and a live table."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import sanitize
from cotenant.cli.render import Column, console, plain_lines, styled
from cotenant.cli.stream_retry import StreamRetry
from cotenant.codec.errors import from_error
from cotenant.deferred import asyncio, grpc
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_BASIC,
    JOB_VIEW_FULL,
    JobFilter,
    JobView,
    WatchJobsRequest,
    WatchJobsResponse,
)

REFRESH_SECONDS = 1.0
TOO_OLD = frozenset({"REVISION_COMPACTED", "REVISION_UNKNOWN"})


@dataclass(frozen=True, slots=True)
class Removed:
    """A job that no longer matches, or that the queue no longer keeps."""

    id: str


class JobChanges:
    """The changes of matching jobs: a watch that is resumed where it was cut.

    If it cannot be resumed, it begins anew; what was yielded before is not yielded again.
    """

    def __init__(self, mesh: Mesh, request: WatchJobsRequest) -> None:
        self._mesh, self._request = mesh, request
        self._known: dict[str, int] = {}  # by job: what was yielded last, hashed
        self._unseen: set[str] = set()  # known jobs that a watch that began anew has not sent so far
        self._caught_up = True
        self.synced = False  # whether the present state has been received, and changes of it are followed

    async def changes(self) -> AsyncIterator[Job | Removed]:
        """Yield each matching job, then each change, until the watch ends.

        Raises:
            AioRpcError: the queue stayed unreachable or refused the call.
        """
        retry = StreamRetry(self._mesh, "lost the connection to the queue; jobs keep running")
        while True:
            try:
                async for response in self._mesh.jobs.WatchJobs(self._request):
                    for change in self._read(response):
                        yield change
                    if response.synced:
                        retry.reset()
                return
            except grpc.aio.AioRpcError as error:
                self.synced = False
                if self._request.after_revision and from_error(error).reason in TOO_OLD:
                    self._request.after_revision = ""
                else:
                    await retry.wait(error)
            self._caught_up = False
            if not self._request.after_revision:
                self._unseen = set(self._known)

    def _read(self, response: WatchJobsResponse) -> Iterable[Job | Removed]:
        """Return what a message changes."""
        found: list[Job | Removed] = []
        for job in response.jobs:
            now = _fingerprint(job)
            if self._caught_up or self._known.get(job.id) != now:
                found.append(job)
            self._known[job.id] = now
            self._unseen.discard(job.id)
        found += map(Removed, response.removed_job_ids)
        if response.synced:
            found += [Removed(job_id) for job_id in sorted(self._unseen)]
            self._caught_up = self.synced = True
        self._request.after_revision = response.revision or self._request.after_revision
        return [one for one in found if not isinstance(one, Removed) or self._forget(one.id)]

    def _forget(self, job_id: str) -> bool:
        """Forget a removed job; return whether it was known."""
        self._unseen.discard(job_id)
        return self._known.pop(job_id, None) is not None


def _fingerprint(job: Job) -> int:
    """Return a hash of what is told of a job, apart from what rises with time."""
    told = Job()
    told.CopyFrom(job)
    for field in ("attained_gpu_seconds", "attained_core_seconds"):
        told.ClearField(field)
    return hash(told.SerializeToString(deterministic=True))


async def changes(
    mesh: Mesh, wanted: JobFilter, *, until_ended: bool = False, view: JobView.ValueType = JOB_VIEW_BASIC
) -> AsyncIterator[Job | Removed]:
    """Yield each matching job, then each change; see `JobChanges`."""
    request = WatchJobsRequest(filter=wanted, until_ended=until_ended, view=view)
    async for change in JobChanges(mesh, request).changes():
        yield change


async def job_changes(mesh: Mesh, job_ids: Sequence[str]) -> AsyncIterator[Job]:
    """Yield certain jobs, then each change of them, until they have ended."""
    async for change in changes(mesh, JobFilter(ids=job_ids), until_ended=True, view=JOB_VIEW_FULL):
        if isinstance(change, Job):
            yield change


async def live_table(
    jobs: AsyncIterator[Job | Removed],
    columns: Sequence[Column],
    rows: Callable[[Iterable[Job]], list[list[str]]],
) -> None:
    """Show jobs as they change: a table updated in place on a terminal, otherwise one line per change."""
    if not sys.stdout.isatty():
        async for job in jobs:
            for row in rows([job]) if isinstance(job, Job) else ():
                print(plain_lines(columns, [[sanitize(cell) for cell in row]])[1], flush=True)
        return
    from rich.live import Live

    known: dict[str, Job] = {}
    out = console()
    with Live(console=out, auto_refresh=False) as live:
        async for _ in _ticks(jobs, known):
            cleaned = [[sanitize(cell) for cell in row] for row in rows(known.values())]
            live.update(styled(columns, cleaned, out.width), refresh=True)


async def _ticks(jobs: AsyncIterator[Job | Removed], known: dict[str, Job]) -> AsyncIterator[None]:
    """Keep `known` up to date; yield after each change and each second, so that durations advance."""
    pending = asyncio.ensure_future(anext(jobs, None))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=REFRESH_SECONDS)
            if done:
                job = pending.result()
                if job is None:
                    return
                if isinstance(job, Removed):
                    known.pop(job.id, None)
                else:
                    known[job.id] = job
                pending = asyncio.ensure_future(anext(jobs, None))
            yield
    finally:
        pending.cancel()
