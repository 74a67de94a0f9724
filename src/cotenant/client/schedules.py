"""Schedules in the Python API: their state, and how they are created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.job_file import BadJobs, Draft
from cotenant.cli.jobs.schedule_create import schedule_problem
from cotenant.cli.jobs.schedules import OVERLAPS, schedule_view
from cotenant.cli.jobs.submit import resolve_ids
from cotenant.cli.jobs.submit_order import Step
from cotenant.client.errors import BadField, InvalidArgument
from cotenant.client.times import moment
from cotenant.codec.errors import from_error
from cotenant.v1.schedule_service_pb2 import CreateScheduleRequest, CreateScheduleResponse
from cotenant.v1.schedule_service_pb2 import Schedule as ScheduleMessage

Overlap = Literal["skip", "queue", "replace"]


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """The state of a schedule when it was read. `details` has the keys of `cotenant schedules show --json`."""

    id: str
    name: str
    every: str
    time_zone: str
    overlap: str
    paused: bool
    next_time: datetime | None
    last_time: datetime | None
    last_job: str
    last_result: str
    details: Mapping[str, Any] = field(repr=False)


def schedule_status(message: ScheduleMessage) -> ScheduleStatus:
    """Return the status of a schedule as the queue knows it."""
    details = schedule_view(message)
    return ScheduleStatus(
        id=message.id,
        name=message.spec.name,
        every=message.every,
        time_zone=details["time_zone"],
        overlap=details["overlap"],
        paused=message.paused,
        next_time=moment(message, "next_time"),
        last_time=moment(message, "last_time"),
        last_job=message.last_job_id,
        last_result=message.last_result,
        details=details,
    )


def check_overlap(overlap: str) -> None:
    """Check the rule for due times at which an earlier job has not ended.

    Raises:
        InvalidArgument: there is no such rule.
    """
    if overlap not in OVERLAPS:
        wrong = BadField("overlap", f"must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
        raise InvalidArgument(str(wrong), fields=(wrong,))


async def create_schedule(
    mesh: Mesh, draft: Draft, every: str, time_zone: str, overlap: str, request_id: str
) -> ScheduleMessage:
    """Create a schedule with the dependencies of its job resolved; a refusal names the fields as the caller did."""
    [step] = await resolve_ids(mesh, [Step(draft, 0)])
    made = ScheduleMessage(
        spec=draft.to_wire(step.spec({})), every=every, time_zone=time_zone, overlap=OVERLAPS[overlap]
    )
    try:
        request = CreateScheduleRequest(schedule=made, request_id=request_id)
        answer: CreateScheduleResponse = await mesh.schedules.CreateSchedule(request)
        return answer.schedule
    except grpc.aio.AioRpcError as error:
        violations = schedule_problem(from_error(error)).violations
        if not violations:
            raise
        raise BadJobs("the job", [draft.mistake(one.field, one.description) for one in violations]) from error
