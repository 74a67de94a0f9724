"""The throttles of this node's attempts: what each is wanted to be, and what the kernel enforces."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.runtime_port import Runtime, ThrottleState, ThrottlingRuntime


@dataclass(slots=True)
class ThrottleLease:
    """The wanted throttle of an attempt, its reason, and its expiry on the monotonic clock.

    `holds` is the throttle in effect since `began` (seconds since 1970), and `because` its reason.
    """

    wanted: Throttle
    reason: str
    until: float
    directive: str = ""
    trace_parent: str = ""
    holds: Throttle = FREE
    began: float = 0.0
    because: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Throttles:
    """The attempts that are throttled or being released. `leases` is changed by contention's directives only."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime if isinstance(runtime, ThrottlingRuntime) else None
        self.leases: dict[AttemptKey, ThrottleLease] = {}

    def is_throttled(self, key: AttemptKey) -> bool:
        """Return whether an attempt is throttled or about to be: its rate says nothing about its cores."""
        return key in self.leases or not self.held(key).throttle.free

    def any_throttled(self) -> bool:
        """Return whether any attempt is throttled, about to be, or being released."""
        return bool(self.leases)

    def held(self, key: AttemptKey) -> ThrottleState:
        """Return an attempt's current throttle."""
        return self.runtime.held(key) if self.runtime is not None else ThrottleState()

    def describe(self, key: AttemptKey) -> str:
        """Return how and why an attempt is throttled, in one sentence; "" if it is not."""
        throttle, lease = self.held(key).throttle, self.leases.get(key)
        if throttle.free:
            return ""
        return (
            f"{describe_throttle(throttle)}: {lease.reason}"
            if lease is not None and lease.reason
            else describe_throttle(throttle)
        )


def describe_throttle(throttle: Throttle) -> str:
    """Return a throttle as text.

    >>> describe_throttle(Throttle(cores=2, idle=True)), describe_throttle(FREE)
    ('limited to 2 of its cores, only idle CPU time', 'not throttled')
    """
    ways = []
    if throttle.bandwidth_percent < FREE.bandwidth_percent:
        ways.append(f"limited to {throttle.bandwidth_percent} % of the memory bandwidth")
    if throttle.cores:
        ways.append(f"limited to {throttle.cores} of its cores")
    if throttle.idle:
        ways.append("only idle CPU time")
    if throttle.suspended:
        ways.append("suspended")
    return ", ".join(ways) or "not throttled"
