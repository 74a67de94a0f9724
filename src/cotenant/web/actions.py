"""What readers of a job's page may do there: cancel, suspend and resume it, and try other requests."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cotenant.cli import views
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.whatif import answer_view
from cotenant.client.errors import InvalidArgument
from cotenant.v1.job_pb2 import JobKind, JobSpec
from cotenant.v1.job_service_pb2 import (
    CancelJobRequest,
    GetJobRequest,
    ResumeJobRequest,
    SimulateJobRequest,
    SuspendJobRequest,
)

NUMBER_MAX = 1_000_000


async def _cancel(mesh: Mesh, job_id: str) -> object:
    return await mesh.jobs.CancelJob(CancelJobRequest(id=job_id, request_id=uuid.uuid4().hex))


async def _suspend(mesh: Mesh, job_id: str) -> object:
    return await mesh.jobs.SuspendJob(SuspendJobRequest(id=job_id, request_id=uuid.uuid4().hex))


async def _resume(mesh: Mesh, job_id: str) -> object:
    return await mesh.jobs.ResumeJob(ResumeJobRequest(id=job_id, request_id=uuid.uuid4().hex))


ACTIONS: Mapping[str, Callable[[Mesh, str], Awaitable[object]]] = {
    "cancel": _cancel, "suspend": _suspend, "resume": _resume,
}  # fmt: skip
WORDS: Mapping[str, str] = {
    "cancel": "The job is cancelled; its processes get their grace.",
    "suspend": "The job is suspended: it stops, with its grace, and waits until it is resumed.",
    "resume": "The job is queued again.",
}


async def try_requests(mesh: Mesh, job_id: str, wanted: Mapping[str, Any]) -> views.View:
    """Return what would happen to one more job like this one with other requests; nothing is changed.

    Raises:
        InvalidArgument: names the requests that are no numbers.
    """
    wrong = [name for name in ("gpus", "cores", "priority") if not _is_number(wanted.get(name, 0))]
    if wrong:
        raise InvalidArgument(f"{', '.join(wrong)}: must be a number of at most {NUMBER_MAX}")
    answer = await mesh.jobs.GetJob(GetJobRequest(id=job_id))
    spec = changed(answer.job.spec, wanted)
    return answer_view(spec.name, await mesh.jobs.SimulateJob(SimulateJobRequest(spec=spec)))


def changed(spec: JobSpec, wanted: Mapping[str, Any]) -> JobSpec:
    """Return a spec with other requests for each replica of its first role, as it could be submitted again."""
    new = JobSpec()
    new.CopyFrom(spec)
    for field in ("array_task", "notify", "notify_on", "begin_time", "hold"):  # set by the queue, or hidden, or over
        new.ClearField(field)
    if new.kind in (JobKind.JOB_KIND_TRAINING, JobKind.JOB_KIND_CPU):
        new.ClearField("kind")  # it follows from the GPUs
    if new.roles:
        request = new.roles[0].resources
        if "gpus" in wanted:
            request.gpu_milli = round(1000 * wanted["gpus"])
        if "cores" in wanted:
            request.cores = int(wanted["cores"])
    if "priority" in wanted:
        new.priority = int(wanted["priority"])
    return new


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= NUMBER_MAX
