"""Measures a job's rate after a change of its cores, from the steps that the job reports. Pure.

After a change of cores a job still lives on what it had prepared: a loader's full queue sustains the old rate for a
while. So the first steps are skipped, and a window whose two halves differ is not trusted yet: its first half is
dropped and the window is extended, a few times at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HALVES_DIFFER = 0.15  # of the higher rate
HALVES_STEPS_MIN = 8  # with fewer, single steps dominate
EXTENSIONS_MAX = 4
SETTLE_SHARE = 0.25  # of the steps to measure
SETTLE_STEPS_MIN = 2
POINTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class MeterTimeouts:
    """How long a measurement waits, in seconds.

    `settle_seconds` are skipped after each change of cores, and a measured window has at least `window_seconds`. If the
    job reports nothing for `silence_seconds`, the measurement is given up.
    """

    settle_seconds: float = 1.0
    window_seconds: float = 1.0
    silence_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps, and the seconds that they took."""

    steps: int
    seconds: float

    @property
    def rate_per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class RateMeter:
    """One measurement, starting with a change of cores at `now`. Times are seconds on a monotonic clock."""

    def __init__(self, steps: int, timeouts: MeterTimeouts, now: float) -> None:
        self._steps = steps
        self._settle_steps = max(SETTLE_STEPS_MIN, round(steps * SETTLE_SHARE))
        self._window_seconds = timeouts.window_seconds
        self._settled_at = now + timeouts.settle_seconds
        self._settled_step = 0
        self._last: int | None = None
        self._points: deque[tuple[float, int]] = deque()
        self._extensions = 0

    def update(self, step: int, now: float, phase: str = "") -> Measurement | None:
        """Record a step; return the measurement once complete. Only training (the empty phase) is measured.

        >>> meter = RateMeter(4, MeterTimeouts(0, 0), now=0.0)
        >>> [measured.rate_per_second for n in range(9) if (measured := meter.update(n, n * 0.5))]
        [2.0, 2.0, 2.0]
        """
        if phase:
            self._last = None
            return None
        if self._last is None or step < self._last:  # a restart of the job or of training must settle again
            self._settled_step = step + self._settle_steps
            self._points.clear()
        self._last = step
        if step < self._settled_step or now < self._settled_at:
            return None
        if len(self._points) < POINTS_MAX:
            self._points.append((now, step))
        else:
            self._points[-1] = (now, step)
        return self._evaluate()

    def _evaluate(self) -> Measurement | None:
        whole = _between(self._points[0], self._points[-1])
        if whole.steps < self._steps or whole.seconds < max(self._window_seconds, 1e-6):
            return None
        middle = next(point for point in self._points if 2 * (point[1] - self._points[0][1]) >= whole.steps)
        if whole.steps >= HALVES_STEPS_MIN and self._extensions < EXTENSIONS_MAX:
            halves = [_between(self._points[0], middle), _between(middle, self._points[-1])]
            rates = [half.rate_per_second for half in halves if half.steps and half.seconds > 0]
            if len(rates) == 2 and min(rates) < max(rates) * (1 - HALVES_DIFFER):
                self._extensions += 1
                while self._points[0][0] < middle[0]:
                    self._points.popleft()
                return None
        return whole


def _between(first: tuple[float, int], last: tuple[float, int]) -> Measurement:
    return Measurement(last[1] - first[1], last[0] - first[0])
