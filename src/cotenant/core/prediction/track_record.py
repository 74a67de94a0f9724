"""How right predictions of run times were, judged by the jobs that have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Floats

SECONDS_MIN = 1.0  # shorter times count as this: whether a job ran for 10 or 100 ms says nothing of a prediction


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """How right the predictions of some ended jobs were.

    jobs: the number of jobs.
    median_factor: half of the predictions were off by at most this factor, in either direction; 1 is exact.
    within_twice: the share of predictions between half of the run time and twice the run time.
    bias: the median of prediction / run time; above 1, jobs are predicted to run longer than they do.
    explained: the share of the squared error of log run time that predictions take away, compared with the typical run
        time of the same jobs; at most 1, and negative if they mislead. None if the jobs ran equally long.
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
        1.0 - float(np.sum(off**2)) / spread if spread > 1e-9 * len(pairs) else None,
    )
