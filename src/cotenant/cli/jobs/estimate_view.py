"""Estimates of the predictor as text and for `--json`. Unknown values are null; `source` explains why."""

from __future__ import annotations

from collections.abc import Iterator

from cotenant.cli import units
from cotenant.cli.views import View
from cotenant.codec.objectives import latency_from_wire
from cotenant.codec.specs import seconds
from cotenant.core.model.estimate import Latency
from cotenant.core.model.refusal import plural
from cotenant.v1.predictor_service_pb2 import CandidateEstimate, Estimate, PredictionRecord

Pairs = Iterator[tuple[str, str]]


def percent(share: float) -> str:
    """Return a share as a percentage for a table.

    >>> percent(0.5), percent(0.999), percent(1.0), percent(0.0)
    ('50 %', '99.9 %', '100 %', '0 %')
    """
    return f"{100 * share:.1f} %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def estimate_view(estimate: Estimate) -> View:
    """Return an estimate of a job."""
    return {
        "predictable": estimate.predictable,
        "confidence": estimate.confidence,
        "remaining_seconds": _seconds(estimate, "remaining"),
        "remaining_p10_seconds": _seconds(estimate, "remaining_p10"),
        "remaining_p90_seconds": _seconds(estimate, "remaining_p90"),
        "cores_useful": estimate.cores_useful or None,
        "cores_useful_confidence": estimate.cores_useful_confidence,
        "candidates": [candidate_view(one) for one in estimate.candidates],
        "source": estimate.source,
        "record": _record_view(estimate.record) if estimate.HasField("record") else None,
    }


def _record_view(record: PredictionRecord) -> View:
    """Return the record of a predictor, by which an estimate was limited."""
    return {
        "source": record.source,
        "tenant": record.tenant or None,
        "jobs": record.jobs,
        "median_factor": record.median_factor or None,
        "within_twice": record.within_twice if record.jobs else None,
        "ratio_p10": record.ratio_p10,
        "ratio_p90": record.ratio_p90,
        "confidence_max": record.confidence_max,
        "summary": record.summary,
    }


def candidate_view(candidate: CandidateEstimate) -> View:
    """Return the estimate of a job for one candidate allocation."""
    return {
        "rate_per_second": candidate.rate_per_second or None,
        "remaining_seconds": _seconds(candidate, "remaining"),
        "confidence": candidate.confidence,
        "latency": _latency_view(latency_from_wire(candidate.latency)) if candidate.HasField("latency") else None,
    }


def estimate_card(view: View) -> Pairs:
    """Yield an estimate as text."""
    if view["predictable"]:
        yield "remaining", f"{remaining(view)}, confidence {percent(view['confidence'])}"
    else:
        yield "remaining", "unknown"
    if view["cores_useful"]:
        sure = percent(view["cores_useful_confidence"]) if view["cores_useful_confidence"] else "unknown"
        yield "useful cores", f"{view['cores_useful']} per replica (θ), confidence {sure}; more cores do not help"
    latencies = [one["latency"] for one in view["candidates"] if one["latency"]]
    if latencies:
        yield "latency", latency_words(latencies[0])
        yield "replicas needed", _needed(latencies[0])
    yield "estimated by", view["source"]
    if view["record"]:
        yield "record", view["record"]["summary"]


def remaining(view: View) -> str:
    """Return a remaining time with its interval.

    >>> remaining({"remaining_seconds": 60.0, "remaining_p10_seconds": 50.0, "remaining_p90_seconds": 90.0})
    '1m00s (50s to 1m30s)'
    """
    if view["remaining_seconds"] is None:
        return ""
    low, high = view.get("remaining_p10_seconds"), view.get("remaining_p90_seconds")
    between = f" ({units.short_seconds(low)} to {units.short_seconds(high)})" if low is not None and high else ""
    return units.short_seconds(view["remaining_seconds"]) + between


def latency_words(view: View) -> str:
    """Return a service's latency as text.

    >>> latency_words({"replicas": 2, "keeps_up": False, "confidence": 0.5})
    'unbounded: 2 replicas do not keep up, confidence 50 %'
    """
    what, sure = plural(view["replicas"], "replica"), f"confidence {percent(view['confidence'])}"
    if not view["keeps_up"]:
        return f"unbounded: {what} {'does' if view['replicas'] == 1 else 'do'} not keep up, {sure}"
    names = (("mean at most", "mean_seconds_max"), ("95th percentile", "p95_seconds"), ("99th", "p99_seconds"))
    parts = [f"{name} {_short(view[key])}" for name, key in names if view[key] is not None]
    if view["promised_seconds"] is not None:
        parts.append(f"at the objective's percentile {_short(view['promised_seconds'])}")
    return f"{', '.join(parts)}, for {what}; {sure}"


def _needed(view: View) -> str:
    """Return how many replicas meet the latency objective; "" if there is none or no number meets it."""
    if view["replicas_needed"] is None:
        return ""
    return f"{view['replicas_needed']} to meet the latency objective"


def _latency_view(latency: Latency) -> View:
    return {
        "replicas": latency.replicas,
        "keeps_up": latency.p99_seconds is not None,
        "mean_seconds_max": latency.mean_seconds_max,
        "p95_seconds": latency.p95_seconds,
        "p99_seconds": latency.p99_seconds,
        "promised_seconds": latency.promised_seconds,
        "replicas_needed": latency.replicas_needed,
        "confidence": latency.confidence,
    }


def _short(latency_seconds: float) -> str:
    """Return a latency with three digits.

    >>> _short(0.0234), _short(2.5)
    ('23.4 ms', '2.5 s')
    """
    return f"{1000 * latency_seconds:.3g} ms" if latency_seconds < 1 else f"{latency_seconds:.3g} s"


def _seconds(message: Estimate | CandidateEstimate, field: str) -> float | None:
    return seconds(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]  # a field's name
