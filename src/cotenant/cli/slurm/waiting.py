"""Waits for jobs, for `sbatch --wait` and `srun`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.follow import Output, follow, watch_until_ended
from cotenant.cli.slurm.finding import find_each
from cotenant.cli.slurm.outcome import FAILED
from cotenant.v1.job_pb2 import JOB_PHASE_SUCCEEDED, Job
from cotenant.v1.job_service_pb2 import ReadLogsRequest

SIGNALLED = 128


def wait_for(job_id: str) -> list[int]:
    """Wait until a job, or all jobs of an array, have ended, and return their exit codes."""

    async def work(mesh: Mesh) -> list[int]:
        jobs = (await find_each(mesh, [job_id]))[job_id]
        return [exit_code_of(job) async for job in watch_until_ended(mesh, [job.id for job in jobs], lambda job: None)]

    return with_mesh(Flags(), work)


def follow_job(job_id: str, on_change: Callable[[Job], None]) -> Job:
    """Print the output of a job until it has ended, and return it."""

    async def work(mesh: Mesh) -> Job:
        output = Output(sys.stdout.buffer, marked=False)
        return await follow(mesh, job_id, ReadLogsRequest(id=job_id), output, on_change)

    return with_mesh(Flags(), work)


def exit_code_of(job: Job) -> int:
    """Return the exit code of a job that has ended, or 128 plus the signal that ended it."""
    if job.phase == JOB_PHASE_SUCCEEDED:
        return 0
    ended = job.attempt.exit
    return SIGNALLED + ended.signal if ended.signal else ended.code or FAILED
