"""Arrays on the command line: one job represents the array, with the array's id and the count of jobs per phase."""

from __future__ import annotations

from cotenant.cli.connection import Mesh
from cotenant.cli.name_lookup import all_jobs, phase_of
from cotenant.codec.specs import PHASES
from cotenant.core.model.job_array import ArraySpec, from_indices
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JOB_VIEW_FULL, JobFilter, ListJobsRequest

SEPARATOR = "_"  # a job's id is the array's id, the separator and the index
# The phase of an array: the first of these phases that any of its jobs is in.
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


def to_array(job: Job) -> Job:
    """Return a job as the representative of its array."""
    array = Job()
    array.CopyFrom(job)
    array.id = job.spec.array_task.array_id
    return array


def is_array(job: Job) -> bool:
    """Return whether a job represents its array."""
    return job.spec.HasField("array_task") and job.id == job.spec.array_task.array_id


async def read_array(mesh: Mesh, array_id: str) -> Job:
    """Return the current state of an array."""
    request = ListJobsRequest(filter=JobFilter(array_id=array_id), page_size=1, fold_arrays=True, view=JOB_VIEW_FULL)
    listed = await mesh.jobs.ListJobs(request)
    return to_array(listed.jobs[0])


async def read_tasks(mesh: Mesh, array_id: str) -> list[Job]:
    """Return all jobs of an array, sorted by index."""
    found = [job async for job in all_jobs(mesh, JobFilter(array_id=array_id), view=JOB_VIEW_FULL)]
    return sorted(found, key=lambda job: job.spec.array_task.index)


def counts(array: Job) -> dict[str, int]:
    """Return the number of an array's jobs in each phase."""
    return {
        PHASES.names.get(one.phase, f"phase {one.phase}"): one.count
        for one in sorted(array.array_phases, key=lambda one: one.phase)
    }


def leading_phase(array: Job) -> Phase | str:
    """Return the phase that represents an array."""
    present = counts(array)
    return next((phase for phase in LEADING if phase in present), phase_of(array))


def array_summary(array: Job) -> str:
    """Return the phases of an array's jobs as text.

    >>> from cotenant.v1.job_pb2 import PhaseCount
    >>> array_summary(Job(array_phases=[PhaseCount(phase=1, count=97), PhaseCount(phase=3, count=3)]))
    '97 queued, 3 running'
    """
    return ", ".join(f"{count:,} {phase}" for phase, count in counts(array).items())


def spec_of(tasks: list[Job]) -> ArraySpec:
    """Return an array's indices and its limit of running jobs."""
    indices = [job.spec.array_task.index for job in tasks]
    return from_indices(indices, tasks[0].spec.array_task.running_max)
