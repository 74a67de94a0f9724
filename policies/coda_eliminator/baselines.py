"""What rate a job has when nobody hurts it, and whether it has fallen below that.

Theory of operation. Of each job, phase and core count there is a baseline of its own: an average with a memory of ten
minutes in which far outliers weigh little (Huber, 1964 [P]), and the noise around it, learnt the same way from a prior.
After 12 windows it is trusted. It does not learn while the job may be hurt.

A fall is found by a cumulative sum (Page, 1954 [P]): each window adds how many standard deviations the rate is below
the baseline, less an allowance k; the sum never goes below 0, and above h the job counts as fallen. k is half of the
slowdown that should be found fastest, which is the best k for it, but no less than the slowdown that counts at all, and
no more than 1.5 standard deviations. h follows from k and from how seldom noise may set it off: the mean run to a false
alarm is about (exp(2kb) − 2kb − 1) / 2k² with b = h + 1.166 (Siegmund, 1985 [P]). One window adds 0.6 h at most, so
that one bad window alone (a checkpoint, an evaluation) is no fall. With noise of 5 % in windows of 5 s and one alarm in
4 days over 8 jobs, k is 1.5 and h 3.7.

The same sum upwards finds that a job has become faster: then the baseline was that of a job that was hurt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from cotenant.policies.coda_eliminator.thresholds import LIMITS, Limits

TRUSTED_WINDOWS = 12  # a minute
MEMORY_WINDOWS = 120  # ten minutes
FROZEN_WINDOWS = 120  # under pressure a baseline learns for so long at most: what it learns may be a rate that is hurt
PRIOR_WINDOWS = 12  # what the noise that was assumed counts for
OUTLIER = 3.0  # standard deviations; what is further away counts as this far
NOISE_MIN = 0.005
MAD_TO_DEVIATION = 1.4826  # from the median of absolute errors, for normal noise
UTILISATION_MIN = 5.0  # percent; below that a GPU is idle, and says nothing
ONE_WINDOW = 0.6  # of h: what one window can add
_THRESHOLD_MIN = 1.0
_SIEGMUND = 1.166


@lru_cache(maxsize=4096)
def threshold(allowance: float, windows_between_alarms: float) -> float:
    """Tell h, in standard deviations, for an allowance k in standard deviations; never below 1.

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
    """A cumulative sum, and what was seen since it last was 0."""

    sum: float = 0.0
    windows: int = 0
    total: float = 0.0  # of the rates

    def add(self, excess: float, rate: float) -> None:
        """Take one window in."""
        self.sum += excess
        if self.sum <= 0:
            self.clear()
        else:
            self.windows += 1
            self.total += rate

    def clear(self) -> None:
        """Begin anew."""
        self.sum, self.windows, self.total = 0.0, 0, 0.0


@dataclass(slots=True)
class Baseline:
    """The rate of a job when nobody hurts it. Rates are in whatever unit they are told in, noise relative."""

    expected: float | None = None
    limits: Limits = LIMITS
    rate: float = 0.0
    windows: int = 0
    last: float = math.nan
    trusted: bool = False  # enough was seen
    fallen: Run = field(default_factory=Run)
    risen: Run = field(default_factory=Run)
    _first: list[float] = field(default_factory=list)  # rates, until they are enough
    _squares: float = 0.0  # mean of the squared relative errors
    _h: float = math.inf

    @property
    def reference(self) -> float:
        """What the job is held against; 0: there is nothing yet."""
        if self.trusted:
            return self.rate
        return (self.expected or 0.0) * (1 - self.limits.expected_slack)

    @property
    def noise(self) -> float:
        """Standard deviation of one window, relative to the rate."""
        seen = min(self.windows, MEMORY_WINDOWS) if self.trusted else 0
        prior = self.limits.noise**2 * PRIOR_WINDOWS
        return max(NOISE_MIN, math.sqrt((prior + self._squares * seen) / (PRIOR_WINDOWS + seen)))

    @property
    def allowance(self) -> float:
        """How far below the baseline a window may be without counting, k, relative to it."""
        noise = self.noise
        k = max(self.limits.slowdown, min(self.limits.slowdown_fast / 2, 1.5 * noise))
        return k + 1.28 * noise / math.sqrt(max(1, min(self.windows, MEMORY_WINDOWS)))  # it may be too high itself

    @property
    def hurt(self) -> bool:
        """Whether the job has fallen, beyond what noise explains."""
        return self.fallen.sum >= self._h

    @property
    def uneasy(self) -> bool:
        """Whether it may be falling."""
        return self.fallen.sum > self._h / 2

    @property
    def slowdown(self) -> float:
        """How far it is below its baseline since it began to fall, from 0 to 1."""
        if not self.fallen.windows or self.reference <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.fallen.total / self.fallen.windows / self.reference))

    def below(self, rate: float) -> float:
        """Tell how far a rate is below the baseline; negative: above."""
        return 1 - rate / self.reference if self.reference > 0 else 0.0

    def observe(self, rate: float, windows_between_alarms: float, *, pressed: bool, held: bool) -> None:
        """Take a window in. `pressed`: something on the node is short; `held`: somebody is held back for this job."""
        self.last = rate
        reference = self.reference
        if reference > 0:
            self._judge(rate, reference, windows_between_alarms)
        if self.trusted and self.risen.sum >= self._h:
            self._begin(self.risen)
        elif not self.uneasy and not (pressed and not held and self.windows >= FROZEN_WINDOWS):
            self._learn(rate)

    def adopt(self) -> None:
        """Take the fall for what the job is now: nobody's doing, so another rate of its own."""
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
        """Start from the rates of a run; the noise is taken to be as before."""
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
        """Start from the middle of the first rates, whatever a few of them were."""
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
