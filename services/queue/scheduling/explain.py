"""Why a job stands where it stands, in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.pre_run import in_words
from cotenant.core.model.refusal import Code, Wait
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

_WAITS: Mapping[Wait, str] = MappingProxyType(
    {
        Wait.FAIR_SHARE: "its fair share",
        Wait.FRAGMENTATION: "a place that is not in fragments",
        Wait.CAPACITY: "capacity",
        Wait.DEPENDENCY: "something outside the cluster",
    }
)


def explain(state: State, record: Record, policy: str) -> pb.ExplainJobResponse:
    """Gather all that is known of a job's standing."""
    (queued,) = state.listing.of_phases([Phase.QUEUED])
    position = waiting = 0
    for job_id in state.ranked:  # without those that have started since
        if job_id in queued:
            waiting += 1
            if job_id == record.id:
                position = waiting
    message = state.message(record)
    level, score = state.level(record.id)
    estimate = estimate_now(record, time.time())
    return pb.ExplainJobResponse(
        job=message,
        summary=_summary(state, record, position, waiting),
        position=position,
        waiting=waiting,
        events=record.stored.events,
        queue_policy=policy,
        level=level,
        score=score,
        sizing=record.job.attempt.sizing,
        estimate=estimate,
    )


def estimate_now(record: Record, now: float) -> predictor_pb2.Estimate | None:
    """What the predictor said, less what the job has run since."""
    if record.estimate is None:
        return None
    estimate = predictor_pb2.Estimate()
    estimate.CopyFrom(record.estimate)
    ran = ran_seconds(record, now) - record.ran_before_estimate_seconds
    for name in ("remaining", "remaining_p10", "remaining_p90"):
        if estimate.HasField(name):
            left = max(0.0, specs.seconds(getattr(estimate, name)) - ran)
            getattr(estimate, name).FromNanoseconds(int(left * 1e9))
    return estimate


def ran_seconds(record: Record, now: float) -> float:
    """How long a job has run, over all attempts, the running one included."""
    attempt = record.job.attempt
    runs = attempt.HasField("start_time") and not attempt.HasField("end_time")
    return specs.seconds(record.job.run_time) + (max(0.0, now - specs.seconds(attempt.start_time)) if runs else 0)


def _summary(state: State, record: Record, position: int, waiting: int) -> str:
    job, phase = record.job, record.phase
    nodes = ", ".join(allocation.node_id for allocation in job.attempt.allocations)
    if phase is Phase.QUEUED:
        refusal, _ = state.refusal(record)
        if refusal.code in (Code.DEPENDENCY, Code.ARRAY_LIMIT):
            return f"waits for other jobs: {refusal}; {refusal.remedy}"
        place = f"number {position} of {waiting} waiting" if position else "not ordered yet"
        first = (
            f"it asks for {in_words(record.spec.pre_run_seconds or 0.0)}, before its gang" if record.pre_runs else ""
        )
        waits = f"waits ({place}) for {_WAITS[refusal.wait]}: {refusal}"
        return "; ".join(filter(None, (waits, refusal.remedy, first)))
    if phase in (Phase.STARTING, Phase.RUNNING):
        told = [f"{phase.value} on {nodes}, attempt {job.attempt.number}", job.attempt.sizing]
        if record.pre_runs:
            told.insert(1, f"{in_words(record.spec.pre_run_seconds or 0.0)}, before its gang is assembled")
        elif phase is Phase.RUNNING and job.progress.throttle:
            told.insert(1, f"held back by its node: {job.progress.throttle}")
        return "; ".join(filter(None, told))
    if phase is Phase.STOPPING:
        why = specs.STOP_REASONS.names.get(job.attempt.stop_reason, "").replace("_", " ")
        detail = f": it {job.attempt.stop_detail}" if job.attempt.stop_detail else ""
        return f"is stopping on {nodes}" + (f" because it was {why}{detail}" if why else "")
    if phase is Phase.SUSPENDED:
        return "is held back by its owner; `cotenant resume` lets it queue again"
    return phase.value + (f": {job.phase_reason}" if job.phase_reason else "")
