"""`cotenant wait`: wait until jobs have ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.follow import PhasePrinter, watch_until_ended
from cotenant.cli.jobs.job_lines import outcome_line, phase_line
from cotenant.cli.jobs.submit_wait import check_outcomes
from cotenant.cli.name_lookup import find_jobs_and_arrays, phase_of, read_tasks
from cotenant.cli.outcome import CommandError, ExitCode, usage_error
from cotenant.core.model.lifecycle import ENDED
from cotenant.deferred import asyncio
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job

SHOWN_MAX = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("wait")(wait)


def wait(
    context: typer.Context,
    job_ids: options.JobIds,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Wait at most this long; exit 124 if jobs are left.")
    ] = "",
    any_ended: Annotated[bool, typer.Option("--any", help="Wait only until one of the jobs has ended.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Wait until jobs or whole arrays have ended, and print how each ended, and other phases on stderr.

    Exits with 0 if all of them succeeded, 1 if one failed or was cancelled; with --any, the first one that ended
    decides. Waiting survives a restart of the mesh. Ctrl-C and a timeout leave the jobs running.

    \b
    Examples:
      cotenant wait ID
      cotenant wait ID ARRAY --timeout 2h
      cotenant wait --any ID ID && echo "the first one succeeded"
    """
    seconds = _seconds(timeout)
    jobs = with_mesh(Flags.of(context), lambda mesh: _wait(mesh, job_ids, seconds, any_ended, quiet=as_json))
    ended = [job for job in jobs if phase_of(job) in ENDED]
    if as_json:
        now = time.time()
        views.print_json([views.job_view(job, now) for job in jobs])
    if len(ended) < len(jobs) and not (any_ended and ended):
        raise _timed_out([job for job in jobs if phase_of(job) not in ENDED], timeout)
    check_outcomes(ended)


def _seconds(timeout: str) -> float | None:
    try:
        return units.parse_seconds(timeout) if timeout else None
    except ValueError as error:
        raise usage_error(f"--timeout {error}") from None


async def _wait(mesh: Mesh, texts: Sequence[str], seconds: float | None, any_ended: bool, *, quiet: bool) -> list[Job]:
    """Return the jobs once all of them have ended, or the first one, or the time is over."""
    jobs: dict[str, Job] = {}
    for found in await find_jobs_and_arrays(mesh, texts):
        jobs |= {job.id: job for job in (await read_tasks(mesh, found.id) if isinstance(found, Array) else [found])}

    print_phase = PhasePrinter()

    def on_change(job: Job) -> None:
        jobs[job.id] = job
        if not quiet and phase_of(job) not in ENDED:
            print_phase(job)

    try:
        async with asyncio.timeout(seconds):
            async for job in _ends(mesh, list(jobs.values()), on_change):
                jobs[job.id] = job
                if not quiet:
                    print(f"{job.id} {outcome_line(job)}", flush=True)
                if any_ended:
                    break
    except TimeoutError:
        pass  # the jobs that have not ended say so
    return list(jobs.values())


async def _ends(mesh: Mesh, jobs: Sequence[Job], on_change: Callable[[Job], None]) -> AsyncIterator[Job]:
    """Yield the jobs that have ended, then each other one when it ends."""
    for job in jobs:
        if phase_of(job) in ENDED:
            yield job
    if waiting := [job.id for job in jobs if phase_of(job) not in ENDED]:
        async for job in watch_until_ended(mesh, waiting, on_change):
            yield job


def _timed_out(left: Sequence[Job], timeout: str) -> CommandError:
    lines = [f"{job.id} {phase_line(job)}" for job in left[:SHOWN_MAX]]
    if len(left) == 1:
        return CommandError(f"{lines[0]}: not ended after {timeout}", code=ExitCode.TIMED_OUT)
    more = [f"and {len(left) - SHOWN_MAX} more"] if len(left) > SHOWN_MAX else []
    return CommandError(
        f"{len(left)} jobs have not ended after {timeout}", details=[*lines, *more], code=ExitCode.TIMED_OUT
    )
