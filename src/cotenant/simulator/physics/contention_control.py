"""A contention policy in the simulation: queried about nodes' windows at a cadence, and its directives applied.

Only jobs without GPUs are ever throttled (CODA [P]), so a trace without any needs no queries. A node is queried for 24
windows after any start or end on it, so that its baselines can be learned, and for as long as a job on it is disturbed
or throttled. At all other times only noise changes there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.core.policy.protocols import ContentionPolicy, Directive, NodeWindow
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics.speeds import Speeds
from cotenant.simulator.policy_set import PolicyFailed

PATIENCE_SECONDS = 86_400.0  # without other events or new directives: suspended jobs stay suspended
ATTENTION_WINDOWS = 24


class ContentionControl:
    """Queries a contention policy at intervals; does nothing without one."""

    def __init__(self, policy: ContentionPolicy | None, speeds: Speeds | None, interval_seconds: float) -> None:
        self._policy, self._speeds, self._interval_seconds = policy, speeds, interval_seconds
        self._until: dict[int, float] = {}  # until when nodes are queried in any case
        self._changed_at = 0.0
        self._last = 0  # intervals passed at the last query
        self.wanted = True  # there are jobs that could be throttled
        self.asked = False

    def next_seconds(self, now: float, *, idle: bool = False) -> float:
        """Return when the policy is next queried; inf if there is nothing to query."""
        if not self._until:
            return math.inf
        if idle and now - self._changed_at > PATIENCE_SECONDS:
            return math.inf
        return (math.floor(now / self._interval_seconds + 1e-6) + 1) * self._interval_seconds

    def judge(self, now: float) -> Sequence[SimulatedJob]:
        """Query the policy and apply its directives; returns the jobs to migrate.

        Raises:
            PolicyFailed: the policy raised an error, or returned an invalid share.
        """
        if self._policy is None or self._speeds is None or not self.wanted:
            return ()
        for node in self._speeds.touched:
            self._until[node] = now + ATTENTION_WINDOWS * self._interval_seconds
        number = round(now / self._interval_seconds)
        if number == self._last or abs(now / self._interval_seconds - number) > 1e-6:
            return ()  # the clock stopped here for another event
        self._last = number
        moving: dict[int, SimulatedJob] = {}
        for node in sorted(self._until):
            window = self._speeds.window(node, now, self._interval_seconds)
            if window is None or (now > self._until[node] and not self._speeds.needs_attention(node)):
                del self._until[node]
                continue
            for directive in self._directives(self._policy, window):
                if sim_job := self._speeds.throttle(node, directive):
                    self._changed_at = now
                    if directive.move:
                        moving[sim_job.sequence] = sim_job
        return [moving[sequence] for sequence in sorted(moving)]

    def _directives(self, policy: ContentionPolicy, window: NodeWindow) -> Sequence[Directive]:
        self.asked = True
        over = f"{window.node_id} at {window.now:.3f} s"
        try:
            directives = tuple(policy.judge(window))
            wrong = [directive for directive in directives if not 0 <= directive.share <= 1]
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed("contention", policy, over, f"{type(error).__name__}: {error}") from error
        if wrong:
            raise PolicyFailed("contention", policy, over, f"it returned a share that is not from 0 to 1: {wrong[0]}")
        return directives
