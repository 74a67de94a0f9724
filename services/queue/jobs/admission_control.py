"""Validates jobs at submission; names all violations at once."""

from __future__ import annotations

import time

from cotenant.codec import errors, specs
from cotenant.core.model.job import QUEUE_DEFAULT, JobSpec
from cotenant.core.model.limits import ARRAY_BYTES_MAX, SPEC_BYTES_MAX
from cotenant.core.model.validation import Violation, shown
from cotenant.core.placement import unschedulable
from cotenant.core.spelling import did_you_mean
from cotenant.services.queue.jobs.archived_jobs import NOTHING, ArchivedDependencies
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2

NEAR_MAX = 3  # unknown dependencies for which similar ids are looked up: each takes some milliseconds


def accept(
    state: State, message: job_pb2.JobSpec, before: ArchivedDependencies = NOTHING, *, array: bool | None = None
) -> JobSpec:
    """Return the spec of a job that the caller submits or asks about; `before` holds its archived dependencies.

    `array` says whether the spec must be that of an array, or must not; None allows both.

    Raises:
        Problem: INVALID_ARGUMENT naming each bad field, PERMISSION_DENIED for a tenant that is not the caller's, or
            FAILED_PRECONDITION if no known node could ever run the job.
    """
    view = View(state)
    message = view.tenant_of(message)
    if message.ByteSize() > SPEC_BYTES_MAX:
        raise errors.invalid(
            [Violation("spec", f"has {message.ByteSize()} bytes; at most {SPEC_BYTES_MAX} are allowed")]
        )
    spec = _accept_spec(message, array)
    if spec.queue != QUEUE_DEFAULT:
        near = did_you_mean(spec.queue, [QUEUE_DEFAULT])
        raise errors.invalid([Violation("spec.queue", f"unknown queue {spec.queue!r}{near}")])
    if wrong := _context_violations(view, spec, message, before):
        raise errors.invalid(wrong)
    if refusal := unschedulable.never_fits(spec, state.shapes, elastic=state.elastic):
        raise errors.failed_precondition("NEVER_FITS", refusal.detail, remedy=refusal.remedy)
    return spec


def _accept_spec(message: job_pb2.JobSpec, array: bool | None) -> JobSpec:
    """Return a valid spec.

    Raises:
        Problem: INVALID_ARGUMENT naming each bad field, also array fields that are missing or misplaced.
    """
    wrong: list[Violation] = []
    if message.HasField("array_task"):
        wrong.append(Violation("spec.array_task", "is set by the queue; to submit an array, use CreateArray"))
    if array is False and message.HasField("array"):
        wrong.append(Violation("spec.array", "a job has no array; to create an array of jobs, use CreateArray"))
    if array and not message.HasField("array"):
        wrong.append(Violation("spec.array", "an array needs its indices; to create a single job, use CreateJob"))
    wrong += objective_check_violations(message)
    try:
        spec = specs.accept_spec(message, now=time.time())
    except errors.Problem as problem:
        named = {violation.field for violation in wrong}
        raise errors.invalid([*wrong, *(one for one in problem.violations if one.field not in named)]) from None
    if wrong:
        raise errors.invalid(wrong)
    return spec


def objective_check_violations(message: job_pb2.JobSpec) -> list[Violation]:
    """Return why the objectives of a job cannot be required at submission; only then, for they may be changed later."""
    if message.objective_check != job_pb2.OBJECTIVE_CHECK_REQUIRE:
        return []
    field = "spec.objective_check"
    if message.HasField("array"):
        return [Violation(field, "require is for single jobs: the jobs of an array are not forecast together")]
    if not (message.HasField("deadline") or message.qos.rate_min_per_second or message.qos.latency_seconds):
        return [
            Violation(field, "require needs an objective: a deadline, a minimum rate (qos.rate) or a latency target")
        ]
    return []


def _context_violations(
    view: View, spec: JobSpec, message: job_pb2.JobSpec, before: ArchivedDependencies
) -> list[Violation]:
    """Return unknown dependencies, and an array that is too large."""
    wrong: list[Violation] = []
    for place, one in enumerate(spec.dependencies):
        if not view.knows(one.job_id) and one.job_id not in before.ended and one.job_id not in before.unknowable:
            near = did_you_mean(one.job_id, view.similar_ids()) if len(wrong) < NEAR_MAX else ""
            what = f"unknown job or array {shown(one.job_id)}{near}"
            wrong.append(Violation(f"spec.dependencies[{place}].id", what))
    if spec.array and (size := message.ByteSize() * len(spec.array.indices)) > ARRAY_BYTES_MAX:
        wrong.append(Violation("spec.array", f"has {size} bytes in total; at most {ARRAY_BYTES_MAX} are allowed"))
    return wrong
