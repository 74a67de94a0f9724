"""Which cores the running jobs of a Slurm node should have: fewer than allocated, or some that others do not use. Pure.

Theory of operation. Slurm gives a job its cores for its whole life, and cannot change them while it runs. A job that
uses fewer is *slimmed*: it keeps its first cores, as many as it needs. How many is told (θ, learned from earlier runs
of its kind), or measured: its largest use of CPU time within a window, with headroom. The cores that this frees are
*lent* to jobs with GPUs on the same node that use all of theirs, or of which θ is told to be larger.

The owner comes first. A slimmed job that uses nearly all that it kept gets everything back at once, and is left alone
for a while, which doubles each time. So does a job with a new step: it begins something else. A job whose threads are
bound to single cores, or that is suspended, has what Slurm gave it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW_SECONDS = 30.0  # of use, before a job is slimmed
HEADROOM = 1.25  # of the largest use
PRESSED = 0.9  # of the cores that it has: it may need more
IDLE = 0.7  # of the cores that a borrower has: some are returned
PRESSED_TICKS = 3  # before cores are lent to it
QUIET_SECONDS, QUIET_SECONDS_MAX = 60.0, 3600.0
SAMPLES_MAX = 3600


@dataclass(frozen=True, slots=True)
class JobUse:
    """A running job on this node.

    `cores` are those that Slurm gave it, `used` the cores that it kept busy since the last look, None if unknown.
    `told` is θ of its kind, None if unknown. `fixed`: its steps must keep their cores; the text says why.
    """

    job: str
    cores: tuple[int, ...]
    used: float | None = None
    gpus: bool = False
    told: int | None = None
    steps: frozenset[str] = frozenset()
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """The cores that a job should have: those that it keeps of its own, those lent to it, and why."""

    kept: tuple[int, ...]
    lent: tuple[int, ...] = ()
    reason: str = ""

    @property
    def cores(self) -> tuple[int, ...]:
        """All its cores."""
        return tuple(sorted({*self.kept, *self.lent}))


@dataclass
class _History:
    steps: frozenset[str]
    cores: tuple[int, ...]
    quiet_until: float
    uses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    returned: int = 0
    pressed: int = 0


class CoreSharing:
    """Decides at each look from the jobs' uses so far. Times are seconds on a monotonic clock."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS, *, lend_idle: bool = False) -> None:
        self._window_seconds, self._lend_idle = window_seconds, lend_idle
        self._histories: dict[str, _History] = {}
        self._shares: dict[str, Share] = {}

    def decide(self, now: float, jobs: Sequence[JobUse], node_cores: Iterable[int] = ()) -> Mapping[str, Share]:
        """Return the shares of jobs that should not have just the cores that Slurm gave them."""
        present = {job.job for job in jobs}
        self._histories = {job: history for job, history in self._histories.items() if job in present}
        kept = {job.job: self._keep(now, job) for job in jobs}
        owned = {core for job in jobs for core in job.cores}
        spare = owned - {core for share in kept.values() for core in share.kept}
        if self._lend_idle:
            spare |= {*node_cores} - owned
        self._shares = self._lend(jobs, kept, spare)
        return {job.job: share for job in jobs if (share := self._shares[job.job]).cores != job.cores}

    def _keep(self, now: float, job: JobUse) -> Share:
        """Return what a job keeps of its own cores."""
        whole = Share(job.cores)
        history = self._histories.get(job.job)
        if history is None or history.cores != job.cores:
            quiet = 0.0 if job.told else self._window_seconds
            history = self._histories[job.job] = _History(job.steps, job.cores, now + quiet)
        if job.steps - history.steps:  # it begins something else
            history.uses.clear()
            history.quiet_until = max(history.quiet_until, now + self._window_seconds)
        history.steps = job.steps
        if job.fixed or job.used is None:
            history.uses.clear()
            history.pressed = 0
            history.quiet_until = max(history.quiet_until, now + (self._window_seconds if job.fixed else 0.0))
            return whole
        held = self._shares.get(job.job, whole)
        history.uses.append((now, job.used))
        history.pressed = history.pressed + 1 if job.used >= PRESSED * len(held.cores) else 0
        slimmed = len(held.kept) < len(job.cores)
        if slimmed and history.pressed and not job.told:
            history.quiet_until = now + min(QUIET_SECONDS * 2**history.returned, QUIET_SECONDS_MAX)
            history.returned += 1
            history.uses.clear()
            return whole
        return whole if now < history.quiet_until else self._slimmed(now, job, history)

    def _slimmed(self, now: float, job: JobUse, history: _History) -> Share:
        if job.told:
            count, why = job.told, f"{job.told} of its {len(job.cores)} cores are enough, by earlier runs"
        else:
            recent = [used for at, used in history.uses if at >= now - self._window_seconds]
            if not recent or history.uses[0][0] > now - self._window_seconds / 2:
                return Share(job.cores)
            peak = max(recent)
            count = max(1, math.ceil(peak * HEADROOM))
            why = f"it used {peak:.1f} of its {len(job.cores)} cores at most"
        return Share(job.cores[:count], reason=why) if count < len(job.cores) else Share(job.cores)

    def _lend(self, jobs: Sequence[JobUse], kept: Mapping[str, Share], spare: set[int]) -> dict[str, Share]:
        """Return all shares, with the spare cores lent; loans that are still good stay where they are."""
        shares = dict(kept)
        wanted: dict[str, int] = {}
        for job in jobs:
            held = self._shares.get(job.job, kept[job.job])
            wanted[job.job] = self._wanted(job, held) if len(kept[job.job].kept) == len(job.cores) else 0
            stay = [core for core in held.lent if core in spare][: wanted[job.job]]
            spare.difference_update(stay)
            shares[job.job] = Share(kept[job.job].kept, tuple(stay), kept[job.job].reason)
        for job in jobs:
            share = shares[job.job]
            more = sorted(spare)[: max(0, wanted[job.job] - len(share.lent))]
            spare.difference_update(more)
            if more:
                self._histories[job.job].pressed = 0  # look at the effect before the next
            lent = tuple(sorted((*share.lent, *more)))
            if lent:
                why = f"it needs {job.told} cores" if job.told else f"it uses all of its {len(job.cores)} cores"
                shares[job.job] = Share(share.kept, lent, f"{why}, and others do not use theirs")
        return shares

    def _wanted(self, job: JobUse, held: Share) -> int:
        """Return how many cores should be lent to a job if they are free."""
        history = self._histories[job.job]
        if not job.gpus or job.fixed or job.used is None:
            return 0
        if job.told:
            return max(0, job.told - len(job.cores))
        if history.pressed >= PRESSED_TICKS:
            return min(len(held.lent) + 1, len(job.cores))
        if held.lent and job.used < IDLE * len(held.cores):
            return len(held.lent) - 1
        return len(held.lent)
