"""The status of jobs' objectives, from their records, their estimates and the last start forecast. No IO."""

from __future__ import annotations

import math
from typing import NamedTuple

from cotenant.codec import objectives, specs
from cotenant.codec.estimates import estimate_from_wire
from cotenant.core.model.estimate import Estimate, as_of
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.objective import Finish, JobFacts, ObjectiveStatus, has_objective, remedy_of, statuses
from cotenant.core.prediction.earned_trust import JudgedPredictions
from cotenant.core.prediction.remaining_time import RemainingTime, remaining_time_of
from cotenant.core.sizing.replica_sizing import expected_latency
from cotenant.services.queue.jobs.job_record import Record
from cotenant.services.queue.jobs.prediction_trust import trusted_estimate
from cotenant.v1 import job_pb2

NO_RUN_TIME = "its run time is not known"
NO_START = "its start is not forecast"


class ExpectedStart(NamedTuple):
    """When a waiting job is expected to start, in unix seconds, and to finish by the medians; infinity: unknown."""

    seconds: float
    p10_seconds: float
    p90_seconds: float
    finish_seconds: float = math.inf


def expected_start(forecast: job_pb2.StartForecast, now: float, *, not_before: float = 0.0) -> ExpectedStart | None:
    """Return a start forecast in unix seconds, but none before a time; None if the start is beyond its horizon."""
    if not forecast.HasField("start"):
        return None
    start = specs.seconds(forecast.start)
    low, high = (
        specs.seconds(getattr(forecast, name)) if forecast.HasField(name) else start
        for name in ("start_p10", "start_p90")
    )
    finish = specs.seconds(forecast.finish) if forecast.HasField("finish") else math.inf
    later = max(0.0, not_before - (now + start))
    return ExpectedStart(
        now + start + later, max(not_before, now + low), max(not_before, now + high), now + finish + later
    )


def status_of(
    record: Record, now: float, judged: JudgedPredictions, start: ExpectedStart | None = None
) -> tuple[ObjectiveStatus, ...]:
    """Return the status of each objective of a job; `start` is the last forecast of a waiting job's start."""
    return statuses(facts_of(record, now, judged, start), now) if has_objective(record.spec) else ()


def write_status(
    message: job_pb2.Job, record: Record, now: float, judged: JudgedPredictions, start: ExpectedStart | None = None
) -> None:
    """Write the status of each objective into a job's message."""
    if has_objective(record.spec):
        message.objectives.extend(map(objectives.status_to_wire, status_of(record, now, judged, start)))


def status_with_remedy(
    record: Record, now: float, judged: JudgedPredictions, start: ExpectedStart | None
) -> list[job_pb2.ObjectiveStatus]:
    """Return the status of each objective of a job that is not submitted yet, with what would help."""
    facts = facts_of(record, now, judged, start)
    return [
        objectives.status_to_wire(one, remedy_of(one, facts, now, start.seconds if start else None))
        for one in statuses(facts, now)
    ]


def facts_of(record: Record, now: float, judged: JudgedPredictions, start: ExpectedStart | None) -> JobFacts:
    """Return what is known about a job's objectives; estimates are believed as far as their record goes."""
    phase, qos = record.phase, record.spec.qos
    estimate = trusted_estimate(record, judged, whole=bool(qos.rate_min_per_second or qos.latency_seconds))
    finish, why = _finish(record, phase, estimate, now, start)
    return JobFacts(
        phase,
        record.spec.deadline_seconds,
        record.spec.qos,
        ended_seconds=record.ended_seconds if phase.ended else None,
        finish=finish,
        rate_per_second=_rate(record, phase, estimate),
        latency_seconds=_latency(record, phase, estimate),
        batch_seconds=_batch(record, phase),
        unforecast=why,
    )


def _finish(
    record: Record, phase: Phase, estimate: Estimate, now: float, start: ExpectedStart | None
) -> tuple[Finish | None, str]:
    """Return when a job is expected to finish, or why that is not known."""
    if record.spec.deadline_seconds is None or phase.ended:
        return None, ""
    if phase is Phase.SUSPENDED:
        return None, "it is suspended"
    if record.in_pre_run:
        return None, "its pre-run has not passed"
    rest = _rest(record, estimate, now)
    if rest is None:
        return None, NO_RUN_TIME
    if phase.holds_resources:
        return Finish(now + rest.seconds, now + rest.p10_seconds, now + rest.p90_seconds), ""
    if start is None:
        return None, NO_START
    first = max(now, start.seconds)
    finish = first + rest.seconds if math.isinf(start.finish_seconds) else max(first, start.finish_seconds)
    low, high = max(now, start.p10_seconds) + rest.p10_seconds, max(now, start.p90_seconds) + rest.p90_seconds
    return Finish(finish, min(low, finish), max(high, finish)), ""


def _rest(record: Record, estimate: Estimate, now: float) -> RemainingTime | None:
    """Return a job's remaining run time; None if nothing is known of it."""
    ran = record.ran_seconds(now) if record.phase.holds_resources else record.run_seconds
    expected = record.spec.expected_seconds
    present = as_of(estimate, ran - record.ran_before_estimate_seconds)
    predicted = present.predictable and present.remaining_seconds
    if not predicted and (expected is None or expected <= ran):
        return None
    return remaining_time_of(present, ran, expected_seconds=expected)


def _rate(record: Record, phase: Phase, estimate: Estimate) -> float | None:
    """Return the rate that is measured, was reached on average, or is expected at best; None if unknown."""
    if not record.spec.qos.rate_min_per_second:
        return None
    if phase.ended:
        steps, ran = record.job.progress.step, record.run_seconds
        return steps / ran if steps and ran else None
    if phase.holds_resources:
        progress = record.job.progress
        since = specs.seconds(record.job.attempt.assign_time)
        measured = not progress.phase and specs.seconds(progress.update_time) >= since
        return progress.rate_per_second or None if measured else None
    return max((one.rate_per_second for one in estimate.candidates if one.rate_per_second), default=None)


def _batch(record: Record, phase: Phase) -> float | None:
    """Return how long the last batch of a service took; None if unknown, or its latency is no objective."""
    if not record.spec.qos.latency_seconds or not (phase.holds_resources or phase.ended):
        return None
    progress = record.job.progress
    return specs.seconds(progress.batch_time) if progress.batch_size > 0 else None


def _latency(record: Record, phase: Phase, estimate: Estimate) -> float | None:
    """Return the latency at the objective's percentile; None if unknown, or not an objective."""
    if not record.spec.qos.latency_seconds:
        return None
    if phase.ended:
        if not record.job.HasField("ended_latency"):
            return None
        kept = specs.seconds(record.job.ended_latency)
        return kept if kept < specs.DURATION_SECONDS_MAX else math.inf
    return expected_latency(record.spec.qos, estimate, record.requested_spec.replicas)


def latency_now(record: Record) -> float | None:
    """Return the latency of a running service at its objective's percentile; None if unknown, or not an objective."""
    if not record.estimate or not record.phase.holds_resources:
        return None
    return _latency(record, record.phase, estimate_from_wire(record.estimate))
