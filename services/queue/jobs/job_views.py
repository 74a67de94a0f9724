"""Views of a job: what BASIC leaves out. No other place knows."""

from __future__ import annotations

from cotenant.codec.errors import Violation
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

KNOWN = tuple(pb.JobView.values())


def view_violations(view: pb.JobView.ValueType) -> list[Violation]:
    """Return what is wrong with the view in a request.

    >>> [one.description for one in view_violations(7)]
    ['7 is not a JobView; BASIC is 1, FULL is 2']
    """
    if view in KNOWN:
        return []
    return [
        Violation("view", f"{int(view)} is not a JobView; BASIC is {pb.JOB_VIEW_BASIC}, FULL is {pb.JOB_VIEW_FULL}")
    ]


def is_basic(view: pb.JobView.ValueType, *, unset: pb.JobView.ValueType = pb.JOB_VIEW_BASIC) -> bool:
    """Return whether a request asks for the BASIC view; `unset` is what the method returns by default."""
    return (view or unset) == pb.JOB_VIEW_BASIC


def omit_large(job: job_pb2.Job) -> None:
    """Clear what the BASIC view leaves out."""
    for field in ("command", "environment"):
        job.spec.ClearField(field)
    for role in job.spec.roles:
        role.ClearField("command")
    if job.spec.HasField("submit_directory"):
        job.spec.submit_directory.ClearField("environment")
    job.ClearField("past_attempts")
