"""Who held what on which node at a moment of the last day.

The watch has the last attempt of each job, with what it held, when it was assigned and when it ended. These, and those
that it has shown before, are kept as the messages that they came in: at most a day, and at most `SPANS_MAX` of those
that have ended, the ones that ended last. So what is kept is bounded however long the dashboard runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from cotenant.codec.specs import seconds
from cotenant.v1.job_pb2 import Attempt, Job
from cotenant.web.rows import Row, held_part, is_live

DAY_SECONDS = 86_400.0
SPANS_MAX = 20_000
SLACK = 1_000  # so many more are kept until they are sorted again


class Span(NamedTuple):
    """An attempt that held resources."""

    job_id: str
    name: str
    begin: float
    end: float  # infinite while it lives
    attempt: Attempt


class Occupancy:
    """The attempts of the last day."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._live: dict[str, Span] = {}  # by job
        self._ended: dict[tuple[str, int], Span] = {}

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def put(self, job: Job) -> None:
        """Take note of a job's present or last attempt."""
        attempt, now = job.attempt, self._clock()
        known = self._live.get(job.id)
        if known and (known.attempt.number != attempt.number or not is_live(job)):
            self._end(self._live.pop(job.id), now)
        if not job.HasField("attempt") or not attempt.allocations:
            return
        began = attempt.assign_time if attempt.HasField("assign_time") else attempt.start_time
        span = Span(job.id, job.spec.name, seconds(began) or now, math.inf, attempt)
        if is_live(job):
            self._live[job.id] = span
        elif attempt.HasField("end_time"):
            self._end(span._replace(end=seconds(attempt.end_time)), now)

    def remove(self, job_id: str) -> None:
        """Take note that a job is no longer kept; what it held stays known."""
        if known := self._live.pop(job_id, None):
            self._end(known, self._clock())

    def _end(self, span: Span, now: float) -> None:
        span = span._replace(end=min(span.end, now))
        if span.end > now - DAY_SECONDS:
            self._ended[span.job_id, span.attempt.number] = span
        if len(self._ended) > SPANS_MAX + SLACK:
            self._shorten(now)

    def _shorten(self, now: float) -> None:
        recent = sorted((one for one in self._ended.values() if one.end > now - DAY_SECONDS), key=lambda one: one.end)
        self._ended = {(one.job_id, one.attempt.number): one for one in recent[-SPANS_MAX:]}

    def at(self, moment: float) -> dict[str, list[Row]]:
        """Return what jobs held on each node at a moment, in seconds since 1970."""
        found: dict[str, list[Row]] = {}
        for span in (*self._live.values(), *self._ended.values()):
            if span.begin <= moment < span.end:
                for allocation in span.attempt.allocations:
                    found.setdefault(allocation.node_id, []).append(held_part(span.job_id, span.name, allocation))
        return found
