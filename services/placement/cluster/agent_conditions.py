"""Conditions that agents report with each heartbeat: clock, event-loop lag, unresolved names and unused TLS files.

None of it is stored: a new leader learns it from the next heartbeat.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cotenant import name_resolution
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import HEALTH_ACTIONS
from cotenant.core.model.node import HealthAction
from cotenant.security.tls_files import REJECTION_REMEDY
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1.condition_pb2 import LoopLag

BEATS_COMPARED = 3  # the heartbeat with the shortest delay gives the best clock reading
CLOCK_SECONDS_MAX = 1e9  # larger clock offsets are cut to this
ERRORS_MAX, ERROR_LENGTH_MAX = 10, 300


@dataclass(slots=True)
class ReportedCondition:
    """The condition of an agent, as last reported."""

    clocks: deque[float] = field(default_factory=lambda: deque(maxlen=BEATS_COMPARED))  # wall time less our monotonic
    lag: LoopLag | None = None
    name_errors: tuple[str, ...] = ()
    tls_error: str = ""

    def take(self, condition: agent_pb2.AgentCondition, now: Callable[[], float] | None = None) -> None:
        """Record the condition that came with a heartbeat."""
        if condition.HasField("wall_time"):
            self.clocks.append(
                condition.wall_time.seconds + condition.wall_time.nanos / 1e9 - (now or time.monotonic)()
            )
        self.lag = condition.loop_lag if condition.HasField("loop_lag") else None
        self.name_errors = tuple(error[:ERROR_LENGTH_MAX] for error in condition.name_errors[:ERRORS_MAX])
        self.tls_error = condition.tls_error[:ERROR_LENGTH_MAX]

    def clock_offset(self, wall: Callable[[], float] | None = None, now: Callable[[], float] | None = None) -> float:
        """Return how many seconds the agent's wall clock is ahead of ours; 0 if it is unknown.

        A delayed heartbeat makes the agent's clock look late, never early. A jump of our own clock shows at once.
        """
        if not self.clocks:
            return 0.0
        offset = max(self.clocks) + (now or time.monotonic)() - (wall or time.time)()
        return max(-CLOCK_SECONDS_MAX, min(CLOCK_SECONDS_MAX, offset))

    def describe(self, message: node_pb2.Node) -> None:
        """Write the condition into a node message for callers."""
        if self.clocks:
            message.clock_offset.FromMicroseconds(round(self.clock_offset() * 1e6))
        if self.lag is not None:
            message.loop_lag.CopyFrom(self.lag)
        for error in self.name_errors:
            message.inventory.problems.add(
                check="names",
                action=HEALTH_ACTIONS.to_wire(HealthAction.IGNORE),
                reason=error,
                remedy=name_resolution.REMEDY,
            )
        if self.tls_error:
            message.inventory.problems.add(
                check="certificate",
                action=HEALTH_ACTIONS.to_wire(HealthAction.IGNORE),
                reason=f"the agent does not use its new certificate: {self.tls_error}",
                remedy=REJECTION_REMEDY,
            )
