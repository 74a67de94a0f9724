"""How far predictions of run times are believed: by the record of ended jobs, per predictor and tenant.

A predictor's interval is made as wide as its errors have been, and its confidence is at most the share of its
predictions that were right within a factor of two. Nothing is ever made narrower or surer than the predictor said.

A predictor without a record is believed. Each judged job counts a tenth, up to ten: then the record alone decides. The
same holds for a tenant, which starts from the predictor's record over all tenants; its own jobs count in both.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

from cotenant.core.model.estimate import Estimate
from cotenant.core.prediction.track_record import TrackRecord, track_record, usual_ratios

WINDOW = 40  # the last judged predictions that make a record [R]
JOBS_ENOUGH = 10  # of fewer, the record counts in part [R]
JOBS_MAX = 10_000  # judged predictions that are remembered, of all predictors and tenants
ALL_TENANTS = ""  # no tenant is called that


@dataclass(frozen=True, slots=True, order=True)
class JudgedPrediction:
    """The predicted run time of a job that has succeeded, and the real one, in seconds.

    `predicted_seconds` is what was predicted when the job last started. `ended_seconds` is in unix time; in a
    simulation, on the trace's clock.
    """

    ended_seconds: float
    job_id: str
    source: str
    tenant: str
    predicted_seconds: float
    ran_seconds: float


@dataclass(frozen=True, slots=True)
class EarnedTrust:
    """How far the predictions of one predictor are believed for one tenant.

    source: the predictor.
    tenant: whose jobs the record is of; empty for those of all tenants.
    record: of its last predictions; None if none was judged yet.
    ratio_p10, ratio_p90: between which ratios of real to predicted run time 8 of 10 jobs are expected.
    confidence_max: the confidence that the record has earned, from 0 to 1.
    """

    source: str
    tenant: str = ALL_TENANTS
    record: TrackRecord | None = None
    ratio_p10: float = 1.0
    ratio_p90: float = 1.0
    confidence_max: float = 1.0

    def limit(self, estimate: Estimate, ran_seconds: float = 0.0) -> Estimate:
        """Return an estimate whose interval is at least as wide as the usual errors, and whose confidence is earned.

        `ran_seconds` is for how long the job had run in total when it was estimated: errors are of total run times.

        >>> history = EarnedTrust("history", ratio_p10=0.5, ratio_p90=2.0, confidence_max=0.6)
        >>> told = history.limit(Estimate(predictable=True, confidence=0.9, remaining_seconds=60), ran_seconds=30)
        >>> told.remaining_p10_seconds, told.remaining_seconds, told.remaining_p90_seconds, told.confidence
        (15.0, 60, 150.0, 0.6)
        """
        middle = estimate.remaining_seconds
        if not estimate.predictable or middle is None:
            return estimate
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        total = ran_seconds + middle
        if self.ratio_p10 < 1:
            low = min(middle if low is None else low, max(0.0, total * self.ratio_p10 - ran_seconds))
        if self.ratio_p90 > 1:
            high = max(middle if high is None else high, total * self.ratio_p90 - ran_seconds)
        if (low, high) != (estimate.remaining_p10_seconds, estimate.remaining_p90_seconds):
            low, high = middle if low is None else low, middle if high is None else high
        return replace(
            estimate,
            confidence=min(estimate.confidence, self.confidence_max),
            remaining_p10_seconds=low,
            remaining_p90_seconds=high,
        )

    def in_words(self) -> str:
        """Describe the record in one sentence.

        >>> EarnedTrust("history", "a", TrackRecord(40, 1.3, 0.85, 1.0, None)).in_words()
        'history: of its last 40 predictions for tenant a, half were off by at most 1.3×, 85 % by at most 2×'
        >>> EarnedTrust("history").in_words()
        'history: none of its predictions has been judged yet'
        """
        if self.record is None:
            return f"{self.source}: none of its predictions has been judged yet"
        whose = f" for tenant {self.tenant}" if self.tenant else ""
        last = f"of its last {self.record.jobs} predictions" if self.record.jobs > 1 else "of its only prediction"
        right = f"{100 * self.record.within_twice:.0f} % by at most 2×"
        return f"{self.source}: {last}{whose}, half were off by at most {self.record.median_factor:.3g}×, {right}"


class JudgedPredictions:
    """The predictions of the jobs that ended last, of which records are made.

    A record is a function of the set of judged jobs: the order in which they are added makes no difference, nor does
    adding one again. Memory is bounded by `jobs_max`; the jobs that ended first are forgotten first.
    """

    def __init__(self, jobs_max: int = JOBS_MAX) -> None:
        self._jobs_max = jobs_max
        self._all: list[JudgedPrediction] = []  # sorted, as all lists here
        self._by: dict[tuple[str, str], list[JudgedPrediction]] = {}
        self._trust: dict[tuple[str, str], EarnedTrust] = {}  # until a prediction of the source is judged

    @property
    def sources(self) -> list[str]:
        """The predictors that have a record, sorted."""
        return sorted(source for source, tenant in self._by if tenant == ALL_TENANTS)

    @property
    def full(self) -> bool:
        """Whether an earlier end than all known ones would change nothing."""
        return len(self._all) >= self._jobs_max

    def add(self, judged: JudgedPrediction) -> None:
        """Add the prediction of an ended job; one with impossible times is ignored."""
        times = judged.predicted_seconds, judged.ran_seconds, judged.ended_seconds
        if not all(math.isfinite(one) and one >= 0 for one in times) or _has(self._all, judged):
            return
        insort(self._all, judged)
        for key in _keys(judged):
            insort(self._by.setdefault(key, []), judged)
        self._forget_trust(judged.source)
        if len(self._all) > self._jobs_max:
            self._forget(self._all.pop(0))

    def trust(self, source: str, tenant: str = ALL_TENANTS) -> EarnedTrust:
        """Return how far a predictor is believed for a tenant.

        The record that it names is the tenant's, if that is enough to decide; else that of all tenants.
        """
        key = source, tenant
        if known := self._trust.get(key):
            return known
        base = EarnedTrust(source) if tenant == ALL_TENANTS else self.trust(source)
        found = _learn(base, tenant, self._by.get(key, [])[-WINDOW:])
        if key in self._by:  # so that the cache is bounded
            self._trust[key] = found
        return found

    def _forget(self, judged: JudgedPrediction) -> None:
        for key in _keys(judged):
            self._by[key].remove(judged)
            if not self._by[key]:
                del self._by[key]
        self._forget_trust(judged.source)

    def _forget_trust(self, source: str) -> None:
        for key in [key for key in self._trust if key[0] == source]:
            del self._trust[key]


NOTHING_JUDGED = JudgedPredictions(0)


def source_of(estimate_source: str) -> str:
    """Return the predictor's name in the source of an estimate.

    >>> source_of("history: 4 similar jobs")
    'history'
    """
    return estimate_source.partition(":")[0]


def _learn(base: EarnedTrust, tenant: str, judged: list[JudgedPrediction]) -> EarnedTrust:
    """Return the trust that some predictions have earned; few of them leave part of `base`."""
    pairs = [(one.predicted_seconds, one.ran_seconds) for one in judged]
    record, ratios = track_record(pairs), usual_ratios(pairs)
    if record is None or ratios is None:
        return base
    weight = min(1.0, record.jobs / JOBS_ENOUGH)
    low, high = (
        math.exp(weight * math.log(own) + (1 - weight) * math.log(other))
        for own, other in zip(ratios, (base.ratio_p10, base.ratio_p90), strict=True)
    )
    confidence = weight * record.within_twice + (1 - weight) * base.confidence_max
    if weight < 1.0 and base.record is not None and base.record.jobs > record.jobs:
        tenant, record = base.tenant, base.record
    return EarnedTrust(base.source, tenant, record, low, high, confidence)


def _keys(judged: JudgedPrediction) -> tuple[tuple[str, str], ...]:
    own = judged.source, judged.tenant
    return ((judged.source, ALL_TENANTS), own) if judged.tenant else (own,)


def _has(several: list[JudgedPrediction], judged: JudgedPrediction) -> bool:
    place = bisect_left(several, judged)
    return place < len(several) and several[place] == judged
