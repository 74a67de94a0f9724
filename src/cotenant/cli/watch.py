"""Watching jobs: a stream of changes that survives a restart of the queue, and a live table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import sanitize
from cotenant.cli.render import Column, console, plain_lines, styled
from cotenant.cli.stream_retry import StreamRetry
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JOB_VIEW_BASIC, JobFilter, JobView, WatchJobsRequest

REFRESH_SECONDS = 1.0


async def changes(
    mesh: Mesh, wanted: JobFilter, *, until_ended: bool = False, view: JobView.ValueType = JOB_VIEW_BASIC
) -> AsyncIterator[Job]:
    """Yield each matching job, then each change; reconnects after a restart of the queue.

    After a reconnect all jobs are yielded again.

    Raises:
        AioRpcError: the queue stayed unreachable or refused the call.
    """
    retry = StreamRetry(mesh, "lost the connection to the queue; jobs keep running")
    while True:
        try:
            request = WatchJobsRequest(filter=wanted, until_ended=until_ended, view=view)
            async for response in mesh.jobs.WatchJobs(request):
                if response.synced:
                    retry.reset()
                if response.HasField("job"):
                    yield response.job
            return
        except grpc.aio.AioRpcError as error:
            await retry.wait(error)


async def live_table(
    jobs: AsyncIterator[Job],
    columns: Sequence[Column],
    rows: Callable[[Iterable[Job]], list[list[str]]],
) -> None:
    """Show jobs as they change: a table updated in place on a terminal, otherwise one line per change."""
    if not sys.stdout.isatty():
        async for job in jobs:
            for row in rows([job]):
                print(plain_lines(columns, [[sanitize(cell) for cell in row]])[1], flush=True)
        return
    from rich.live import Live

    known: dict[str, Job] = {}
    out = console()
    with Live(console=out, auto_refresh=False) as live:
        async for _ in _ticks(jobs, known):
            cleaned = [[sanitize(cell) for cell in row] for row in rows(known.values())]
            live.update(styled(columns, cleaned, out.width), refresh=True)


async def _ticks(jobs: AsyncIterator[Job], known: dict[str, Job]) -> AsyncIterator[None]:
    """Keep `known` up to date; yield after each change and each second, so that durations advance."""
    pending = asyncio.ensure_future(anext(jobs, None))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=REFRESH_SECONDS)
            if done:
                job = pending.result()
                if job is None:
                    return
                known[job.id] = job
                pending = asyncio.ensure_future(anext(jobs, None))
            yield
    finally:
        pending.cancel()
