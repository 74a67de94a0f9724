"""How long jobs wait on average, as far as whoever places them sees it."""

from __future__ import annotations

from collections import deque


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
        self._started: deque[tuple[float, float]] = deque()  # when, and after which wait
        self._sum = 0.0
        self._waiting: dict[str, tuple[float, float]] = {}  # when they were last refused, and since when they wait

    def started(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Note that a job starts."""
        self._waiting.pop(job_id, None)
        self._started.append((now, waited_seconds))
        self._sum += waited_seconds

    def refused(self, job_id: str, now: float, waited_seconds: float) -> None:
        """Note that a job goes on waiting; one that is not heard of again for a window has gone."""
        self._waiting.pop(job_id, None)
        self._waiting[job_id] = now, now - waited_seconds

    def mean(self, now: float) -> float:
        """The mean wait in seconds; 0 where nobody waited."""
        begin = now - self._window_seconds
        while self._started and self._started[0][0] < begin:
            self._sum -= self._started.popleft()[1]
        while self._waiting and (first := next(iter(self._waiting)), self._waiting[first][0])[1] < begin:
            del self._waiting[first]
        count = len(self._started) + len(self._waiting)
        waiting = sum(now - since for _, since in self._waiting.values())
        return (self._sum + waiting) / count if count else 0.0
