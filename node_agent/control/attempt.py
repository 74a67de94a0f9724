"""An attempt as the agent knows it, and all attempts of the node."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status


@dataclass(slots=True)
class Attempt:
    """An attempt as the agent knows it. Times are seconds since 1970."""

    assignment: agent_pb2.Assignment
    status: Status
    received: float
    stop_grace_seconds: float | None = None
    stop_reason: str = ""  # of the first order
    launched: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    resizes_waiting: int = 0
    resized: agent_pb2.ResizeReport | None = None  # the last report
    began: float = field(default_factory=time.monotonic)  # start, or recovery by this agent; monotonic clock
    changed: float = field(default_factory=time.monotonic)  # last change of its allocation, same clock


Attempts = dict[AttemptKey, Attempt]  # changed by the attempt manager only
