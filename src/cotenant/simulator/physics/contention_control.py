"""A contention policy at work: asked about nodes' windows at a cadence, and what it says is done.

Only jobs without GPUs are ever throttled (CODA [P]), so nobody is asked in a trace without any. A node is asked about
for 24 windows after anything began or ended on it, so that what is usual there can be learnt, and for as long as a job
on it is disturbed or held back. At all other times nothing changes on it but noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.core.policy.protocols import ContentionPolicy, Directive, NodeWindow
from cotenant.simulator.job import Life
from cotenant.simulator.physics.speeds import Speeds
from cotenant.simulator.policy_set import PolicyFailed

PATIENCE_SECONDS = 86_400.0  # nothing else happens and the policy changes nothing: whom it suspended stays suspended
ATTENTION_WINDOWS = 24


class Eliminating:
    """Asks a contention policy every so often; does nothing without one."""

    def __init__(self, policy: ContentionPolicy | None, speeds: Speeds | None, interval_seconds: float) -> None:
        self._policy, self._speeds, self._interval_seconds = policy, speeds, interval_seconds
        self._until: dict[int, float] = {}  # until when nodes are asked about, whatever happens there
        self._changed_at = 0.0
        self._last = 0  # how many intervals had passed when it was last asked
        self.wanted = True  # there are jobs that could be throttled
        self.asked = False

    def next_seconds(self, now: float, *, idle: bool = False) -> float:
        """Say when the policy is next asked; inf: there is nothing to ask about."""
        if not self._until:
            return math.inf
        if idle and now - self._changed_at > PATIENCE_SECONDS:
            return math.inf
        return (math.floor(now / self._interval_seconds + 1e-6) + 1) * self._interval_seconds

    def judge(self, now: float) -> Sequence[Life]:
        """Ask, and do what is said; returns those whom it wants elsewhere.

        Raises:
            PolicyFailed: the policy raised an error, or wants a share that is none.
        """
        if self._policy is None or self._speeds is None or not self.wanted:
            return ()
        for node in self._speeds.touched:
            self._until[node] = now + ATTENTION_WINDOWS * self._interval_seconds
        number = round(now / self._interval_seconds)
        if number == self._last or abs(now / self._interval_seconds - number) > 1e-6:
            return ()  # it is for something else that the clock stopped here
        self._last = number
        moving: dict[int, Life] = {}
        for node in sorted(self._until):
            window = self._speeds.window(node, now, self._interval_seconds)
            if window is None or (now > self._until[node] and not self._speeds.uneasy(node)):
                del self._until[node]
                continue
            for directive in self._told(self._policy, window):
                if life := self._speeds.throttle(node, directive):
                    self._changed_at = now
                    if directive.move:
                        moving[life.sequence] = life
        return [moving[sequence] for sequence in sorted(moving)]

    def _told(self, policy: ContentionPolicy, window: NodeWindow) -> Sequence[Directive]:
        self.asked = True
        over = f"{window.node_id} at {window.now:.3f} s"
        try:
            directives = tuple(policy.judge(window))
            wrong = [directive for directive in directives if not 0 <= directive.share <= 1]
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("contention", policy, over, f"{type(error).__name__}: {error}") from error
        if wrong:
            raise PolicyFailed("contention", policy, over, f"it wants a share that is not from 0 to 1: {wrong[0]}")
        return directives
