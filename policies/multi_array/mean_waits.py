"""Mean waits of jobs, as seen by placement."""

from __future__ import annotations

MICROSECONDS = 1_000_000  # waits are summed as integers, so that incremental sums stay exact


class MeanWaits:
    """Waits of jobs that started within the last `window_seconds`, and of refused jobs that still wait.

    >>> waits = MeanWaits(window_seconds=100)
    >>> waits.started("a", now=0, waited_seconds=10)
    >>> waits.refused("b", now=50, waited_seconds=20)
    >>> waits.mean(now=60), waits.mean(now=120), waits.mean(now=200)
    (20.0, 90.0, 0.0)
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._started: dict[tuple[str, int], tuple[float, int]] = {}  # by job and start of the wait: when, how long
        self._waiting: dict[str, tuple[float, int]] = {}  # time of the last refusal, and start of the wait
        self._started_sum = self._since_sum = 0  # of those waits, and of those start times

    def started(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Record that a job starts; once for each wait, however often it is planned."""
        self._forget(job_id, _since(now, waited_seconds))
        waited = round(waited_seconds * MICROSECONDS)
        self._started[job_id, _since(now, waited_seconds)] = now, waited
        self._started_sum += waited

    def refused(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Record that a job continues to wait; a job without further refusals for a window is gone."""
        self._forget(job_id, _since(now, waited_seconds))
        since = round((now - waited_seconds) * MICROSECONDS)
        self._waiting[job_id] = now, since
        self._since_sum += since

    def _forget(self, job_id: str, since: int) -> None:
        self._forget_refusal(job_id)
        if known := self._started.pop((job_id, since), None):
            self._started_sum -= known[1]

    def _forget_refusal(self, job_id: str) -> None:
        if known := self._waiting.pop(job_id, None):
            self._since_sum -= known[1]

    def mean(self, now: float) -> float:
        """Return the mean wait in seconds; 0 if no job waited."""
        begin = now - self._window_seconds
        while self._started and (entry := next(iter(self._started.items())))[1][0] < begin:
            self._started_sum -= self._started.pop(entry[0])[1]
        while self._waiting and (first := next(iter(self._waiting)), self._waiting[first][0])[1] < begin:
            self._forget_refusal(first)
        count = len(self._started) + len(self._waiting)
        waiting = len(self._waiting) * round(now * MICROSECONDS) - self._since_sum
        return (self._started_sum + waiting) / (count * MICROSECONDS) if count else 0.0


def _since(now: float, waited_seconds: float) -> int:
    """Return when a wait began, in whole seconds, because differences of times are rounded."""
    return round(now - waited_seconds)
