"""Arrays on the command line: one job stands for all of them, with the array's id and how many are in each phase."""

from __future__ import annotations

from cotenant.cli.connection import Mesh
from cotenant.cli.name_lookup import all_jobs, phase_of
from cotenant.codec.specs import PHASES
from cotenant.core.model.job_array import ArraySpec, of_indices
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest

SEPARATOR = "_"  # between the id of an array and an index: the id of a job
# What an array is said to be: the first of these that any of its jobs is.
LEADING = (
    Phase.RUNNING,
    Phase.STARTING,
    Phase.STOPPING,
    Phase.QUEUED,
    Phase.SUSPENDED,
    Phase.FAILED,
    Phase.CANCELLED,
    Phase.SUCCEEDED,
)


def as_array(job: Job) -> Job:
    """Let a job stand for its array."""
    array = Job()
    array.CopyFrom(job)
    array.id = job.spec.array_task.array_id
    return array


def is_array(job: Job) -> bool:
    """Tell whether a job stands for its array."""
    return job.spec.HasField("array_task") and job.id == job.spec.array_task.array_id


async def read_array(mesh: Mesh, array_id: str) -> Job:
    """Read how an array stands now."""
    request = ListJobsRequest(filter=JobFilter(array_id=array_id), page_size=1, fold_arrays=True)
    listed = await mesh.jobs.ListJobs(request)
    return as_array(listed.jobs[0])


async def read_tasks(mesh: Mesh, array_id: str) -> list[Job]:
    """Read all jobs of an array, by index."""
    found = [job async for job in all_jobs(mesh, JobFilter(array_id=array_id))]
    return sorted(found, key=lambda job: job.spec.array_task.index)


def counts(array: Job) -> dict[str, int]:
    """Say how many jobs of an array are in each phase."""
    return {
        PHASES.names.get(one.phase, f"phase {one.phase}"): one.count
        for one in sorted(array.array_phases, key=lambda one: one.phase)
    }


def leading(array: Job) -> Phase | str:
    """Name the phase that says most of an array."""
    present = counts(array)
    return next((phase for phase in LEADING if phase in present), phase_of(array))


def array_standing(array: Job) -> str:
    """Say how an array stands.

    >>> from cotenant.v1.job_pb2 import PhaseCount
    >>> array_standing(Job(array_phases=[PhaseCount(phase=1, count=97), PhaseCount(phase=3, count=3)]))
    '97 queued, 3 running'
    """
    return ", ".join(f"{count:,} {phase}" for phase, count in counts(array).items())


def spec_of(tasks: list[Job]) -> ArraySpec:
    """Say which indices an array has, and how many of its jobs may run at once."""
    indices = [job.spec.array_task.index for job in tasks]
    return of_indices(indices, tasks[0].spec.array_task.running_max)
