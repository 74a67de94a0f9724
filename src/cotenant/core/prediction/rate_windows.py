"""Windows of a job's rate: from its steps and their times, each entirely under one allocation and in one phase. Pure.

The present rate that a node reports looks back over half a minute, whatever happened in it. Here a window begins where
the previous one ended, and restarts after everything that changes the rate: a start, a resize, another phase, a
profile. After each of these the job is given time to settle.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Steps counted over a number of seconds, up to a time."""

    steps: int
    seconds: float
    end_seconds: float

    @property
    def rate_per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


@dataclass(slots=True)
class _Track:
    under: Hashable
    since_seconds: float  # earlier times are from a clock that went backwards
    settled_seconds: float
    begin: tuple[int, float] | None = None  # the step at which the present window began, and its time


class RateWindows:
    """The windows of all jobs. Times are those of the job's node; they may jump.

    >>> windows = RateWindows(window_seconds=10.0, settle_seconds=5.0)
    >>> ended = [windows.take("j1", "8 cores", step, at) for step, at in ((1, 0.0), (9, 5.0), (20, 10.0), (49, 25.0))]
    >>> [window.rate_per_second for window in ended if window]
    [2.0]
    """

    def __init__(self, window_seconds: float, settle_seconds: float) -> None:
        self._window_seconds, self._settle_seconds = window_seconds, settle_seconds
        self._tracks: dict[str, _Track] = {}
        self._held: set[str] = set()

    def take(self, job_id: str, under: Hashable, step: int, at_seconds: float) -> Window | None:
        """Record that a job has reached a step; returns the window that ends there, if any.

        `under` is everything that its rate depends on: what it holds, its phase. If that has changed, a new window
        begins.
        """
        track = self._tracks.get(job_id)
        if track is None or track.under != under or at_seconds < track.since_seconds:
            self._tracks[job_id] = _Track(under, at_seconds, at_seconds + self._settle_seconds)
            return None
        if job_id in self._held or at_seconds < track.settled_seconds:
            return None
        if track.begin is None or step < track.begin[0] or at_seconds < track.begin[1]:
            track.begin = step, at_seconds
            return None
        first, begin_seconds = track.begin
        if at_seconds - begin_seconds < self._window_seconds or step == first or at_seconds == begin_seconds:
            return None
        track.begin = step, at_seconds
        return Window(step - first, at_seconds - begin_seconds, at_seconds)

    def hold(self, job_id: str) -> None:
        """Hold a job's windows open: it is being profiled."""
        self._held.add(job_id)

    def holds(self, job_id: str) -> bool:
        """Return whether a job's windows are held open."""
        return job_id in self._held

    def release(self, job_id: str) -> None:
        """Restart a job's windows after a profile."""
        self._held.discard(job_id)
        self._tracks.pop(job_id, None)

    def drop(self, job_id: str) -> None:
        """Forget a job that has ended."""
        self.release(job_id)
