"""How right predictions of run times were, judged by the jobs that have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Floats

CONFIDENCES = (0.0, 0.2, 0.4, 0.6, 0.8)  # where the groups of predictions by confidence begin
SPREAD_MIN = 0.1  # standard deviation of log run times below which they count as equal: about a tenth
SECONDS_MIN = 1.0  # shorter times count as this: whether a job ran for 10 or 100 ms says nothing of a prediction


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """How right the predictions of some ended jobs were.

    jobs: the number of jobs.
    median_factor: half of the predictions were off by at most this factor, in either direction; 1 is exact.
    within_twice: the share of predictions between half of the run time and twice the run time.
    bias: the median of prediction / run time; above 1, jobs are predicted to run longer than they do.
    explained: the share of the squared error of log run time that predictions take away, compared with the typical run
        time of the same jobs; at most 1, and negative if they mislead. None if the jobs ran nearly equally long: of
        almost no difference, any error is many times as much.
    """

    jobs: int
    median_factor: float
    within_twice: float
    bias: float
    explained: float | None


def track_record(judged: Iterable[tuple[float, float]]) -> TrackRecord | None:
    """Return the record of pairs of predicted and real run time, in seconds; None if there are none.

    The typical run time is the geometric mean of all of these jobs, which nobody knew beforehand. So `explained` rather
    says too little of the predictions than too much.

    >>> record = track_record([(60, 60), (120, 60), (50, 100), (400, 100)])
    >>> round(record.median_factor, 3), record.within_twice, round(record.bias, 3)
    (2.0, 0.75, 1.414)
    """
    pairs: Floats = np.maximum(np.array(list(judged), dtype=np.float64).reshape(-1, 2), SECONDS_MIN)
    if not len(pairs):
        return None
    predicted, ran = np.log(pairs).T
    off = predicted - ran
    spread = float(np.sum((ran - ran.mean()) ** 2))
    return TrackRecord(
        len(pairs),
        float(np.exp(np.median(np.abs(off)))),
        float(np.mean(np.abs(off) <= np.log(2.0) + 1e-9)),
        float(np.exp(np.median(off))),
        1.0 - float(np.sum(off**2)) / spread if spread > SPREAD_MIN**2 * len(pairs) else None,
    )


def usual_ratios(judged: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return between which ratios of real to predicted run time 8 of 10 jobs lie; None if there are no jobs.

    >>> usual_ratios([(100, 100 + ran) for ran in range(11)])
    (1.01, 1.09)
    """
    pairs: Floats = np.maximum(np.array(list(judged), dtype=np.float64).reshape(-1, 2), SECONDS_MIN)
    if not len(pairs):
        return None
    low, high = np.quantile(pairs[:, 1] / pairs[:, 0], (0.1, 0.9))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How right the predictions of about one confidence were.

    confidence_min, confidence_max: the group; the upper end belongs to the next one.
    jobs: the number of jobs in it.
    confidence: the mean confidence.
    within_twice: as in `TrackRecord`. Surer predictions should be right more often.
    """

    confidence_min: float
    confidence_max: float
    jobs: int
    confidence: float
    within_twice: float


def calibration(judged: Iterable[tuple[float, float, float]]) -> list[Calibration]:
    """Return how right predictions were by confidence, from predicted and real run time and confidence; no empty group.

    >>> [group] = calibration([(60, 60, 0.9), (60, 600, 1.0)])
    >>> group.confidence_min, group.jobs, round(group.confidence, 3), group.within_twice
    (0.8, 2, 0.95, 0.5)
    """
    groups: dict[float, list[tuple[float, float, float]]] = {}
    for one in judged:
        groups.setdefault(max(start for start in CONFIDENCES if start <= max(0.0, one[2])), []).append(one)
    found = []
    for start in sorted(groups):
        members = groups[start]
        record = track_record((predicted, ran) for predicted, ran, _ in members)
        if record is not None:
            end = next((one for one in CONFIDENCES if one > start), 1.0)
            confidence = sum(one[2] for one in members) / len(members)
            found.append(Calibration(start, end, len(members), confidence, record.within_twice))
    return found
