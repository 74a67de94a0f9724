"""Measures a job's rate on other cores than before: pure, fed with the steps that the job tells.

After a change of cores a job still lives on what it had prepared before: a loader's full queue lets it run on at the
old rate for a while. So the first steps are let pass, and a window whose two halves differ is not believed yet: its
first half is dropped and the window goes on, a few times at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HALVES_DIFFER = 0.15  # of the greater rate
HALVES_STEPS_MIN = 8  # below, single steps decide
EXTENSIONS_MAX = 4
SETTLE_SHARE = 0.25  # of the steps to be measured
SETTLE_STEPS_MIN = 2
POINTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a measurement waits, in seconds.

    `settle` is let pass after each change of cores, and a measured window is at least `window` long. Where the job
    tells nothing for `silence`, it is given up.
    """

    settle_seconds: float = 1.0
    window_seconds: float = 1.0
    silence_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """So many steps took so long."""

    steps: int
    seconds: float

    @property
    def rate_per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Meter:
    """One measurement, from a change of cores at `now` on. Times are seconds on a clock that never goes back."""

    def __init__(self, steps: int, patience: Patience, now: float) -> None:
        self._steps = steps
        self._settle_steps = max(SETTLE_STEPS_MIN, round(steps * SETTLE_SHARE))
        self._window_seconds = patience.window_seconds
        self._settled_at = now + patience.settle_seconds
        self._settled_step = 0
        self._last: int | None = None
        self._points: deque[tuple[float, int]] = deque()
        self._extensions = 0

    def take(self, step: int, now: float, phase: str = "") -> Measured | None:
        """Note that a step was told; what was measured, once it was. Only training is measured, which has no phase.

        >>> meter = Meter(4, Patience(0, 0), now=0.0)
        >>> [measured.rate_per_second for n in range(9) if (measured := meter.take(n, n * 0.5))]
        [2.0, 2.0, 2.0]
        """
        if phase:
            self._last = None
            return None
        if self._last is None or step < self._last:  # a job that begins again, or trains again, settles again
            self._settled_step = step + self._settle_steps
            self._points.clear()
        self._last = step
        if step < self._settled_step or now < self._settled_at:
            return None
        if len(self._points) < POINTS_MAX:
            self._points.append((now, step))
        else:
            self._points[-1] = (now, step)
        return self._judged()

    def _judged(self) -> Measured | None:
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


def _between(first: tuple[float, int], last: tuple[float, int]) -> Measured:
    return Measured(last[1] - first[1], last[0] - first[0])
