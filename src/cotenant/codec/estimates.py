"""Encodes and decodes estimates."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from cotenant.codec import objectives, specs
from cotenant.core.model.estimate import CandidateEstimate, Estimate
from cotenant.core.prediction.earned_trust import EarnedTrust
from cotenant.v1 import predictor_service_pb2


def estimate_from_wire(message: predictor_service_pb2.Estimate) -> Estimate:
    """Decode an estimate."""
    return Estimate(
        predictable=message.predictable,
        confidence=message.confidence,
        remaining_seconds=_seconds_or_none(message, "remaining"),
        remaining_p10_seconds=_seconds_or_none(message, "remaining_p10"),
        remaining_p90_seconds=_seconds_or_none(message, "remaining_p90"),
        cores_useful=message.cores_useful or None,
        candidates=tuple(
            CandidateEstimate(
                one.rate_per_second or None,
                _seconds_or_none(one, "remaining"),
                one.confidence,
                objectives.latency_from_wire(one.latency) if one.HasField("latency") else None,
                objectives.candidate_from_wire(one.allocation) if one.HasField("allocation") else None,
            )
            for one in message.candidates
        ),
        source=message.source,
        cores_useful_confidence=message.cores_useful_confidence,
    )


def estimate_to_wire(job_id: str, estimate: Estimate) -> predictor_service_pb2.Estimate:
    """Encode a job's estimate."""
    message = predictor_service_pb2.Estimate(
        job_id=job_id,
        predictable=estimate.predictable,
        confidence=estimate.confidence,
        cores_useful=estimate.cores_useful or 0,
        cores_useful_confidence=estimate.cores_useful_confidence,
        source=estimate.source,
        remaining=_duration_or_none(estimate.remaining_seconds),
        remaining_p10=_duration_or_none(estimate.remaining_p10_seconds),
        remaining_p90=_duration_or_none(estimate.remaining_p90_seconds),
    )
    for one in estimate.candidates:
        written = message.candidates.add(
            rate_per_second=one.rate_per_second or 0.0,
            remaining=_duration_or_none(one.remaining_seconds),
            confidence=one.confidence,
        )
        if one.latency:
            objectives.write_latency(one.latency, written.latency)
        if one.allocation:
            written.allocation.CopyFrom(objectives.candidate_to_wire(one.allocation))
    return message


def write_trusted(message: predictor_service_pb2.Estimate, trust: EarnedTrust, ran_seconds: float) -> None:
    """Limit an estimate in place by its predictor's record, and write the record into it.

    `ran_seconds` is for how long the job had run in total when it was estimated.
    """
    limited = trust.limit(interval_from_wire(message), ran_seconds)
    message.confidence = limited.confidence
    for name in ("remaining_p10", "remaining_p90"):
        seconds = getattr(limited, f"{name}_seconds")
        if seconds is not None:
            getattr(message, name).CopyFrom(specs.duration(min(seconds, specs.DURATION_SECONDS_MAX)))
    if message.predictable:
        message.record.CopyFrom(trust_to_wire(trust))


def interval_from_wire(message: predictor_service_pb2.Estimate) -> Estimate:
    """Decode the remaining time of an estimate, without its candidates, which may be many."""
    return Estimate(
        message.predictable,
        message.confidence,
        _seconds_or_none(message, "remaining"),
        _seconds_or_none(message, "remaining_p10"),
        _seconds_or_none(message, "remaining_p90"),
        source=message.source,
    )


def trust_to_wire(trust: EarnedTrust) -> predictor_service_pb2.PredictionRecord:
    """Encode a predictor's record."""
    message = predictor_service_pb2.PredictionRecord(
        source=trust.source,
        tenant=trust.tenant,
        ratio_p10=trust.ratio_p10,
        ratio_p90=trust.ratio_p90,
        confidence_max=trust.confidence_max,
        summary=trust.in_words(),
    )
    if trust.record:
        message.jobs = trust.record.jobs
        message.median_factor, message.within_twice = trust.record.median_factor, trust.record.within_twice
    return message


def _seconds_or_none(message: Any, field: str) -> float | None:
    return specs.seconds(getattr(message, field)) if message.HasField(field) else None


def _duration_or_none(value: float | None) -> Duration | None:
    return None if value is None else specs.duration(value)


def core_relevant_parts(estimate: predictor_service_pb2.Estimate) -> tuple[object, ...]:
    """Return the parts of an estimate that affect cores, rounded: remaining times change all the time, and a little
    noise is not worth a commit."""
    rates = [float(f"{candidate.rate_per_second:.2g}") for candidate in estimate.candidates]
    return estimate.predictable, estimate.cores_useful, round(estimate.cores_useful_confidence, 1), rates
