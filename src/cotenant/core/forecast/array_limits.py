"""Array limits in a forecast: a task gets its turn when another task of its array ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cotenant.core.forecast.forecast_state import RunningEntry, WaitingEntry


class ArrayLimits:
    """Counts the jobs of arrays that hold resources, against the arrays' limits.

    >>> from cotenant.core.model.gang import Gang
    >>> from cotenant.core.prediction.remaining_time import certain_time
    >>> limits = ArrayLimits([], [WaitingEntry(Gang(f"a_{n}", ()), certain_time(1), "a", 1) for n in range(2)])
    >>> limits.take("a_0", +1)
    >>> limits.full("a_1")
    True
    """

    def __init__(self, holders: Iterable[RunningEntry], waiters: Iterable[WaitingEntry]) -> None:
        self._most: dict[str, int] = {}
        self._of: dict[str, str] = {}
        for waiter in waiters:
            if waiter.array and waiter.running_max:
                self._of[waiter.gang.job_id] = waiter.array
                self._most[waiter.array] = waiter.running_max
        self._of.update((holder.job_id, holder.array) for holder in holders if holder.array in self._most)
        self._held: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._most)

    def take(self, job_id: str, count: int) -> None:
        """Count a job that starts (1) or stops (-1) holding resources."""
        if array := self._of.get(job_id):
            self._held[array] += count

    def full(self, job_id: str, more: int = 0) -> bool:
        """Return whether a job's array is at its limit, counting `more` further jobs."""
        array = self._of.get(job_id)
        return array is not None and self._held[array] + more >= self._most[array]

    def array(self, job_id: str) -> str:
        """Return the limited array of a job; "" if there is none."""
        return self._of.get(job_id, "")
