"""Updates of the mutable fields of a submitted job."""

from __future__ import annotations

import math
import time

from cotenant.codec import errors, specs
from cotenant.codec.job_events import EventKind
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.validation import Violation, shown
from cotenant.core.spelling import did_you_mean
from cotenant.services.queue.jobs.transitions import Record, add_event
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

QOS = tuple(f"qos.{field.name}" for field in job_pb2.Qos.DESCRIPTOR.fields)
CHANGEABLE = ("priority", "deadline", "labels", "retries_max", "preemptible", "name", "steps_total", "time_limit", *QOS)
ESTIMATED_BY = ("steps_total", *QOS)  # fields on which the job's estimate depends


def check_update(record: Record, request: pb.UpdateJobRequest) -> JobSpec:
    """Return the job's spec after an update.

    Raises:
        Problem: INVALID_ARGUMENT naming each field that is immutable or has an invalid value.
    """
    wrong = [path for path in request.update_mask.paths if path.removeprefix("spec.") not in CHANGEABLE]
    if wrong or not request.update_mask.paths:
        names = [f"spec.{name}" for name in CHANGEABLE]
        raise errors.invalid(
            [
                Violation(
                    "update_mask",
                    f"{shown(path)} cannot be changed{did_you_mean(path, names)}; {', '.join(names)} can",
                )
                for path in wrong or [""]
            ]
        )
    message = job_pb2.JobSpec()
    message.CopyFrom(record.job.spec)
    _copy(message, request)
    new_deadline = any(path.removeprefix("spec.") == "deadline" for path in request.update_mask.paths)
    # an unchanged deadline may have passed
    changed = specs.accept_spec(message, now=time.time() if new_deadline else -math.inf)
    if changes_time_limit(request):
        _check_time_left(record, changed, time.time())
    return changed


def _check_time_left(record: Record, changed: JobSpec, now: float) -> None:
    """Check that a running job has not reached its new time limit, or its warning before that, already.

    Raises:
        Problem: INVALID_ARGUMENT if it has.
    """
    attempt, limit = record.job.attempt, changed.time_limit_seconds
    if record.phase is not Phase.RUNNING or limit is None or not attempt.HasField("start_time"):
        return
    ran = now - specs.seconds(attempt.start_time)
    if ran >= limit - changed.grace_seconds:
        grace = f", {changed.grace_seconds:g} s of them to end in" if changed.grace_seconds else ""
        what = f"must be longer: the job has run for {ran:.0f} s, and the limit is {limit:g} s{grace}"
        raise errors.invalid([Violation("spec.time_limit", what)])


def apply_update(stored: records_pb2.StoredJob, request: pb.UpdateJobRequest) -> None:
    """Apply an update to a job's record."""
    _copy(stored.job.spec, request)
    add_event(stored, EventKind.UPDATED, ", ".join(path.removeprefix("spec.") for path in request.update_mask.paths))


def changes_estimate(request: pb.UpdateJobRequest) -> bool:
    """Return whether an update affects the job's estimate."""
    return any(path.removeprefix("spec.") in ESTIMATED_BY for path in request.update_mask.paths)


def changes_time_limit(request: pb.UpdateJobRequest) -> bool:
    """Return whether an update affects the time limit."""
    return any(path.removeprefix("spec.") == "time_limit" for path in request.update_mask.paths)


def _copy(spec: job_pb2.JobSpec, request: pb.UpdateJobRequest) -> None:
    for path in request.update_mask.paths:
        name = path.removeprefix("spec.")
        if name in QOS:
            inner = name.removeprefix("qos.")
            setattr(spec.qos, inner, getattr(request.job.spec.qos, inner))
            continue
        spec.ClearField(name)
        new = getattr(request.job.spec, name)
        if name == "labels":
            spec.labels.update(new)
        elif name == "deadline":
            if request.job.spec.HasField("deadline"):
                spec.deadline.CopyFrom(new)
        elif name == "time_limit":
            if request.job.spec.HasField("time_limit"):
                spec.time_limit.CopyFrom(new)
        else:
            setattr(spec, name, new)
