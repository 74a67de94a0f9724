"""Encodes and decodes objectives and their status, latency estimates and candidate allocations."""

from __future__ import annotations

from dataclasses import replace

from cotenant.core.model.estimate import Candidate, Latency
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.objective import ObjectiveStatus
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as pb

FIGURES = (
    ("mean_max_seconds", "mean_seconds_max"),
    ("p95_seconds", "p95_seconds"),
    ("p99_seconds", "p99_seconds"),
    ("promised_seconds", "promised_seconds"),
)
BATCH_TIME = ("per_request_seconds", "fixed_seconds")
ALLOCATION = ("cores", "gpu_milli", "nodes", "gpu_type", "workers", "servers", "server_cores")


def goal_from_wire(message: job_pb2.LossGoal) -> LossGoal:
    """Decode a training's loss goal."""
    return LossGoal(message.target if message.HasField("target") else None, message.fall_steps, message.fall_min)


def status_to_wire(status: ObjectiveStatus, remedy: str = "") -> job_pb2.ObjectiveStatus:
    """Encode the status of an objective, with what would help."""
    return job_pb2.ObjectiveStatus(
        kind=job_pb2.ObjectiveKind.Value(f"OBJECTIVE_KIND_{status.kind.name}"),
        state=job_pb2.ObjectiveState.Value(f"OBJECTIVE_STATE_{status.state.name}"),
        final=status.final,
        target=status.target,
        value=status.value,
        margin=status.margin,
        detail=status.detail,
        remedy=remedy,
    )


def latency_from_wire(message: pb.LatencyEstimate) -> Latency:
    """Decode a service's latency estimate."""
    return Latency(
        replicas=message.replicas,
        replicas_needed=message.replicas_needed or None,
        confidence=message.confidence,
        per_request_seconds=message.per_request_seconds if message.HasField("per_request_seconds") else None,
        fixed_seconds=message.fixed_seconds if message.HasField("fixed_seconds") else None,
        **{ours: getattr(message, theirs) or None for theirs, ours in FIGURES},
    )


def write_latency(latency: Latency, message: pb.LatencyEstimate) -> None:
    """Encode a service's latency estimate into its message."""
    message.replicas = latency.replicas
    message.replicas_needed = latency.replicas_needed or 0
    message.confidence = latency.confidence
    for name in BATCH_TIME:
        if (seconds := getattr(latency, name)) is not None:
            setattr(message, name, seconds)
    for theirs, ours in FIGURES:
        setattr(message, theirs, getattr(latency, ours) or 0.0)


def candidate_to_wire(allocation: Candidate) -> pb.CandidateAllocation:
    """Encode a candidate allocation."""
    return pb.CandidateAllocation(**{name: getattr(allocation, name) for name in ALLOCATION})


def candidate_from_wire(message: pb.CandidateAllocation) -> Candidate:
    """Decode a candidate allocation; without a number of nodes it is on one node."""
    allocation = Candidate(**{name: getattr(message, name) for name in ALLOCATION})
    return allocation if allocation.nodes else replace(allocation, nodes=1)
