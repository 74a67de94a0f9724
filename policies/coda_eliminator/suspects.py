"""Suspects: CPU jobs, those first whose use rose when the victim fell.

For each CPU job the last two minutes are kept: cores used, memory bandwidth, last-level cache. Its **rise** is its use
since the victim began to fall minus its use before; a job that started then rose by its whole use. Each is relative to
what the node has, and the largest counts. Jobs with a steady high use come after those that rose, the heaviest first:
then the victim's other neighbor may have changed instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow

HISTORY_WINDOWS = 24
ONSET_WINDOWS = 6  # a fall may be due to an onset within this many windows
ONSET_CORES = 0.5  # less is not an onset ...
ONSET_SHARE = 0.25  # ... nor is less than this share of the cores it holds
LEVEL_SHARE = 0.25  # weight of the newest window in the level that a rise starts from
STANDING = 0.25  # weight of a steady use, beside that of a rise
RISES_MIN = 0.02  # of what the node has; less has no effect

Attempt = tuple[str, int]  # job, number


@dataclass(frozen=True, slots=True)
class Use:
    """The use of an attempt in a window: cores, and shares of the node's bandwidth and used cache, 0 to 1."""

    now: float
    cores: float
    bandwidth: float
    cache: float


@dataclass(slots=True)
class Usage:
    """The recent use of a CPU attempt, and when its use of cores last jumped."""

    recent: deque[Use] = field(default_factory=lambda: deque(maxlen=HISTORY_WINDOWS))
    rose: float = -math.inf
    _rising: bool = False
    _level: float = math.nan  # of its cores: a moving average over half a minute

    def add(self, use: Use, cores: int, *, is_new: bool) -> None:
        """Add a window of an attempt with this many cores; `is_new`: it was not on the node before."""
        if math.isnan(self._level):
            self._level = 0.0 if is_new else use.cores
        rising = use.cores - self._level >= max(ONSET_CORES, ONSET_SHARE * cores)
        if rising and not self._rising:
            self.rose = use.now
        self._rising = rising
        self._level += LEVEL_SHARE * (use.cores - self._level)
        self.recent.append(use)

    def before_and_since(self, start: float) -> tuple[Use, Use]:
        """Return the mean use before a time, and in the windows that ended at it or after."""
        before = [use for use in self.recent if use.now < start]
        since = [use for use in self.recent if use.now >= start] or [self.recent[-1]]
        return _mean(before), _mean(since)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A CPU attempt, the evidence against it as a score, and as text."""

    attempt: AttemptWindow
    score: float
    why: str


def _mean(uses: list[Use]) -> Use:
    many = len(uses) or 1
    return Use(
        0.0,
        sum(use.cores for use in uses) / many,
        sum(use.bandwidth for use in uses) / many,
        sum(use.cache for use in uses) / many,
    )


def uses(window: NodeWindow, attempts: Iterable[AttemptWindow]) -> list[Use]:
    """Return the use of CPU attempts in a window, in their order."""
    peak = window.memory_bandwidth_peak_bytes_per_second or window.memory_bandwidth_bytes_per_second or 0.0
    cache = sum(attempt.cache_bytes or 0.0 for attempt in window.attempts)
    return [
        Use(
            window.now,
            attempt.cores_used,
            (attempt.memory_bandwidth_bytes_per_second or 0.0) / peak if peak else 0.0,
            (attempt.cache_bytes or 0.0) / cache if cache else 0.0,
        )
        for attempt in attempts
    ]


def ranked(
    usages: dict[Attempt, Usage], attempts: Iterable[AttemptWindow], start: float, seconds: float, node_cores: float
) -> list[Suspect]:
    """Rank attempts by the evidence against them, for a victim that began to fall in the window ending at `start`.

    Noise may hide the first windows of a fall, so a rise shortly before it counts as a rise at that time.
    """
    earliest = start - (ONSET_WINDOWS - 0.5) * seconds
    found = []
    for attempt in attempts:
        usage = usages[attempt.job_id, attempt.number]
        found.append(_suspect(usage, attempt, usage.rose if usage.rose >= earliest else start, node_cores))
    guilty = [suspect for suspect in found if suspect.score > 0]
    return sorted(guilty, key=lambda one: (-one.score, one.attempt.job_id, one.attempt.number))


def _suspect(usage: Usage, attempt: AttemptWindow, start: float, node_cores: float) -> Suspect:
    before, since = usage.before_and_since(start)
    cores = max(node_cores, 1.0)
    rises = (
        (since.bandwidth - before.bandwidth, f"{since.bandwidth - before.bandwidth:.0%} of the memory bandwidth"),
        ((since.cores - before.cores) / cores, f"{since.cores - before.cores:.1f} cores"),
        (since.cache - before.cache, f"{since.cache - before.cache:.0%} of the cache"),
    )
    rise, of_what = max(rises)
    standing = max(since.bandwidth, since.cores / cores, since.cache)
    if rise >= RISES_MIN:
        return Suspect(attempt, rise + STANDING * standing, f"its use rose by {of_what} then")
    score = STANDING * standing if standing >= RISES_MIN else 0.0
    return Suspect(attempt, score, f"it uses {since.cores:.1f} cores")
