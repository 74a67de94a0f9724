"""Keeps how right the predicted run times of ended jobs were, and counts them."""

from __future__ import annotations

from collections.abc import Iterable

from cotenant import telemetry
from cotenant.core.model.lifecycle import Phase
from cotenant.core.prediction.earned_trust import JudgedPrediction
from cotenant.core.prediction.track_record import SECONDS_MIN
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.prediction_trust import judged_prediction
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record

FACTORS = (1.25, 1.5, 2.0, 4.0)
MEASURES = ("median_factor", "within_twice")

JUDGED = telemetry.counter(
    "cotenant.queue.predictions_judged",
    "{job}",
    "Jobs that succeeded and whose run time was predicted, by predictor and the factor that it was off by, at most.",
)
RECORD = telemetry.gauge(
    "cotenant.queue.prediction_record",
    "{ratio}",
    "Of each predictor's last predictions: the factor that half were off by at most, and the share within twice.",
)


class PredictionOutcomes:
    """Adds the predictions of ended jobs to the records that `State` keeps."""

    def __init__(self, state: State) -> None:
        self._state, self._judged = state, state.judged

    async def start(self, records: Iterable[Record]) -> None:
        """Add stored jobs that have ended, the last first, until no earlier one would be remembered; then new ones."""
        self._state.events.ended.subscribe(self.judge)
        slices = Slices()
        ended = [record for record in records if record.phase is Phase.SUCCEEDED]
        for record in sorted(ended, key=lambda record: (record.ended_seconds, record.id), reverse=True):
            if self._judged.full:
                break
            if judged := judged_prediction(record):
                self._judged.add(judged)
            await slices.step()
        for source in self._judged.sources:
            self._report(source)

    def close(self) -> None:
        """Set the gauges to zero: the next leader has its own."""
        for source in self._judged.sources:
            for measure in MEASURES:
                RECORD.set(0.0, predictor=source, measure=measure)

    def judge(self, record: Record) -> None:
        """Add and count the prediction of a job that has just succeeded, if there was one."""
        if judged := judged_prediction(record):
            self._judged.add(judged)
            JUDGED.add(predictor=judged.source, factor=bucket(_ratio(judged)))
            self._report(judged.source)

    def _report(self, source: str) -> None:
        if record := self._judged.trust(source).record:
            for measure in MEASURES:
                RECORD.set(getattr(record, measure), predictor=source, measure=measure)


def _ratio(judged: JudgedPrediction) -> float:
    return max(SECONDS_MIN, judged.predicted_seconds) / max(SECONDS_MIN, judged.ran_seconds)


def bucket(ratio: float) -> str:
    """Return the smallest of the factors by which a prediction was off at most.

    >>> [bucket(ratio) for ratio in (1.0, 0.7, 2.5, 0.1)]
    ['1.25', '1.5', '4', 'more']
    """
    off = max(ratio, 1 / ratio)
    return next((f"{factor:g}" for factor in FACTORS if off <= factor), "more")
