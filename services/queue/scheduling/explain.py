"""Explains in words why a job is in its present state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec import objectives, specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.pre_run import in_words
from cotenant.core.model.refusal import Code, Wait
from cotenant.services.queue.jobs.gpu_speeds import type_in_words
from cotenant.services.queue.jobs.objective_status import expected_start, status_of
from cotenant.services.queue.jobs.prediction_trust import trusted_message
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, resize_in_words
from cotenant.services.queue.scheduling.core_gain import core_gain
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

_WAITS: Mapping[Wait, str] = MappingProxyType(
    {
        Wait.FAIR_SHARE: "its fair share",
        Wait.FRAGMENTATION: "unfragmented resources",
        Wait.CAPACITY: "capacity",
        Wait.DEPENDENCY: "an external condition",
    }
)


def explain(state: State, record: Record, policy: str) -> pb.ExplainJobResponse:
    """Return all that is known of a job's state."""
    (queued,) = state.job_index.of_phases([Phase.QUEUED])
    position = waiting = 0
    for job_id in state.ranked:  # except jobs that have started since
        if job_id in queued:
            waiting += 1
            if job_id == record.id:
                position = waiting
    message, now = state.message(record), time.time()
    level, score = state.level(record.id)
    on_type = type_in_words(record, state.held.values(), state.shapes, now) if record.phase.holds_resources else ""
    sizing = "; ".join(filter(None, (on_type, core_gain(record, now), record.job.attempt.sizing)))
    return pb.ExplainJobResponse(
        job=message,
        summary=_summary(state, record, position, waiting, sizing),
        position=position,
        waiting=waiting,
        events=record.stored.events,
        queue_policy=policy,
        level=level,
        score=score,
        sizing=sizing,
        estimate=estimate_now(state, record, now),
        votes=[pb.OrderVote(name=name, value=value) for name, value in state.votes(record.id).items()],
    )


def add_objectives(state: State, record: Record, answer: pb.ExplainJobResponse) -> None:
    """Add the status of the job's objectives, by the forecast in the answer, or else by the last one."""
    now, start = time.time(), state.expected_starts.get(record.id)
    if answer.HasField("forecast"):
        start = expected_start(answer.forecast, now)
    answer.objectives.extend(map(objectives.status_to_wire, status_of(record, now, state.judged, start)))
    del answer.job.objectives[:]
    answer.job.objectives.extend(answer.objectives)


def estimate_now(state: State, record: Record, now: float) -> predictor_pb2.Estimate | None:
    """Return the estimate, believed as far as its record goes, less what the job has run since."""
    estimate = trusted_message(record, state.judged)
    if estimate is None:
        return None
    ran = record.ran_seconds(now) - record.ran_before_estimate_seconds
    for name in ("remaining", "remaining_p10", "remaining_p90"):
        if estimate.HasField(name):
            left = max(0.0, specs.seconds(getattr(estimate, name)) - ran)
            getattr(estimate, name).FromNanoseconds(int(left * 1e9))
    return estimate


def _replicas(state: State, record: Record) -> str:
    """Return the replicas of a running elastic job, why it has that number, and its last resize."""
    role = record.spec.roles[record.spec.elastic_role or 0]
    note = record.resize_note or state.keeps_replicas
    if not note.startswith("replicas"):
        note = "; ".join(filter(None, (f"replicas: {record.elastic_replicas} of {role.elastic}", note)))
    resized = (one for one in record.job.past_attempts if one.stop_reason == job_pb2.STOP_REASON_RESIZED)
    if last := max(resized, key=lambda one: one.number, default=None):
        ago = max(0.0, time.time() - specs.seconds(last.end_time))
        note += f"; last resized {ago:.0f} s ago: {resize_in_words(record.job.spec, last)}"
    return note


def _of_its_node(phase: Phase, progress: job_pb2.Progress) -> str:
    """Return what its node does with a job in this phase, in words; "" if it is nothing special."""
    if phase is Phase.STARTING:
        return progress.launch
    return f"throttled by its node: {progress.throttle}" if progress.throttle else ""


def _summary(state: State, record: Record, position: int, waiting: int, sizing: str) -> str:
    job, phase = record.job, record.phase
    nodes = ", ".join(allocation.node_id for allocation in job.attempt.allocations)
    if phase is Phase.QUEUED:
        refusal, _ = state.refusal(record)
        if refusal.code in (Code.DEPENDENCY, Code.ARRAY_LIMIT):
            return f"waits for other jobs: {refusal}; {refusal.remedy}"
        if refusal.code is Code.BEGIN_TIME:
            return f"waits for its begin time: {refusal}"
        if refusal.code is Code.SECRETS:
            return f"waits for a secret: {refusal}; {refusal.remedy}"
        place = f"number {position} of {waiting} waiting" if position else "not ordered yet"
        first = f"before its gang it needs {in_words(record.spec.pre_run_seconds or 0.0)}" if record.in_pre_run else ""
        waits = f"waits ({place}) for {_WAITS[refusal.wait]}: {refusal}"
        return "; ".join(filter(None, (waits, refusal.remedy, first)))
    if phase in (Phase.STARTING, Phase.RUNNING):
        parts = [f"{phase.value} on {nodes}, attempt {job.attempt.number}", sizing]
        if record.spec.elastic:
            parts.append(_replicas(state, record))
        if record.in_pre_run:
            parts.insert(1, f"{in_words(record.spec.pre_run_seconds or 0.0)}, before its gang is assembled")
        else:
            parts.insert(1, _of_its_node(phase, job.progress))
        return "; ".join(filter(None, parts))
    if phase is Phase.STOPPING and job.attempt.stop_reason == job_pb2.STOP_REASON_RESIZED:
        return f"is stopping on {nodes} to go on from its checkpoint: {resize_in_words(job.spec, job.attempt)}"
    if phase is Phase.STOPPING:
        why = specs.STOP_REASONS.names.get(job.attempt.stop_reason, "").replace("_", " ")
        detail = f": it {job.attempt.stop_detail}" if job.attempt.stop_detail else ""
        return f"is stopping on {nodes}" + (f" because it was {why}{detail}" if why else "")
    if phase is Phase.SUSPENDED:
        return "is suspended by its owner; `cotenant resume` requeues it"
    return phase.value + (f": {job.phase_reason}" if job.phase_reason else "")
