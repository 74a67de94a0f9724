"""What readers of a job's page may do there: stop, resume and rerun it, change its priority, try other requests."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from cotenant.cli import views
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.earlier_job import draft_like
from cotenant.cli.jobs.submit import create
from cotenant.cli.jobs.whatif import answer_view
from cotenant.cli.source_positions import MapNode, SourcePosition
from cotenant.client.errors import InvalidArgument
from cotenant.v1.job_pb2 import Job, JobKind, JobSpec
from cotenant.v1.job_service_pb2 import (
    CancelJobRequest,
    GetJobRequest,
    ResumeJobRequest,
    SimulateJobRequest,
    SuspendJobRequest,
    UpdateJobRequest,
)

NUMBER_MAX = 1_000_000


async def _rerun(mesh: Mesh, job_id: str) -> str:
    """Submit a job again, as `cotenant rerun` does; return the id of the new one."""
    answer = await mesh.jobs.GetJob(GetJobRequest(id=job_id))
    draft = draft_like(answer.job, MapNode(SourcePosition("the dashboard"), ()), time.time())
    made = await create(mesh, draft.to_wire(draft.spec), request_id=uuid.uuid4().hex, like=draft.like)
    return made.id


async def set_priority(mesh: Mesh, job_id: str, text: str) -> None:
    """Change the priority of a job.

    Raises:
        InvalidArgument: the text is no number.
    """
    if not re.fullmatch("-?[0-9]{1,6}", text):
        raise InvalidArgument("priority: must be a whole number")
    request = UpdateJobRequest(job=Job(id=job_id, spec=JobSpec(priority=int(text))), request_id=uuid.uuid4().hex)
    request.update_mask.paths.append("spec.priority")
    await mesh.jobs.UpdateJob(request)


async def _cancel(mesh: Mesh, job_id: str) -> str:
    await mesh.jobs.CancelJob(CancelJobRequest(id=job_id, request_id=uuid.uuid4().hex))
    return job_id


async def _suspend(mesh: Mesh, job_id: str) -> str:
    await mesh.jobs.SuspendJob(SuspendJobRequest(id=job_id, request_id=uuid.uuid4().hex))
    return job_id


async def _resume(mesh: Mesh, job_id: str) -> str:
    await mesh.jobs.ResumeJob(ResumeJobRequest(id=job_id, request_id=uuid.uuid4().hex))
    return job_id


ACTIONS: Mapping[str, Callable[[Mesh, str], Awaitable[str]]] = {
    "cancel": _cancel, "suspend": _suspend, "resume": _resume, "rerun": _rerun,
}  # fmt: skip
WORDS: Mapping[str, str] = {
    "cancel": "The job is cancelled; its processes get their grace.",
    "suspend": "The job is suspended: it stops, with its grace, and waits until it is resumed.",
    "resume": "The job is queued again.",
    "rerun": "This is a new job like the one before.",
    "priority": "The priority is changed.",
}


def read_wanted(body: bytes) -> dict[str, float]:
    """Return the requests to try: any of GPUs, cores, priority and a deadline in hours from now, 0 for none.

    Raises:
        InvalidArgument: it is no JSON object, or names the requests that are no numbers.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, an endless number, or nested too deeply
        given = None
    if not isinstance(given, dict):
        raise InvalidArgument("the body must be a JSON object")
    wanted = {name: given[name] for name in ("gpus", "cores", "priority", "deadline") if name in given}
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
    if "deadline" in wanted:
        new.ClearField("deadline")
        if wanted["deadline"] > 0:
            new.deadline.FromSeconds(int(time.time() + 3600 * wanted["deadline"]))
    return new


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= NUMBER_MAX
