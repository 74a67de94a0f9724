"""Who is held back on a node, how, what the agent is told of that, and what a change brought to the victim.

What a node does not carry out is said again, and then given up; what it does that nobody here has said is taken up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import FREE, AttemptWindow, Directive, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import Rung, cores_each, rung_of, rungs
from cotenant.policies.coda_eliminator.suspects import Attempt
from cotenant.policies.coda_eliminator.thresholds import LIMITS, Limits

PROBATION_SECONDS = 300.0  # whoever is free again is known for so long
ASKED_MAX = 3  # times that the agent is told the same


@dataclass(slots=True)
class Hold:
    """An attempt that is held back; rung -1: it is free again, but known."""

    ladder: tuple[Rung, ...]
    cores: int
    rung: int
    throttle: Throttle
    wait: float
    since: float  # when it came to this rung
    victim: Attempt | None = None
    proven: bool = False
    before: int = -1  # the rung that was given back last
    returned: float = -math.inf  # when that was
    asked: int = 0  # times that the agent was told and did not do it
    moving: float = -math.inf  # when it was asked to move away
    told: str = ""  # what its directives say
    score: float = 0.0  # how much spoke against it when it was tried
    untested: bool = False  # proven with others only: whether it has a part in it is found by giving it all back

    @property
    def gentlest(self) -> int:
        """The lowest rung at which it still runs; -1: there is none."""
        return len(self.ladder) - 2


@dataclass(slots=True)
class Look:
    """What a change brought to a victim: how far below its baseline it was, and is."""

    victim: Attempt
    suspects: tuple[Attempt, ...]  # several: they are on trial together
    loss: float
    loss_windows: int
    began: float
    windows: int = 0
    below: float = 0.0  # summed up
    held_with: tuple[Attempt, ...] = ()  # who is held back as well, in a trial together

    @property
    def left(self) -> float:
        """What is still lost, on average."""
        return self.below / self.windows if self.windows else self.loss


@dataclass(slots=True)
class Held:
    """All whom one node holds back, or held back lately."""

    limits: Limits = LIMITS
    holds: dict[Attempt, Hold] = field(default_factory=dict)
    cleared: dict[Attempt, tuple[float, int]] = field(default_factory=dict)  # until when, and how often it was
    stood: dict[Attempt, deque[tuple[float, float]]] = field(default_factory=dict)  # when, and seconds suspended
    said: dict[Attempt, Directive] = field(default_factory=dict)  # in this window

    def forget(self, cpu: Mapping[Attempt, AttemptWindow], now: float) -> None:
        """Let go of all who left."""
        for known in (self.holds, self.cleared, self.stood):
            for gone in known.keys() - cpu.keys():
                del known[gone]
        for id, hold in list(self.holds.items()):
            if hold.rung < 0 and now - hold.since > PROBATION_SECONDS:
                del self.holds[id]

    def take_up(self, cpu: Mapping[Attempt, AttemptWindow], window: NodeWindow) -> None:
        """Know those again that are held back, whoever said so."""
        for id, attempt in cpu.items():
            if id not in self.holds and not attempt.throttle.free:
                ladder = rungs(attempt, window)
                rung = rung_of(ladder, attempt.throttle)
                self.holds[id] = Hold(
                    ladder,
                    cores_each(attempt),
                    rung,
                    attempt.throttle,
                    self.limits.calm_seconds,
                    window.now,
                    proven=True,
                    told="it was held back before",
                )

    def remind(self, cpu: Mapping[Attempt, AttemptWindow], window: NodeWindow) -> None:
        """Tell the agent again what it has not done; what it cannot do is not counted on."""
        for id, hold in list(self.holds.items()):
            attempt = cpu[id]
            if cores_each(attempt) != hold.cores and hold.rung >= 0:  # it was given other cores
                hold.ladder, hold.cores = rungs(attempt, window), cores_each(attempt)
                hold.rung = min(rung_of(hold.ladder, hold.throttle), len(hold.ladder) - 1)
            if attempt.throttle == hold.throttle:
                hold.asked = 0
            elif hold.asked < ASKED_MAX:
                hold.asked += 1
                if hold.asked > 1:
                    self._say(id, hold, hold.told)
            else:
                hold.asked, hold.throttle = 0, attempt.throttle
                hold.rung = rung_of(hold.ladder, attempt.throttle)
                if hold.rung < 0:
                    self.set(id, hold, -1, window.now, "the node cannot hold it back")
                    self.clear(id, window.now)
                    del self.holds[id]

    def limit(self, window: NodeWindow) -> None:
        """Let nobody stand still for too long: it is asked to move away."""
        for id, hold in self.holds.items():
            if not hold.throttle.suspended:
                continue
            self.stood.setdefault(id, deque()).append((window.now, window.seconds))
            if self._stood_seconds(id, window.now) + window.seconds > self.limits.suspended_seconds_max:
                hold.moving = window.now
                minutes = self.limits.suspended_seconds_max / 60
                why = f"it stood still for {minutes:.3g} min, which is all it may, and should go on elsewhere"
                self.set(id, hold, hold.gentlest, window.now, why, move=True)

    def _stood_seconds(self, id: Attempt, now: float) -> float:
        spans = self.stood.get(id, deque())
        while spans and now - spans[0][0] > self.limits.suspended_within_seconds:
            spans.popleft()
        return math.fsum(seconds for _, seconds in spans)

    def may_stand(self, id: Attempt, now: float) -> bool:
        """Whether an attempt may be suspended: it has not stood still for too long lately."""
        return self._stood_seconds(id, now) + self.limits.calm_seconds <= self.limits.suspended_seconds_max

    def any_proven(self) -> bool:
        """Whether somebody is held back who was proven to hurt."""
        return any(hold.proven and hold.rung >= 0 for hold in self.holds.values())

    def is_held(self, id: Attempt) -> bool:
        """Whether an attempt is held back."""
        return id in self.holds and self.holds[id].rung >= 0

    def may_be_tried(self, id: Attempt, now: float) -> bool:
        """Whether an attempt is free, and no trial of it brought nothing lately."""
        return not self.is_held(id) and (id not in self.cleared or self.cleared[id][0] <= now)

    def clear(self, id: Attempt, now: float) -> None:
        """Leave a suspect alone for a while, for twice as long each time."""
        times = self.cleared.get(id, (0.0, 0))[1]
        self.cleared[id] = (now + self.limits.cleared_seconds * 2.0 ** min(times, 4), times + 1)

    def let_go(self, id: Attempt, now: float, why: str) -> None:
        """Give a suspect all back whose trial is over, and leave it alone for a while."""
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
        """Bring an attempt to a rung of its ladder, and say so."""
        hold.rung, hold.since, hold.asked, hold.told = rung, now, 0, why
        hold.throttle = hold.ladder[rung].throttle if rung >= 0 else FREE
        self._say(id, hold, why, victim=victim, slowdown=slowdown, move=move)

    def _say(
        self, id: Attempt, hold: Hold, why: str, *, victim: str = "", slowdown: float = 0.0, move: bool = False
    ) -> None:
        share = hold.ladder[hold.rung].share if hold.rung >= 0 else 1.0
        self.said[id] = Directive(
            *id,
            share=share,
            reason=why,
            throttle=hold.throttle,
            move=move,
            victim_job_id=victim or (hold.victim[0] if hold.victim else ""),
            victim_slowdown=slowdown,
        )
