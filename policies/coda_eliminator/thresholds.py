"""Thresholds for detecting contention; `docs/eliminator.md` gives their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cotenant.core.model.validation import Violation


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a job counts as slowed down, what counts as pressure, and the durations of trials and throttles.

    slowdown: a job that is further below its baseline than this is a victim; relative to the baseline.
    slowdown_fast: the slowdown for which the test is tuned: it is detected soonest.
    noise: standard deviation of a rate from window to window, relative to it, until a job's own is known.
    false_alarms_per_day: maximum number of alarms on one node from noise alone.
    expected_slack: relative error of a predicted rate that counts as the predictor's fault.
    bandwidth_percent: of a node's peak; traffic above this is pressure.
    bandwidth_calm_percent: throttles are not relaxed while traffic is above this.
    cpu_percent: share of time in which tasks wait for a CPU; above this is pressure.
    memory_percent: the same for memory.
    io_percent: the same for storage.
    look_windows: duration of a trial in windows, unless noise needs more.
    calm_seconds: calm time after which one rung is relaxed.
    calm_seconds_max: limit to which that time doubles each time that relaxing slows a job down again.
    suspended_seconds_max: maximum time for which an attempt is suspended.
    suspended_within_seconds: time over which suspensions are counted; then the job is asked to move.
    cleared_seconds: time for which a suspect is left alone after a trial without effect; doubled each time, up to 16
      times.
    suspects_together_max: maximum number of suspects throttled together, if throttling each alone had no effect.
    """

    slowdown: float = 0.05
    slowdown_fast: float = 0.15
    noise: float = 0.05
    false_alarms_per_day: float = 0.25
    expected_slack: float = 0.15
    bandwidth_percent: float = 75.0
    bandwidth_calm_percent: float = 65.0
    cpu_percent: float = 30.0
    memory_percent: float = 10.0
    io_percent: float = 30.0
    look_windows: int = 2
    calm_seconds: float = 60.0
    calm_seconds_max: float = 960.0
    suspended_seconds_max: float = 300.0
    suspended_within_seconds: float = 1800.0
    cleared_seconds: float = 300.0
    suspects_together_max: int = 4

    def check(self) -> Iterator[Violation]:
        """Yield a violation for each invalid figure."""
        for name in ("slowdown", "slowdown_fast", "noise", "expected_slack"):
            if not 0.001 <= getattr(self, name) < 1:
                yield Violation(name, f"must be 0.001 or more and below 1, not {getattr(self, name):g}")
        for name in ("bandwidth_percent", "bandwidth_calm_percent", "cpu_percent", "memory_percent", "io_percent"):
            if not 0 <= getattr(self, name) <= 100:
                yield Violation(name, f"must be from 0 to 100, not {getattr(self, name):g}")
        for name in ("calm_seconds", "calm_seconds_max", "suspended_seconds_max", "cleared_seconds"):
            if not 1 <= getattr(self, name) <= 86_400:
                yield Violation(name, f"must be from 1 to 86400, not {getattr(self, name):g}")
        if not 1e-6 <= self.false_alarms_per_day <= 1e4:
            yield Violation("false_alarms_per_day", f"must be from 1e-6 to 1e4, not {self.false_alarms_per_day:g}")
        if not 1 <= self.look_windows <= 12:
            yield Violation("look_windows", f"must be from 1 to 12, not {self.look_windows}")
        if not 1 <= self.suspects_together_max <= 16:
            yield Violation("suspects_together_max", f"must be from 1 to 16, not {self.suspects_together_max}")
        if self.slowdown > self.slowdown_fast:
            yield Violation("slowdown_fast", "must not be below slowdown")
        if self.bandwidth_calm_percent > self.bandwidth_percent:
            yield Violation("bandwidth_calm_percent", "must not be above bandwidth_percent")
        if self.calm_seconds > self.calm_seconds_max:
            yield Violation("calm_seconds_max", "must not be below calm_seconds")
        if not self.suspended_seconds_max <= self.suspended_within_seconds <= 86_400:
            yield Violation("suspended_within_seconds", "must be from suspended_seconds_max to 86400")


THRESHOLDS = Thresholds()
