"""How long jobs wait on average, as far as whoever places them sees it."""

from __future__ import annotations

from collections import deque

MICROSECONDS = 1_000_000  # waits are summed up in whole ones, so that sums that are kept up to date stay exact


class Waits:
    """Waits of jobs that started within the last `window_seconds`, and of those who were refused and still wait.

    >>> waits = Waits(window_seconds=100)
    >>> waits.started("a", now=0, waited_seconds=10)
    >>> waits.refused("b", now=50, waited_seconds=20)
    >>> waits.mean(now=60), waits.mean(now=120), waits.mean(now=200)
    (20.0, 90.0, 0.0)
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._started: deque[tuple[float, int]] = deque()  # when, and after which wait
        self._waiting: dict[str, tuple[float, int]] = {}  # when they were last refused, and since when they wait
        self._started_sum = self._since_sum = 0  # of those waits, and of those times

    def started(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Note that a job starts."""
        self._forget(job_id)
        waited = round(waited_seconds * MICROSECONDS)
        self._started.append((now, waited))
        self._started_sum += waited

    def refused(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Note that a job goes on waiting; one that is not heard of again for a window has gone."""
        self._forget(job_id)
        since = round((now - waited_seconds) * MICROSECONDS)
        self._waiting[job_id] = now, since
        self._since_sum += since

    def _forget(self, job_id: str) -> None:
        if known := self._waiting.pop(job_id, None):
            self._since_sum -= known[1]

    def mean(self, now: float) -> float:
        """The mean wait in seconds; 0 where nobody waited."""
        begin = now - self._window_seconds
        while self._started and self._started[0][0] < begin:
            self._started_sum -= self._started.popleft()[1]
        while self._waiting and (first := next(iter(self._waiting)), self._waiting[first][0])[1] < begin:
            self._forget(first)
        count = len(self._started) + len(self._waiting)
        waiting = len(self._waiting) * round(now * MICROSECONDS) - self._since_sum
        return (self._started_sum + waiting) / (count * MICROSECONDS) if count else 0.0
