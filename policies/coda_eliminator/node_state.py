"""What is known of a node: its jobs' baselines, what its CPU jobs used lately, and whether anything is short there.

What is short by the node's own figures may be short for others alone: for somebody's own processes, or for a CPU job
that has more threads than cores. Where the kernel tells how long each attempt waits, and how busy the node is with what
is of no attempt, that is not held against CPU jobs.

A fall near an onset, within half a minute after a CPU job began to use much more, needs less to be believed than one at
any other time. How much less follows from how rare such times are on the node: noise may set off as many alarms a day
near onsets as at all other times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow
from cotenant.policies.coda_eliminator.baselines import UTILISATION_MIN, Baseline
from cotenant.policies.coda_eliminator.suspects import ONSET_WINDOWS, Attempt, Usage, uses
from cotenant.policies.coda_eliminator.thresholds import Limits

BASELINES_MAX = 8  # of one attempt: as many core counts as an allocator tries
GAP_WINDOWS = 12.0  # after a silence of so many windows nothing before it counts as just before
DAY_SECONDS = 86_400.0
EXPOSURE = 0.005  # the least share of windows that are taken to be near an onset
EXPOSURE_SHARE = 1 / 4320  # what one window counts in that share: a memory of six hours
OTHERS_CORES = 0.5  # of others' processes beyond what is usual: they explain why somebody waits for a CPU
OTHERS_SHARE = 0.02  # what one window counts in what is usual: a memory of four minutes
RATE, UTILISATION = "rate", "GPU utilisation"

Key = tuple[str, int, str]  # phase, cores, what is measured


@dataclass(slots=True)
class Victim:
    """A job that is below its baseline, in this window."""

    attempt: AttemptWindow
    baseline: Baseline
    what: str

    @property
    def id(self) -> Attempt:
        """Which attempt it is."""
        return self.attempt.job_id, self.attempt.number

    def told(self) -> str:
        """Say by how much it is hurt."""
        shown = "GPU utilisation" if self.what == UTILISATION else "rate"
        unit = " %" if self.what == UTILISATION else "/s"
        now = self.baseline.reference * (1 - self.baseline.slowdown)
        return (
            f"{self.attempt.job_id}'s {shown} is {now:.3g}{unit}, {self.baseline.slowdown:.0%} below its baseline of "
            f"{self.baseline.reference:.3g}{unit}"
        )


@dataclass(slots=True)
class Watch:
    """One node, window after window."""

    limits: Limits
    began: float = math.nan
    last: float = -math.inf
    baselines: dict[Attempt, dict[Key, Baseline]] = field(default_factory=dict)
    usages: dict[Attempt, Usage] = field(default_factory=dict)
    active: dict[Attempt, Key] = field(default_factory=dict)  # by which baseline each was judged last
    steady: dict[Attempt, Victim] = field(default_factory=dict)  # whose rate may be judged, in this window
    cpu: dict[Attempt, AttemptWindow] = field(default_factory=dict)  # who may be throttled, in this window
    gpu_jobs: frozenset[str] = frozenset()
    onset: str = ""  # which CPU job began to use much more lately; "": none
    exposure: float = 0.01  # the share of windows in which one had
    others: float = math.nan  # cores that were busy with what is of no attempt, on average over a few minutes

    def see(self, window: NodeWindow, *, held: bool) -> None:
        """Take a window in. `held`: somebody is held back, so that rates may be those of jobs that nobody hurts."""
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
        self._judge(window, training, held)
        self.others += OTHERS_SHARE * (window.cores_of_others - self.others)
        for known in (self.baselines, self.active):
            for gone in known.keys() - training.keys():
                del known[gone]

    def _note_uses(self, window: NodeWindow) -> None:
        for gone in self.usages.keys() - self.cpu.keys():
            del self.usages[gone]
        for id, use in zip(self.cpu, uses(window, self.cpu.values()), strict=True):
            came = id not in self.usages and self.began < window.now
            self.usages.setdefault(id, Usage()).add(use, self.cpu[id].cores, came=came)
        self.onset = self._onset(window)
        self.exposure += EXPOSURE_SHARE * (bool(self.onset) - self.exposure)

    def _judge(self, window: NodeWindow, training: dict[Attempt, AttemptWindow], held: bool) -> None:
        share = max(self.exposure, EXPOSURE) if self.onset else 1.0
        alarms = share * len(training) * DAY_SECONDS / window.seconds / self.limits.false_alarms_per_day
        between = 1.1 ** round(math.log(max(alarms, 10.0), 1.1))  # in steps, so that thresholds are found only once
        pressed = bool(self.pressure(window))
        self.steady = {}
        for id, attempt in training.items():
            if (found := self._measured(id, attempt)) is None or attempt.unsteady:
                continue
            what, figure = found
            baseline = self._baseline(id, (attempt.phase, attempt.cores, what), attempt)
            baseline.observe(figure, between, pressed=pressed, held=held)
            self.steady[id] = Victim(attempt, baseline, what)

    def _measured(self, id: Attempt, attempt: AttemptWindow) -> tuple[str, float] | None:
        """Find what a job is judged by: its rate, or the utilisation of its GPUs if it never told a rate."""
        if attempt.rate_per_second is not None:
            return RATE, attempt.rate_per_second
        if attempt.gpu_utilisation_percent is None or (id in self.active and self.active[id][2] == RATE):
            return None
        return UTILISATION, attempt.gpu_utilisation_percent

    def _baseline(self, id: Attempt, key: Key, attempt: AttemptWindow) -> Baseline:
        mine = self.baselines.setdefault(id, {})
        if (baseline := mine.pop(key, None)) is None:
            expected = attempt.expected_rate_per_second if key[2] == RATE else None
            baseline = Baseline(expected, self.limits)
            while len(mine) >= BASELINES_MAX:
                del mine[next(iter(mine))]
        mine[key] = baseline  # the last one used is the last to be forgotten
        if self.active.get(id) != key:
            self.active[id] = key
            baseline.fallen.clear()
            baseline.risen.clear()
        return baseline

    def victims(self) -> list[Victim]:
        """List the jobs that are hurt now, the worst first."""
        hurt = [
            one
            for one in self.steady.values()
            if one.baseline.hurt and (one.what == RATE or one.baseline.reference >= UTILISATION_MIN)
        ]
        return sorted(hurt, key=lambda one: (-one.baseline.slowdown, *one.id))

    def well(self) -> bool:
        """Tell whether nobody seems to be falling."""
        return not any(one.baseline.uneasy for one in self.steady.values())

    def bandwidth_percent(self, window: NodeWindow) -> float | None:
        """Tell what of the node's peak is in use."""
        used, peak = window.memory_bandwidth_bytes_per_second, window.memory_bandwidth_peak_bytes_per_second
        return 100 * used / peak if peak and used is not None else None

    def pressure(self, window: NodeWindow) -> str:
        """Say what is short on the node by its own figures; nothing where all is there."""
        limits, used = self.limits, self.bandwidth_percent(window)
        if used is not None and used > limits.bandwidth_percent:
            return f"memory bandwidth is at {used:.0f} % of the node's peak"
        if window.memory_some_percent > limits.memory_percent and self._felt(window):
            return f"tasks wait for memory {window.memory_some_percent:.0f} % of the time"
        if window.io_some_percent > limits.io_percent:
            return f"tasks wait for storage {window.io_some_percent:.0f} % of the time"
        if window.cpu_some_percent > limits.cpu_percent and self._of_ours(window):
            return f"tasks wait for a CPU {window.cpu_some_percent:.0f} % of the time"
        return ""

    def _felt(self, window: NodeWindow) -> bool:
        """Tell whether some job that may be a victim waits for memory; true too where the kernel does not tell."""
        waits = [attempt.memory_some_percent for attempt in window.attempts if attempt.job_id in self.gpu_jobs]
        return any(wait is None or wait > self.limits.memory_percent for wait in waits)

    def _of_ours(self, window: NodeWindow) -> bool:
        """Tell whether those who wait for a CPU may wait for an attempt, not for somebody else's processes."""
        if window.cores_of_others - self.others >= OTHERS_CORES:
            return False
        waits = [attempt.cpu_some_percent for attempt in window.attempts]
        return any(wait is None or wait > self.limits.cpu_percent for wait in waits)

    def _onset(self, window: NodeWindow) -> str:
        """Say which CPU job began to use much more lately; nothing where none did."""
        since = window.now - (ONSET_WINDOWS - 0.5) * window.seconds
        risen = [(-usage.rose, id) for id, usage in self.usages.items() if usage.rose >= since]
        return f"{min(risen)[1][0]} began to use much more at that time" if risen else ""
