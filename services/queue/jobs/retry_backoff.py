"""How long jobs that failed wait until they may be tried again, whatever is done to the wall clock meanwhile.

What is kept is a time of day, by the clock of whoever led then. Whoever learns of it lets as much time pass as is left,
on a clock that nobody sets, and never more than was to pass when it was kept.
"""

from __future__ import annotations

import time

from cotenant.codec import specs
from cotenant.core.failures.retry import RetryRules
from cotenant.services.queue.jobs.job_record import Record
from cotenant.v1 import records_pb2

REQUEUED = "requeued"


class BackOffs:
    """The waits of all jobs."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}  # by job: as it is kept, and when that is for us

    def left_seconds(self, record: Record) -> float:
        """How long a job has to wait yet; 0 where it may be tried now."""
        kept = record.not_before_seconds
        if not kept:
            return 0.0
        known, until = self._until.get(record.id, (0.0, 0.0))
        if known != kept:
            left = kept - time.time()
            until = time.monotonic() + (min(left, whole_seconds(record.stored)) if left > 0 else left)
            self._until[record.id] = kept, until
        return max(0.0, until - time.monotonic())

    def forget(self, job_id: str) -> None:
        """Forget a job."""
        self._until.pop(job_id, None)


def whole_seconds(stored: records_pb2.StoredJob) -> float:
    """How long a job was to wait when it failed: both times are by one clock."""
    for event in reversed(stored.events):
        if event.what == REQUEUED:
            return max(0.0, specs.seconds(stored.not_before_time) - specs.seconds(event.time))
    return RetryRules().back_off_seconds_max
