"""A contention policy at work: asked about each node's window at a cadence, and what it says is done.

Only nodes on which a job without GPUs runs are asked about, for only such jobs are ever throttled (CODA [P]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.core.policy import ContentionPolicy, Directive, NodeWindow
from cotenant.simulator.physics.speeds import Speeds
from cotenant.simulator.policies import PolicyFailed

PATIENCE_SECONDS = 86_400.0  # nothing else happens and the policy changes nothing: whom it suspended stays suspended


class Eliminating:
    """Asks a contention policy every so often; does nothing without one."""

    def __init__(self, policy: ContentionPolicy | None, speeds: Speeds | None, interval_seconds: float) -> None:
        self._policy, self._speeds, self._interval_seconds = policy, speeds, interval_seconds
        self._changed_at = 0.0
        self._last = 0  # how many intervals had passed when it was last asked

    def next_seconds(self, now: float, *, idle: bool = False) -> float:
        """Say when the policy is next asked; inf: there is nothing to ask about."""
        if self._policy is None or self._speeds is None or not self._speeds.cpu_runs:
            return math.inf
        if idle and now - self._changed_at > PATIENCE_SECONDS:
            return math.inf
        return (math.floor(now / self._interval_seconds + 1e-6) + 1) * self._interval_seconds

    def judge(self, now: float) -> None:
        """Ask, and do what is said.

        Raises:
            PolicyFailed: the policy raised an error, or wants a share that is none.
        """
        if self._policy is None or self._speeds is None:
            return
        number = round(now / self._interval_seconds)
        if number == self._last or abs(now / self._interval_seconds - number) > 1e-6:
            return  # it is for something else that the clock stopped here
        self._last = number
        for node, window in self._speeds.crowded_windows(now, self._interval_seconds):
            for directive in self._asked(self._policy, window):
                if self._speeds.throttle(node, directive):
                    self._changed_at = now

    @staticmethod
    def _asked(policy: ContentionPolicy, window: NodeWindow) -> Sequence[Directive]:
        over = f"{window.node_id} at {window.now:.3f} s"
        try:
            directives = tuple(policy.judge(window))
            wrong = [directive for directive in directives if not 0 <= directive.share <= 1]
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("contention", policy, over, f"{type(error).__name__}: {error}") from error
        if wrong:
            raise PolicyFailed("contention", policy, over, f"it wants a share that is not from 0 to 1: {wrong[0]}")
        return directives
