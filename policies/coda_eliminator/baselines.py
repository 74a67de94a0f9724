"""The rate of a job without contention, and whether the job has fallen below it.

Theory of operation. For each job, phase and core count there is a baseline of its own: an average with a memory of ten
minutes in which far outliers weigh little (Huber, 1964 [P]), and the noise around it, learned the same way from a
prior. It is trusted after 12 windows. It does not learn while the job may be slowed down.

A fall is detected by a cumulative sum (Page, 1954 [P]): each window adds the number of standard deviations by which the
rate is below the baseline, minus an allowance k; the sum never goes below 0, and above h the job counts as fallen. k is
half of the slowdown that should be detected fastest, which is the best k for it, but at least the slowdown that counts
at all, and at most 1.5 standard deviations. h follows from k and from how rarely noise may trigger it: the mean run to
a false alarm is about (exp(2kb) − 2kb − 1) / 2k² with b = h + 1.166 (Siegmund, 1985 [P]). One window adds 0.6 h at
most, so that one bad window alone (a checkpoint, an evaluation) is no fall. With noise of 5 % in windows of 5 s and one
alarm in 4 days over 8 jobs, k is 1.5 and h 3.7.

The same sum upwards detects that a job has become faster: then the baseline was that of a slowed job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS, Thresholds

TRUSTED_WINDOWS = 12  # a minute
MEMORY_WINDOWS = 120  # ten minutes
FROZEN_WINDOWS = 120  # maximum learning under pressure, since the learned rate may be that of a slowed job
PRIOR_WINDOWS = 12  # weight of the assumed noise
OUTLIER = 3.0  # standard deviations; farther outliers count as this far
NOISE_MIN = 0.005
MAD_TO_DEVIATION = 1.4826  # from the median of absolute errors, for normal noise
UTILISATION_MIN = 5.0  # percent; below that a GPU is idle and carries no information
ONE_WINDOW = 0.6  # of h: the most that one window adds
_THRESHOLD_MIN = 1.0
_SIEGMUND = 1.166


@lru_cache(maxsize=4096)
def threshold(allowance: float, windows_between_alarms: float) -> float:
    """Return h, in standard deviations, for an allowance k in standard deviations; at least 1.

    >>> round(threshold(1.5, 552_960), 2), round(threshold(0.5, 552_960), 1)
    (3.74, 11.4)
    """
    low, high = 0.0, 60.0 / allowance + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        power = 2 * allowance * middle
        reached = power > 600 or (math.expm1(power) - power) / (2 * allowance**2) >= windows_between_alarms
        low, high = (low, middle) if reached else (middle, high)
    return max(_THRESHOLD_MIN, high - _SIEGMUND)


@dataclass(slots=True)
class Run:
    """A cumulative sum, and the windows since it was last 0."""

    sum: float = 0.0
    windows: int = 0
    total: float = 0.0  # of the rates

    def add(self, excess: float, rate: float) -> None:
        """Add one window."""
        self.sum += excess
        if self.sum <= 0:
            self.clear()
        else:
            self.windows += 1
            self.total += rate

    def clear(self) -> None:
        """Reset to 0."""
        self.sum, self.windows, self.total = 0.0, 0, 0.0


@dataclass(slots=True)
class Baseline:
    """The rate of a job without contention. Rates have any unit; noise is relative."""

    expected: float | None = None
    thresholds: Thresholds = THRESHOLDS
    rate: float = 0.0
    windows: int = 0
    last: float = math.nan
    trusted: bool = False  # enough windows were observed
    fallen: Run = field(default_factory=Run)
    risen: Run = field(default_factory=Run)
    _first: list[float] = field(default_factory=list)  # rates until there are enough
    _squares: float = 0.0  # mean of the squared relative errors
    _h: float = math.inf

    @property
    def reference(self) -> float:
        """The rate that the job is compared with; 0 if there is none yet."""
        if self.trusted:
            return self.rate
        return (self.expected or 0.0) * (1 - self.thresholds.expected_slack)

    @property
    def noise(self) -> float:
        """Standard deviation of one window, relative to the rate."""
        seen = min(self.windows, MEMORY_WINDOWS) if self.trusted else 0
        prior = self.thresholds.noise**2 * PRIOR_WINDOWS
        return max(NOISE_MIN, math.sqrt((prior + self._squares * seen) / (PRIOR_WINDOWS + seen)))

    @property
    def allowance(self) -> float:
        """k, relative to the baseline: how far below it a window may be without counting."""
        noise = self.noise
        k = max(self.thresholds.slowdown, min(self.thresholds.slowdown_fast / 2, 1.5 * noise))
        return k + 1.28 * noise / math.sqrt(
            max(1, min(self.windows, MEMORY_WINDOWS))
        )  # the baseline itself may be too high

    @property
    def slowed(self) -> bool:
        """Whether the job has fallen by more than noise explains."""
        return self.fallen.sum >= self._h

    @property
    def suspicious(self) -> bool:
        """Whether the job may be falling."""
        return self.fallen.sum > self._h / 2

    @property
    def slowdown(self) -> float:
        """The relative loss since the job began to fall, from 0 to 1."""
        if not self.fallen.windows or self.reference <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.fallen.total / self.fallen.windows / self.reference))

    def below(self, rate: float) -> float:
        """Return how far a rate is below the baseline; negative if above."""
        return 1 - rate / self.reference if self.reference > 0 else 0.0

    def observe(self, rate: float, windows_between_alarms: float, *, pressed: bool, throttled: bool) -> None:
        """Add a window. `pressed`: a resource of the node is short; `throttled`: some attempt is throttled."""
        self.last = rate
        reference = self.reference
        if reference > 0:
            self._judge(rate, reference, windows_between_alarms)
        if self.trusted and self.risen.sum >= self._h:
            self._begin(self.risen)
        elif not self.suspicious and not (pressed and not throttled and self.windows >= FROZEN_WINDOWS):
            self._learn(rate)

    def adopt(self) -> None:
        """Accept the lower rate as the new baseline: no other job caused the fall."""
        if self.fallen.windows:
            self._begin(self.fallen)

    def _judge(self, rate: float, reference: float, windows_between_alarms: float) -> None:
        noise, allowance = self.noise, self.allowance
        self._h = threshold(round(allowance / noise, 2), windows_between_alarms)
        below = 1 - rate / reference
        most = ONE_WINDOW * self._h
        self.fallen.add(min((below - allowance) / noise, most), rate)
        self.risen.add(min((-below - allowance) / noise, most), rate)

    def _begin(self, run: Run) -> None:
        """Start from the rates of a run; the noise stays."""
        self.rate, self.windows, self.trusted = run.total / run.windows, run.windows, True
        self._first.clear()
        self.fallen.clear()
        self.risen.clear()

    def _learn(self, rate: float) -> None:
        self.windows += 1
        if not self.trusted:
            self._first.append(rate)
            if self.windows >= TRUSTED_WINDOWS:
                self._trust()
            return
        share = 1 / min(self.windows, MEMORY_WINDOWS)
        most = OUTLIER * self.noise
        error = max(-most, min(most, rate / self.rate - 1)) if self.rate > 0 else 0.0
        self._squares += share * (error**2 - self._squares)
        self.rate += share * (error * self.rate if self.rate > 0 else rate)

    def _trust(self) -> None:
        """Start from the trimmed mean of the first rates."""
        ordered = sorted(self._first)
        away = len(ordered) // 6
        middle = ordered[away : len(ordered) - away]
        self.rate, self.trusted = sum(middle) / len(middle), True
        self._first.clear()
        if self.rate > 0:
            errors = sorted(abs(rate / self.rate - 1) for rate in ordered)
            self._squares = (MAD_TO_DEVIATION * errors[len(errors) // 2]) ** 2
        self.fallen.clear()
        self.risen.clear()
