"""The state of a node: its jobs' baselines, the recent use of its CPU jobs, and whether a resource is short.

A resource that is short by the node's own figures may be short for others alone: for a user's own processes, or for a
CPU job that has more threads than cores. If the kernel reports how long each attempt waits, and how busy the node is
with processes outside of attempts, such a shortage is not attributed to CPU jobs.

A fall near an onset, within half a minute after a CPU job began to use much more, needs less evidence than at other
times. How much less follows from how rare such times are on the node: noise may trigger as many alarms a day near
onsets as at all other times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow
from cotenant.policies.coda_eliminator.baselines import UTILISATION_MIN, Baseline
from cotenant.policies.coda_eliminator.suspects import ONSET_WINDOWS, Attempt, Usage, uses
from cotenant.policies.coda_eliminator.thresholds import Thresholds

BASELINES_MAX = 8  # of one attempt: as many core counts as an allocator tries
GAP_WINDOWS = 12.0  # after a silence of this many windows, earlier windows do not count as recent
DAY_SECONDS = 86_400.0
EXPOSURE = 0.005  # the minimum share of windows that count as near an onset
EXPOSURE_SHARE = 1 / 4320  # weight of one window in that share: a memory of six hours
OTHERS_CORES = 0.5  # of outside processes beyond the usual: they explain waits for a CPU
OTHERS_SHARE = 0.02  # weight of one window in the usual use: a memory of four minutes
RATE, UTILISATION = "rate", "GPU utilisation"

Key = tuple[str, int, str]  # phase, cores, what is measured


@dataclass(slots=True)
class Victim:
    """A job that is below its baseline in this window."""

    attempt: AttemptWindow
    baseline: Baseline
    what: str

    @property
    def id(self) -> Attempt:
        """The attempt's job and number."""
        return self.attempt.job_id, self.attempt.number

    def describe(self) -> str:
        """Return a description of the slowdown."""
        shown = "GPU utilisation" if self.what == UTILISATION else "rate"
        unit = " %" if self.what == UTILISATION else "/s"
        now = self.baseline.reference * (1 - self.baseline.slowdown)
        return (
            f"{self.attempt.job_id}'s {shown} is {now:.3g}{unit}, {self.baseline.slowdown:.0%} below its baseline of "
            f"{self.baseline.reference:.3g}{unit}"
        )


