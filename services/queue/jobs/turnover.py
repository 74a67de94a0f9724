"""Turnover: how long a place is occupied beyond a job's run time: start, report of its end, next cycle."""

from __future__ import annotations

import statistics
import time
from collections import deque

from cotenant.codec import specs
from cotenant.services.queue.jobs.job_record import Record

KEPT_MAX = 64  # attempts
LATE_SECONDS_MAX = 60.0  # an older report says nothing about the cluster: this process was away


class Turnover:
    """Measures the latest attempts that ended."""

    def __init__(self) -> None:
        self.cycle_seconds = 0.0  # of the last scheduling cycle, including the pause after it
        self._beside: deque[float] = deque(maxlen=KEPT_MAX)

    def measure(self, record: Record) -> None:
        """Measure an attempt whose end was reported just now."""
        attempt = record.job.attempt
        if not (attempt.HasField("start_time") and attempt.HasField("end_time") and attempt.HasField("assign_time")):
            return
        now, end = time.time(), specs.seconds(attempt.end_time)
        if 0 <= now - end <= LATE_SECONDS_MAX:
            self._beside.append(max(0.0, now - specs.seconds(attempt.assign_time) - self._ran(record)))

    @staticmethod
    def _ran(record: Record) -> float:
        attempt = record.job.attempt
        return max(0.0, specs.seconds(attempt.end_time) - specs.seconds(attempt.start_time))

    @property
    def seconds(self) -> float:
        """The median of the measurements plus a cycle; 0 without measurements."""
        return statistics.median(self._beside) + self.cycle_seconds if self._beside else 0.0
