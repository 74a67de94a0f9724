"""Counts how right the predicted run times of ended jobs were."""

from __future__ import annotations

from cotenant import telemetry
from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.prediction.track_record import SECONDS_MIN
from cotenant.services.queue.jobs.transitions import Record

FACTORS = (1.25, 1.5, 2.0, 4.0)

JUDGED = telemetry.counter(
    "cotenant.queue.predictions_judged",
    "{job}",
    "Jobs that succeeded and whose run time was predicted, by predictor and the factor that it was off by, at most.",
)


def judge(record: Record) -> None:
    """Count the prediction of a job that has just succeeded, if there was one."""
    job = record.job
    if record.phase is Phase.SUCCEEDED and job.HasField("predicted_run_time"):
        predicted, ran = (max(SECONDS_MIN, specs.seconds(one)) for one in (job.predicted_run_time, job.run_time))
        JUDGED.add(predictor=job.prediction_source or "unknown", factor=bucket(predicted / ran))


def bucket(ratio: float) -> str:
    """Return the smallest of the factors by which a prediction was off at most.

    >>> [bucket(ratio) for ratio in (1.0, 0.7, 2.5, 0.1)]
    ['1.25', '1.5', '4', 'more']
    """
    off = max(ratio, 1 / ratio)
    return next((f"{factor:g}" for factor in FACTORS if off <= factor), "more")