@dataclass(slots=True)
class NodeState:
    """The state of one node, updated window by window."""

    thresholds: Thresholds
    began: float = math.nan
    last: float = -math.inf
    baselines: dict[Attempt, dict[Key, Baseline]] = field(default_factory=dict)
    usages: dict[Attempt, Usage] = field(default_factory=dict)
    active: dict[Attempt, Key] = field(default_factory=dict)  # the baseline by which each was judged last
    steady: dict[Attempt, Victim] = field(default_factory=dict)  # attempts whose rate may be judged in this window
    cpu: dict[Attempt, AttemptWindow] = field(default_factory=dict)  # attempts that may be throttled in this window
    gpu_jobs: frozenset[str] = frozenset()
    onset: str = ""  # the CPU job that recently began to use much more; "": none
    exposure: float = 0.01  # the share of windows near an onset
    others: float = math.nan  # cores used by processes outside of attempts, averaged over a few minutes

    def update(self, window: NodeWindow, *, throttled: bool) -> None:
        """Add a window. `throttled`: an attempt is throttled, so rates may be those of jobs without contention."""
        if not window.now - self.last <= GAP_WINDOWS * window.seconds:
            self.began = window.now
            self.usages.clear()
            for by_key in self.baselines.values():
                for baseline in by_key.values():
                    baseline.fallen.clear()
        self.last = window.now
        here = {(attempt.job_id, attempt.number): attempt for attempt in window.attempts}
        self.gpu_jobs = frozenset(attempt.job_id for attempt in here.values() if not attempt.cpu_job)
        self.cpu = {id: one for id, one in here.items() if one.cpu_job and one.job_id not in self.gpu_jobs}
        training = {id: one for id, one in here.items() if not one.cpu_job}
        self._note_uses(window)
        if math.isnan(self.others):
            self.others = window.cores_of_others
        self._judge(window, training, throttled)
        self.others += OTHERS_SHARE * (window.cores_of_others - self.others)
        for known in (self.baselines, self.active):
            for gone in known.keys() - training.keys():
                del known[gone]

    def _note_uses(self, window: NodeWindow) -> None:
        for gone in self.usages.keys() - self.cpu.keys():
            del self.usages[gone]
        for id, use in zip(self.cpu, uses(window, self.cpu.values()), strict=True):
            is_new = id not in self.usages and self.began < window.now
            self.usages.setdefault(id, Usage()).add(use, self.cpu[id].cores, is_new=is_new)
        self.onset = self._onset(window)
        self.exposure += EXPOSURE_SHARE * (bool(self.onset) - self.exposure)

    def _judge(self, window: NodeWindow, training: dict[Attempt, AttemptWindow], throttled: bool) -> None:
        share = max(self.exposure, EXPOSURE) if self.onset else 1.0
        alarms = share * len(training) * DAY_SECONDS / window.seconds / self.thresholds.false_alarms_per_day
        between = 1.1 ** round(math.log(max(alarms, 10.0), 1.1))  # in steps, so that each threshold is computed once
        pressed = bool(self.pressure(window))
        self.steady = {}
        for id, attempt in training.items():
            if (found := self._measured(id, attempt)) is None or not attempt.steady:
                continue
            what, figure = found
            baseline = self._baseline(id, (attempt.phase, attempt.cores, what), attempt)
            baseline.observe(figure, between, pressed=pressed, throttled=throttled)
            self.steady[id] = Victim(attempt, baseline, what)

    def _measured(self, id: Attempt, attempt: AttemptWindow) -> tuple[str, float] | None:
        """Return the figure a job is judged by: its rate, or its GPU utilization if it never reported a rate."""
        if attempt.rate_per_second is not None:
            return RATE, attempt.rate_per_second
        if attempt.gpu_utilisation_percent is None or (id in self.active and self.active[id][2] == RATE):
            return None
        return UTILISATION, attempt.gpu_utilisation_percent

    def _baseline(self, id: Attempt, key: Key, attempt: AttemptWindow) -> Baseline:
        mine = self.baselines.setdefault(id, {})
        if (baseline := mine.pop(key, None)) is None:
            expected = attempt.expected_rate_per_second if key[2] == RATE else None
            baseline = Baseline(expected, self.thresholds)
            while len(mine) >= BASELINES_MAX:
                del mine[next(iter(mine))]
        mine[key] = baseline  # the most recently used is dropped last
        if self.active.get(id) != key:
            self.active[id] = key
            baseline.fallen.clear()
            baseline.risen.clear()
        return baseline

    def victims(self) -> list[Victim]:
        """Return the jobs that are slowed down now, the worst first."""
        slowed = [
            one
            for one in self.steady.values()
            if one.baseline.slowed and (one.what == RATE or one.baseline.reference >= UTILISATION_MIN)
        ]
        return sorted(slowed, key=lambda one: (-one.baseline.slowdown, *one.id))

    def healthy(self) -> bool:
        """Return whether no job seems to be falling."""
        return not any(one.baseline.suspicious for one in self.steady.values())

    def bandwidth_percent(self, window: NodeWindow) -> float | None:
        """Return the used percentage of the node's peak bandwidth."""
        used, peak = window.memory_bandwidth_bytes_per_second, window.memory_bandwidth_peak_bytes_per_second
        return 100 * used / peak if peak and used is not None else None

    def pressure(self, window: NodeWindow) -> str:
        """Return which resource is short by the node's own figures; "" if none."""
        thresholds, used = self.thresholds, self.bandwidth_percent(window)
        if used is not None and used > thresholds.bandwidth_percent:
            return f"memory bandwidth is at {used:.0f} % of the node's peak"
        if window.memory_some_percent > thresholds.memory_percent and self._memory_wait_matters(window):
            return f"tasks wait for memory {window.memory_some_percent:.0f} % of the time"
        if window.io_some_percent > thresholds.io_percent:
            return f"tasks wait for storage {window.io_some_percent:.0f} % of the time"
        if window.cpu_some_percent > thresholds.cpu_percent and self._cpu_wait_matters(window):
            return f"tasks wait for a CPU {window.cpu_some_percent:.0f} % of the time"
        return ""

    def _memory_wait_matters(self, window: NodeWindow) -> bool:
        """Return whether a possible victim waits for memory; true if the kernel does not report it."""
        waits = [attempt.memory_some_percent for attempt in window.attempts if attempt.job_id in self.gpu_jobs]
        return any(wait is None or wait > self.thresholds.memory_percent for wait in waits)

    def _cpu_wait_matters(self, window: NodeWindow) -> bool:
        """Return whether waits for a CPU may be caused by attempts, not by outside processes."""
        if window.cores_of_others - self.others >= OTHERS_CORES:
            return False
        waits = [attempt.cpu_some_percent for attempt in window.attempts]
        return any(wait is None or wait > self.thresholds.cpu_percent for wait in waits)

    def _onset(self, window: NodeWindow) -> str:
        """Return a sentence on the CPU job that recently began to use much more; "" if none."""
        since = window.now - (ONSET_WINDOWS - 0.5) * window.seconds
        risen = [(-usage.rose, id) for id, usage in self.usages.items() if usage.rose >= since]
        return f"{min(risen)[1][0]} began to use much more at that time" if risen else ""
