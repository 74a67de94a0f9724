"""What readers of a job's page may do there: cancel, suspend and resume it, and try other requests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping

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


def read_wanted(body: bytes) -> dict[str, float]:
    """Return the requests to try: any of GPUs, cores and priority.

    Raises:
        InvalidArgument: it is no JSON object, or names the requests that are no numbers.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, an endless number, or nested too deeply
        given = None
    if not isinstance(given, dict):
        raise InvalidArgument("the body must be a JSON object")
    wanted = {name: given[name] for name in ("gpus", "cores", "priority") if name in given}
    if wrong := [name for name, value in wanted.items() if not _is_number(value)]:
        raise InvalidArgument(f"{', '.join(wrong)}: must be a number of at most {NUMBER_MAX}")
    return wanted


async def try_requests(mesh: Mesh, job_id: str, wanted: Mapping[str, float]) -> views.View:
    """Return what would happen to one more job like this one with other requests; nothing is changed."""
    answer = await mesh.jobs.GetJob(GetJobRequest(id=job_id))
    spec = changed(answer.job.spec, wanted)
    return answer_view(spec.name, await mesh.jobs.SimulateJob(SimulateJobRequest(spec=spec)))


def changed(spec: JobSpec, wanted: Mapping[str, float]) -> JobSpec:
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
