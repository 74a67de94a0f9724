"""Admission by objectives: whether a job that is submitted now is expected to keep them.

The answer is a start forecast with the job among the waiting ones, as `whatif` makes it. It takes up to a second,
mostly in placement; one is made at a time, and a job that only wants a warning does not wait long for its turn.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from cotenant import telemetry
from cotenant.codec import errors
from cotenant.core.model.job import JobSpec, ObjectiveCheck
from cotenant.core.model.objective import has_objective
from cotenant.core.model.validation import Violation
from cotenant.security.identity import caller
from cotenant.services.queue.api.what_if import judge_objectives
from cotenant.services.queue.jobs.objective_status import status_with_remedy
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import new_record
from cotenant.services.queue.scheduling.scheduler import Scheduler
from cotenant.v1 import job_pb2

WARN_SECONDS, REQUIRE_SECONDS = 2.5, 8.0  # for the turn and the forecast; a call takes 10 s at most
UNREACHABLE, UNKNOWN = "OBJECTIVE_UNREACHABLE", "OBJECTIVE_UNKNOWN"
FIELDS = {
    job_pb2.OBJECTIVE_KIND_DEADLINE: "spec.deadline",
    job_pb2.OBJECTIVE_KIND_RATE: "spec.qos.rate_min_per_second",
    job_pb2.OBJECTIVE_KIND_LATENCY: "spec.qos.latency_seconds",
}

CHECKED = telemetry.counter(
    "cotenant.queue.objectives_checked", "{objective}", "Objectives forecast at submission, by kind and outcome."
)


class ObjectiveAdmission:
    """Forecasts the objectives of submitted jobs, and refuses those that require what is not expected."""

    def __init__(self, state: State, scheduler: Scheduler) -> None:
        self._state, self._scheduler = state, scheduler
        self._turn = asyncio.Lock()

    def wanted(self, spec: JobSpec) -> bool:
        """Return whether a job is to be checked; the jobs of an array are not forecast together."""
        return spec.objective_check is not ObjectiveCheck.IGNORE and has_objective(spec) and spec.array is None

    async def check(self, spec: JobSpec) -> list[job_pb2.ObjectiveStatus]:
        """Return what is expected of a job's objectives.

        Raises:
            Problem: FAILED_PRECONDITION, with OBJECTIVE_UNREACHABLE or OBJECTIVE_UNKNOWN as the reason, naming each
                required objective that is not expected to be kept.
        """
        required = spec.objective_check is ObjectiveCheck.REQUIRE
        record = new_record("submitted", spec, caller().name, "")
        try:
            async with asyncio.timeout(REQUIRE_SECONDS if required else WARN_SECONDS), self._turn:
                found = await judge_objectives(self._state, self._scheduler, record)
        except TimeoutError:
            found = status_with_remedy(record, time.time(), self._state.judged, None)
        for one in found:
            CHECKED.add(kind=_word(job_pb2.ObjectiveKind, one.kind), outcome=_word(job_pb2.ObjectiveState, one.state))
        if required and (lacking := [one for one in found if one.state != job_pb2.OBJECTIVE_STATE_MET]):
            raise _refusal(lacking)
        return found


def _word(enum: Any, number: int) -> str:
    """Return the word for a number of an enum, as metrics have it: "at_risk" for OBJECTIVE_STATE_AT_RISK."""
    return str(enum.Name(number)).split("_", 2)[2].lower()


def _refusal(lacking: list[job_pb2.ObjectiveStatus]) -> errors.Problem:
    """Return the error for required objectives that are not expected to be kept."""
    surely = [one for one in lacking if one.state != job_pb2.OBJECTIVE_STATE_UNKNOWN]
    reason = UNREACHABLE if surely else UNKNOWN
    what = "is not expected to be kept" if surely else "cannot be forecast"
    return errors.Problem(
        grpc.StatusCode.FAILED_PRECONDITION,
        reason,
        f"a required objective {what}: {'; '.join(one.detail for one in lacking)}",
        metadata={"remedy": "; ".join(dict.fromkeys(one.remedy for one in lacking if one.remedy))},
        violations=[Violation(FIELDS[one.kind], f"{one.detail}; what would help: {one.remedy}") for one in lacking],
    )
