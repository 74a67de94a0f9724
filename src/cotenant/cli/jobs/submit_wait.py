"""The end of `cotenant submit --wait`: wait for the submitted jobs, print their output, and report the failed ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.follow import (
    Output,
    PhasePrinter,
    follow,
    is_gang,
    try_copy_output,
    watch_until_ended,
)
from cotenant.cli.jobs.job_lines import outcome_line
from cotenant.cli.name_lookup import phase_of, read_tasks
from cotenant.cli.outcome import CommandError, ExitCode, note
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import ReadLogsRequest

FAILED_SHOWN_MAX = 20


async def wait_for(mesh: Mesh, accepted: Sequence[Job | Array], following: bool, quiet: bool) -> list[Job]:
    """Wait until all jobs have ended, print each new phase, and print their output unless `quiet`."""
    on_change = PhasePrinter()
    last: dict[str, Job] = {}
    for one in accepted:
        note(f"submitted {one.id} {one.spec.name}".rstrip())
        last |= {job.id: job for job in (await read_tasks(mesh, one.id) if isinstance(one, Array) else [one])}
    if following and not quiet:
        [job] = last.values()
        output = _output_of(job)
        return [await follow(mesh, job.id, ReadLogsRequest(id=job.id), output, on_change)]
    async for job in watch_until_ended(mesh, list(last), on_change):
        last[job.id] = job
        if not quiet and job.HasField("attempt"):
            await try_copy_output(mesh, ReadLogsRequest(id=job.id), _output_of(job))
    return list(last.values())


def _output_of(job: Job) -> Output:
    return Output(sys.stdout.buffer, marked=is_gang(job), neutral=sys.stdout.isatty())


def check_outcomes(jobs: Sequence[Job]) -> None:
    """Check that all jobs have succeeded.

    Raises:
        CommandError: names those that have not, with how they ended.
    """
    failed = [job for job in jobs if phase_of(job) != Phase.SUCCEEDED]
    if failed:
        raise _failure(failed)


def _failure(failed: Sequence[Job]) -> CommandError:
    if len(failed) == 1:
        return CommandError(f"{failed[0].id} {outcome_line(failed[0])}", code=ExitCode.FAILED)
    lines = [f"{job.id} {outcome_line(job)}" for job in failed[:FAILED_SHOWN_MAX]]
    if len(failed) > FAILED_SHOWN_MAX:
        lines.append(f"and {len(failed) - FAILED_SHOWN_MAX:,} more")
    return CommandError(f"{len(failed)} jobs did not succeed", details=lines, code=ExitCode.FAILED)
