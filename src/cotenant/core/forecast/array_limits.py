"""The limits of arrays in a future that is played through: a task takes its turn when another one of its array ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cotenant.core.forecast.forecast_state import Holder, Waiter


class ArrayLimits:
    """Counts the jobs of arrays that hold resources, against the arrays' limits.

    >>> from cotenant.core.model.gang import Gang
    >>> from cotenant.core.prediction.remaining_time import exactly
    >>> limits = ArrayLimits([], [Waiter(Gang(f"a_{n}", ()), exactly(1), "a", 1) for n in range(2)])
    >>> limits.take("a_0", +1)
    >>> limits.full("a_1")
    True
    """

    def __init__(self, holders: Iterable[Holder], waiters: Iterable[Waiter]) -> None:
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
        """Count a job that begins to hold resources (1), or ceases to (-1)."""
        if array := self._of.get(job_id):
            self._held[array] += count

    def full(self, job_id: str, more: int = 0) -> bool:
        """Whether as many of a job's array as may hold resources do, with some more."""
        array = self._of.get(job_id)
        return array is not None and self._held[array] + more >= self._most[array]

    def array(self, job_id: str) -> str:
        """The limited array of a job; empty: none."""
        return self._of.get(job_id, "")
