"""A running job's own rate, and its remaining time by that rate. Pure.

The remaining time of a job that reports steps and has a total is the remaining steps divided by the rate that it has
shown so far. That needs no history, so it holds in a job's first run.

The rate is the mean over 8 to 16 windows, which grow as the job runs: so it covers all that recurs, such as a
validation every few minutes, in bounded memory. It begins again when the job gets other resources, when it goes back to
a checkpoint, and when three windows in a row are faster, or slower, than all before.

The interval follows from the scatter of the windows, as for the logarithm of a normal variable. A prior counts like one
window with a deviation of 0.3, so that few windows that happen to agree do not look certain [R].
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from cotenant.core.model.estimate import TRAINING, Estimate, OwnRate, Query
from cotenant.core.model.refusal import about, plural
from cotenant.core.prediction.drift import BOUNDS
from cotenant.core.prediction.rate_windows import Window

WINDOWS_MAX = 16
PRIOR_SPREAD = 0.3  # of the logarithm of rates, with the weight of one window [R]
CHANGED_SPREAD = 0.7  # of a rate from before a change: a factor of 2.5 at the 90th percentile [R]
SPREAD_MAX = 10.0  # beyond a factor of 20,000, larger figures mean nothing more
P90_SIGMAS = 1.2816  # of a normal distribution
GRACE_SECONDS, GRACE_GAPS = 30.0, 3.0  # silence that says nothing: the longer of the two
EXPIRY_SECONDS, EXPIRY_GAPS = 600.0, 10.0  # silence after which the rate says nothing any longer
SILENCE_TAIL = 9.0  # in 1 of 10 cases a job stays silent for more than nine times as long (ADR 0010)
BEGUN_MAX = 0.95  # of a step that counts as done while the next report is awaited
AT_END_CONFIDENCE = 0.5


@dataclass(slots=True)
class RateTrack:
    """The reports of one job's training steps. Times of steps are by its node's clock, `now` is by the reader's.

    >>> track = RateTrack(window_seconds=10.0, settle_seconds=5.0)
    >>> for second in range(60):
    ...     track.take("8 cores", step=2 * second, at_seconds=float(second), now=1000.0 + second)
    >>> track.measured(now=1060.0)
    OwnRate(rate_per_second=2.0, windows=5, spread=0.0, gap_seconds=1.0, silent_seconds=1.0)
    """

    window_seconds: float
    settle_seconds: float
    _under: Hashable = None
    _last: tuple[int, float] | None = None  # the last step, and its time
    _settled_seconds: float = 0.0
    _begin: tuple[int, float] | None = None  # the step at which the present window began, and its time
    _windows: list[Window] = field(default_factory=list)
    _before: tuple[float, float] = (0.0, 0.0)  # rate and spread before the last change
    _length_seconds: float = 0.0
    _gap_seconds: float = 0.0
    _reported_at: float = 0.0
    _changes: int = 0
    _count: int = 0  # of windows since the last change

    def take(self, under: Hashable, step: int, at_seconds: float, now: float, *, profiled: bool = False) -> None:
        """Record that a job has reached a step, in training or in another phase.

        `under` is everything that its rate depends on. A report of the time that is known already is ignored. While the
        job is profiled, its rate is not its own.
        """
        last = self._last
        if profiled:
            self._last, self._begin, self._reported_at = (step, at_seconds), None, now
        elif last is None or under != self._under or step < last[0] or at_seconds < last[1]:
            self._restart(under, step, at_seconds, now)
        elif at_seconds > last[1]:
            self._advance(last, step, at_seconds, now)

    def _advance(self, last: tuple[int, float], step: int, at_seconds: float, now: float) -> None:
        self._gap_seconds = max(self._gap_seconds, at_seconds - last[1])
        self._last, self._reported_at = (step, at_seconds), now
        if at_seconds < self._settled_seconds:
            return
        if self._begin is None:
            self._begin = step, at_seconds
            return
        first, begin_seconds = self._begin
        if step > first and at_seconds - begin_seconds >= self._length_seconds:
            self._begin = step, at_seconds
            self._add(Window(step - first, at_seconds - begin_seconds, at_seconds))

    def _restart(self, under: Hashable, step: int, at_seconds: float, now: float) -> None:
        if self._windows:
            self._before = _mean_rate(self._windows), _spread(self._windows)
        self._changes += self._last is not None
        self._under, self._last, self._reported_at = under, (step, at_seconds), now
        self._settled_seconds, self._begin = at_seconds + self.settle_seconds, None
        self._windows, self._length_seconds, self._count = [], self.window_seconds, 0

    def _add(self, window: Window) -> None:
        self._windows.append(window)
        self._count += 1
        if _changed(self._windows):
            self._windows = self._windows[-BOUNDS.windows :]
        if len(self._windows) >= WINDOWS_MAX:
            pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
            self._windows = [Window(a.steps + b.steps, a.seconds + b.seconds, b.end_seconds) for a, b in pairs]
            self._length_seconds *= 2

    def measured(self, now: float) -> OwnRate | None:
        """Return the present rate; None before the first report."""
        if self._last is None:
            return None
        silent = max(0.0, now - self._reported_at)
        if not self._windows:
            return OwnRate(self._before[0], 0, self._before[1], self._gap_seconds, silent)
        rate, spread = _mean_rate(self._windows), _spread(self._windows)
        return OwnRate(rate, len(self._windows), spread, self._gap_seconds, silent)

    @property
    def version(self) -> tuple[int, int]:
        """Changes when the rate begins again, at its first window, and each time that the windows have doubled."""
        return self._changes, self._count.bit_length()


def _mean_rate(windows: list[Window]) -> float:
    return sum(window.steps for window in windows) / math.fsum(window.seconds for window in windows)


def _spread(windows: list[Window]) -> float:
    """Return the standard deviation of the logarithm of the windows' rates; 0 of a single window."""
    if len(windows) < 2:
        return 0.0
    logarithms = [math.log(window.rate_per_second) for window in windows]
    mean = math.fsum(logarithms) / len(logarithms)
    return math.sqrt(math.fsum((one - mean) ** 2 for one in logarithms) / (len(logarithms) - 1))


