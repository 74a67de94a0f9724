"""Validates a predictor's answer: a third-party predictor may return anything."""

from __future__ import annotations

import math

from cotenant.core.model.estimate import Estimate, Latency


def invalid_reason(estimate: Estimate, candidates: int) -> str:
    """Return what in a predictor's answer is invalid; "" if it is valid.

    >>> invalid_reason(Estimate(True, 0.9, remaining_seconds=math.nan), candidates=0)
    'remaining_seconds is nan'
    """
    if not 0 <= estimate.confidence <= 1:
        return f"confidence is {estimate.confidence}"
    if not 0 <= estimate.cores_useful_confidence <= 1:
        return f"cores_useful_confidence is {estimate.cores_useful_confidence}"
    rest, low, high = estimate.remaining_seconds, estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
    if not (_possible(rest) and _possible(low) and _possible(high) and _possible(estimate.cores_useful)):
        names = ("remaining_seconds", "remaining_p10_seconds", "remaining_p90_seconds", "cores_useful")
        return next(f"{one} is {getattr(estimate, one)}" for one in names if not _possible(getattr(estimate, one)))
    if estimate.candidates and len(estimate.candidates) != candidates:
        return f"{len(estimate.candidates)} candidates are judged, not {candidates}"
    for judged in estimate.candidates:
        rate, rest = judged.rate_per_second, judged.remaining_seconds
        if (
            not 0 <= judged.confidence <= 1
            or (rate is not None and not 0 <= rate < math.inf)
            or (rest is not None and not 0 <= rest < math.inf)
        ):
            return f"a candidate's estimate is {judged}"
        if judged.latency and (wrong := _unsound_latency(judged.latency)):
            return f"a candidate's latency: {wrong}"
    return ""


def _unsound_latency(latency: Latency) -> str:
    if not 0 <= latency.confidence <= 1:
        return f"confidence is {latency.confidence}"
    for name in ("mean_seconds_max", "p95_seconds", "p99_seconds", "promised_seconds", "replicas_needed"):
        if not _possible(getattr(latency, name)):
            return f"{name} is {getattr(latency, name)}"
    return ""


def _possible(figure: float | None) -> bool:
    return figure is None or 0 <= figure < math.inf
