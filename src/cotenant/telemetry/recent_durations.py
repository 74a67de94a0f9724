"""Durations of the last 30 seconds, in three windows of 10 seconds.

A single slow moment falls into one window, while permanent slowness shows in several. A window keeps no single
durations but a histogram, whose buckets grow by 10 %, so that memory does not grow with the load.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_SECONDS, WINDOWS = 10.0, 3
FLOOR_SECONDS = 0.0001  # durations up to this share a bucket
GROWTH = 1.1  # of a bucket over the previous one


@dataclass(slots=True)
class Window:
    """The durations within 10 seconds."""

    number: int
    count: int = 0
    total_seconds: float = 0.0
    longest_seconds: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)


class RecentDurations:
    """The durations of the current window and the two before it.

    >>> recent = RecentDurations(clock=lambda: 100.0)
    >>> for seconds in (0.2, 0.4, 3.0):
    ...     recent.add(seconds)
    >>> recent.count, recent.longest_seconds, 0.4 <= recent.median_seconds <= 0.44
    (3, 3.0, True)
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` is monotonic time by default."""
        self._clock = clock or time.monotonic  # as it is now: simulations replace it
        self._began = self._clock()
        self._windows: list[Window] = []

    def add(self, seconds: float) -> None:
        """Add a duration that has just ended."""
        number = int(self._clock() // WINDOW_SECONDS)
        if not self._windows or self._windows[-1].number != number:
            self._windows = [*self._windows[-WINDOWS:], Window(number)]
        window = self._windows[-1]
        window.count += 1
        window.total_seconds += seconds
        window.longest_seconds = max(window.longest_seconds, seconds)
        window.buckets[max(0, math.ceil(math.log(max(seconds, FLOOR_SECONDS) / FLOOR_SECONDS, GROWTH)))] += 1

    @property
    def windows(self) -> list[Window]:
        """The current and previous windows that have any duration, the oldest first."""
        oldest = int(self._clock() // WINDOW_SECONDS) - WINDOWS + 1
        return [window for window in self._windows if window.number >= oldest]

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(window.count for window in self.windows)

    @property
    def longest_seconds(self) -> float:
        """The longest duration; 0 without any."""
        return max((window.longest_seconds for window in self.windows), default=0.0)

    @property
    def median_seconds(self) -> float:
        """The upper median, at most 10 % too large; 0 without any."""
        buckets: Counter[int] = sum((window.buckets for window in self.windows), Counter())
        left = buckets.total() // 2 + 1
        for bucket, count in sorted(buckets.items()):
            left -= count
            if left <= 0:
                return min(self.longest_seconds, FLOOR_SECONDS * GROWTH**bucket)
        return 0.0

    @property
    def share(self) -> float:
        """The sum of all durations as a share of the time in which they ended, at most 1."""
        now = self._clock()
        begin = max(self._began, (now // WINDOW_SECONDS - WINDOWS + 1) * WINDOW_SECONDS)
        total = sum(window.total_seconds for window in self.windows)
        return min(1.0, total / (now - begin)) if now > begin else 0.0

    def windows_above(self, seconds: float) -> int:
        """Return how many windows have a duration of at least `seconds`."""
        return sum(window.longest_seconds >= seconds for window in self.windows)