def _changed(windows: list[Window]) -> bool:
    """Return whether the last windows are all faster, or all slower, than everything before them."""
    before, latest = windows[: -BOUNDS.windows], windows[-BOUNDS.windows :]
    if len(before) < BOUNDS.windows:
        return False
    mean, rates = _mean_rate(before), [window.rate_per_second for window in before]
    low = min(*rates, mean * (1 - BOUNDS.deviation))
    high = max(*rates, mean * (1 + BOUNDS.deviation))
    return all(one.rate_per_second < low for one in latest) or all(one.rate_per_second > high for one in latest)


def grace_seconds(measured: OwnRate) -> float:
    """Return for how long a job may be silent before its estimate ages."""
    return max(GRACE_SECONDS, GRACE_GAPS * measured.gap_seconds)


def expiry_seconds(measured: OwnRate) -> float:
    """Return the silence after which a job's remaining time is unknown."""
    return max(EXPIRY_SECONDS, EXPIRY_GAPS * measured.gap_seconds)


def expired(query: Query) -> bool:
    """Return whether a job that reported steps has been silent for too long."""
    measured = query.own_rate
    return measured is not None and measured.silent_seconds > expiry_seconds(measured)


def remaining_by_rate(query: Query) -> Estimate | None:
    """Return the remaining steps divided by the job's own rate; None without a total, a step or a rate.

    The estimate of a job that has stopped reporting ages: it grows by the silence, its interval faster, and it becomes
    unpredictable in the end. A step beyond the total counts as the last one.

    >>> measured = OwnRate(10.0, windows=4, spread=0.02)
    >>> asked = Query("ann", "bert", "", 1000, 1, step=350, steps_total=400, own_rate=measured)
    >>> found = remaining_by_rate(asked)
    >>> [round(one, 1) for one in (found.remaining_p10_seconds, found.remaining_seconds, found.remaining_p90_seconds)]
    [4.0, 5.0, 6.2]
    >>> found.source
    '50 steps left at 10 per second, its own rate over 4 windows'
    """
    measured, left = query.own_rate, query.steps_total - query.step
    if measured is None or not query.steps_total or query.phase != TRAINING:
        return None
    if expired(query):
        silent = about(measured.silent_seconds)
        return Estimate(source=f"its last step, {query.step} of {query.steps_total}, was {silent} ago")
    if left <= 0:
        beyond = f"it is at step {query.step}, beyond its total of {query.steps_total}: it counts as at its end"
        source = beyond if left else f"all of its {plural(query.steps_total, 'step')} are done"
        return Estimate(True, AT_END_CONFIDENCE, remaining_seconds=0.0, source=source)
    if not measured.rate_per_second:
        return None
    return _aged(measured, *_interval(measured, left), source=_source(measured, left))


def _interval(measured: OwnRate, left: int) -> tuple[float, float]:
    """Return the remaining time without aging, and the factor from it to its 10th and 90th percentile."""
    rate, windows, spread = measured.rate_per_second, measured.windows, min(SPREAD_MAX, measured.spread)
    middle = (left - min(BEGUN_MAX, measured.silent_seconds * rate)) / rate
    if not windows:
        return middle, math.exp(P90_SIGMAS * max(CHANGED_SPREAD, spread))
    variance = (PRIOR_SPREAD**2 + (windows - 1) * spread**2) / windows
    return middle, math.exp(P90_SIGMAS * math.sqrt(variance * (1 + 1 / windows)))


def _aged(measured: OwnRate, middle: float, factor: float, source: str) -> Estimate:
    """Return the estimate with what the silence of the job adds to it."""
    grace, expiry = grace_seconds(measured), expiry_seconds(measured)
    over = max(0.0, measured.silent_seconds - grace)
    confidence = (1 - over / (expiry - grace)) / (1 + (factor - 1 / factor) / 2)
    if over:
        source += f"; no step for {about(measured.silent_seconds)}, unknown after {about(expiry)}"
    low, high = middle / factor, middle * factor + SILENCE_TAIL * over
    return Estimate(True, confidence, middle + over, low, high, source=source)


def _source(measured: OwnRate, left: int) -> str:
    over = f"over {plural(measured.windows, 'window')}" if measured.windows else "from before it changed"
    return f"{plural(left, 'step')} left at {measured.rate_per_second:.3g} per second, its own rate {over}"
