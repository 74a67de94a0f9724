"""Estimates of jobs, believed as far as the record of their predictors goes. No IO.

Forecasts, objectives and explanations use them. The order and placement do not: they get each estimate as the predictor
made it, live as in simulation, and the order earns its trust by a rule of its own (ADR 129).
"""

from __future__ import annotations

from cotenant.codec import estimates, specs
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.lifecycle import Phase
from cotenant.core.prediction.earned_trust import EarnedTrust, JudgedPrediction, JudgedPredictions, source_of
from cotenant.services.queue.jobs.job_record import Record
from cotenant.v1 import predictor_service_pb2


def judged_prediction(record: Record) -> JudgedPrediction | None:
    """Return the predicted and the real run time of a job that has succeeded; None for another, or an unpredicted."""
    if record.phase is not Phase.SUCCEEDED:
        return None
    job = record.job
    if not job.HasField("predicted_run_time"):
        return None
    predicted, ran = specs.seconds(job.predicted_run_time), specs.seconds(job.run_time)
    source = job.prediction_source or "unknown"
    return JudgedPrediction(record.ended_seconds, record.id, source, record.spec.tenant, predicted, ran)


def trusted_estimate(record: Record, judged: JudgedPredictions, *, whole: bool = False) -> Estimate:
    """Return a job's estimate as it was made, limited by the record; without its candidates unless `whole`."""
    message = record.estimate
    if message is None:
        return UNKNOWN
    estimate = estimates.estimate_from_wire(message) if whole else estimates.interval_from_wire(message)
    return trust_of(record, judged).limit(estimate, record.ran_before_estimate_seconds)


def trusted_message(record: Record, judged: JudgedPredictions) -> predictor_service_pb2.Estimate | None:
    """Return a job's estimate as it was made, limited by the record, with the record in it; None if it has none."""
    if record.estimate is None:
        return None
    message = predictor_service_pb2.Estimate()
    message.CopyFrom(record.estimate)
    estimates.write_trusted(message, trust_of(record, judged), record.ran_before_estimate_seconds)
    return message


def trust_of(record: Record, judged: JudgedPredictions) -> EarnedTrust:
    """Return how far the predictor of a job's estimate is believed for its tenant."""
    source = source_of(record.estimate.source) if record.estimate else ""
    return judged.trust(source or "unknown", record.spec.tenant)
