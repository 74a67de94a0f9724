"""Back-off of failed jobs, robust against changes of the wall clock.

The stored end of a back-off is a time of day, by the clock of the leader that set it. A process that reads it waits
for the seconds that are left, on the monotonic clock, and never longer than the back-off was when it was stored.
"""

from __future__ import annotations

import time

from cotenant.codec import specs
from cotenant.codec.job_events import EVENT_KINDS, EventKind
from cotenant.core.failures.retry import RetryRules
from cotenant.services.queue.jobs.job_record import Record
from cotenant.storage.v1 import records_pb2

REQUEUED = EVENT_KINDS.to_wire(EventKind.REQUEUED)


class RetryBackoff:
    """The back-offs of all jobs."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}  # by job: as stored, and on our monotonic clock

    def left_seconds(self, record: Record) -> float:
        """Return the seconds left of a job's back-off; 0 if it may be tried now."""
        kept = record.not_before_seconds
        if not kept:
            return 0.0
        known, until = self._until.get(record.id, (0.0, 0.0))
        if known != kept:
            left = kept - time.time()
            until = time.monotonic() + (min(left, backoff_seconds(record.stored)) if left > 0 else left)
            self._until[record.id] = kept, until
        return max(0.0, until - time.monotonic())

    def forget(self, job_id: str) -> None:
        """Remove a job."""
        self._until.pop(job_id, None)


def begins_in_seconds(record: Record) -> float:
    """Return the seconds left until a job's begin time, by the wall clock; 0 if it may start now."""
    begin_seconds = record.spec.begin_seconds
    return 0.0 if begin_seconds is None else max(0.0, begin_seconds - time.time())


def backoff_seconds(stored: records_pb2.StoredJob) -> float:
    """Return the length of a job's back-off when it failed: both times are from one clock."""
    for event in reversed(stored.events):
        if event.kind == REQUEUED:
            return max(0.0, specs.seconds(stored.not_before_time) - specs.seconds(event.time))
    return RetryRules().back_off_seconds_max
