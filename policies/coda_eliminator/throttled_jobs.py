"""The throttled attempts of a node, the directives to its agent, and the effect on the victims.

A directive that a node does not carry out is repeated, and then given up; a throttle found in force without a directive
is adopted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import Rung, cores_each, rung_of, rungs
from cotenant.policies.coda_eliminator.suspects import Attempt
from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS, Thresholds

PROBATION_SECONDS = 300.0  # released attempts are remembered this long
ASKED_MAX = 3  # times that the agent is told the same


@dataclass(slots=True)
class Hold:
    """A throttled attempt; rung -1: it is free again, but remembered."""

    ladder: tuple[Rung, ...]
    cores: int
    rung: int
    throttle: Throttle
    wait: float
    since: float  # when it came to this rung
    victim: Attempt | None = None
    proven: bool = False
    before: int = -1  # the rung before the last relaxation
    returned: float = -math.inf  # when that was
    asked: int = 0  # times that the agent did not carry out the directive
    moving: float = -math.inf  # when it was asked to move away
    reason: str = ""  # the reason in its directives
    score: float = 0.0  # the evidence against it when it was tried
    untested: bool = False  # proven only together with others: releasing it shows whether it has a part in it

    @property
    def gentlest(self) -> int:
        """The lowest rung at which it still runs; -1 if there is none."""
        return len(self.ladder) - 2


@dataclass(slots=True)
class Trial:
    """The effect of a change on a victim: how far below its baseline it was, and is."""

    victim: Attempt
    suspects: tuple[Attempt, ...]  # several in a joint trial
    loss: float
    loss_windows: int
    began: float
    windows: int = 0
    below: float = 0.0  # summed
    throttled_with: tuple[Attempt, ...] = ()  # attempts that are throttled as well, in a joint trial

    @property
    def left(self) -> float:
        """The mean remaining loss."""
        return self.below / self.windows if self.windows else self.loss


@dataclass(slots=True)
class ThrottledJobs:
    """The attempts that one node throttles, or throttled recently."""

    thresholds: Thresholds = THRESHOLDS
    holds: dict[Attempt, Hold] = field(default_factory=dict)
    cleared: dict[Attempt, tuple[float, int]] = field(default_factory=dict)  # until when, and how often
    suspensions: dict[Attempt, deque[tuple[float, float]]] = field(default_factory=dict)  # when, and seconds suspended
    directives: dict[Attempt, Directive] = field(default_factory=dict)  # in this window

    def forget(self, cpu: Mapping[Attempt, AttemptWindow], now: float) -> None:
        """Drop the attempts that have left."""
        for known in (self.holds, self.cleared, self.suspensions):
            for gone in known.keys() - cpu.keys():
                del known[gone]
        for id, hold in list(self.holds.items()):
            if hold.rung < 0 and now - hold.since > PROBATION_SECONDS:
                del self.holds[id]

    def adopt(self, cpu: Mapping[Attempt, AttemptWindow], window: NodeWindow) -> None:
        """Adopt attempts that are already throttled."""
        for id, attempt in cpu.items():
            if id not in self.holds and not attempt.throttle.free:
                ladder = rungs(attempt, window)
                rung = rung_of(ladder, attempt.throttle)
                self.holds[id] = Hold(
                    ladder,
                    cores_each(attempt),
                    rung,
                    attempt.throttle,
                    self.thresholds.calm_seconds,
                    window.now,
                    proven=True,
                    reason="it was already throttled",
                )

    def resend(self, cpu: Mapping[Attempt, AttemptWindow], window: NodeWindow) -> None:
        """Repeat directives that the agent has not carried out; give up after a few."""
        for id, hold in list(self.holds.items()):
            attempt = cpu[id]
            if cores_each(attempt) != hold.cores and hold.rung >= 0:  # it was resized
                hold.ladder, hold.cores = rungs(attempt, window), cores_each(attempt)
                hold.rung = min(rung_of(hold.ladder, hold.throttle), len(hold.ladder) - 1)
            if attempt.throttle == hold.throttle:
                hold.asked = 0
            elif hold.asked < ASKED_MAX:
                hold.asked += 1
                if hold.asked > 1:
                    self._emit(id, hold, hold.reason)
            else:
                hold.asked, hold.throttle = 0, attempt.throttle
                hold.rung = rung_of(hold.ladder, attempt.throttle)
                if hold.rung < 0:
                    self.set(id, hold, -1, window.now, "the node cannot throttle it")
                    self.clear(id, window.now)
                    del self.holds[id]

    def limit_suspensions(self, window: NodeWindow) -> None:
        """End suspensions that are too long: the job is asked to move away."""
        for id, hold in self.holds.items():
            if not hold.throttle.suspended:
                continue
            self.suspensions.setdefault(id, deque()).append((window.now, window.seconds))
            if self._suspended_seconds(id, window.now) + window.seconds > self.thresholds.suspended_seconds_max:
                hold.moving = window.now
                minutes = self.thresholds.suspended_seconds_max / 60
                why = f"it was suspended for {minutes:.3g} min, the maximum, and should continue elsewhere"
                self.set(id, hold, hold.gentlest, window.now, why, move=True)

    def _suspended_seconds(self, id: Attempt, now: float) -> float:
        spans = self.suspensions.get(id, deque())
        while spans and now - spans[0][0] > self.thresholds.suspended_within_seconds:
            spans.popleft()
        return math.fsum(seconds for _, seconds in spans)

    def may_suspend(self, id: Attempt, now: float) -> bool:
        """Return whether an attempt may be suspended: it was not suspended for too long recently."""
        return self._suspended_seconds(id, now) + self.thresholds.calm_seconds <= self.thresholds.suspended_seconds_max

    def any_proven(self) -> bool:
        """Return whether a proven attempt is throttled."""
        return any(hold.proven and hold.rung >= 0 for hold in self.holds.values())

    def is_throttled(self, id: Attempt) -> bool:
        """Return whether an attempt is throttled."""
        return id in self.holds and self.holds[id].rung >= 0

    def may_be_tried(self, id: Attempt, now: float) -> bool:
        """Return whether an attempt is free and had no recent trial without effect."""
        return not self.is_throttled(id) and (id not in self.cleared or self.cleared[id][0] <= now)

    def clear(self, id: Attempt, now: float) -> None:
        """Leave a suspect alone for a while, for twice as long each time."""
        times = self.cleared.get(id, (0.0, 0))[1]
        self.cleared[id] = (now + self.thresholds.cleared_seconds * 2.0 ** min(times, 4), times + 1)

    def release(self, id: Attempt, now: float, why: str) -> None:
        """Release a suspect after its trial, and leave it alone for a while."""
        self.clear(id, now)
        self.set(id, self.holds[id], -1, now, why)
        del self.holds[id]

    def set(
        self,
        id: Attempt,
        hold: Hold,
        rung: int,
        now: float,
        why: str,
        *,
        victim: str = "",
        slowdown: float = 0.0,
        move: bool = False,
    ) -> None:
        """Set the rung of an attempt and emit a directive."""
        hold.rung, hold.since, hold.asked, hold.reason = rung, now, 0, why
        hold.throttle = hold.ladder[rung].throttle if rung >= 0 else FREE
        self._emit(id, hold, why, victim=victim, slowdown=slowdown, move=move)

    def _emit(
        self, id: Attempt, hold: Hold, why: str, *, victim: str = "", slowdown: float = 0.0, move: bool = False
    ) -> None:
        share = hold.ladder[hold.rung].share if hold.rung >= 0 else 1.0
        self.directives[id] = Directive(
            *id,
            share=share,
            reason=why,
            throttle=hold.throttle,
            move=move,
            victim_job_id=victim or (hold.victim[0] if hold.victim else ""),
            victim_slowdown=slowdown,
        )
