"""What an attempt waits for on its node before it is launched, and after it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cotenant.v1 import node_service_pb2


class NodeGuard(Protocol):
    """Says whether GPUs are free, and whether the agent can launch anything."""

    async def busy(self, assignment: node_service_pb2.Assignment) -> str:
        """Why the GPUs of an attempt that is to be started are not free; nothing where they are."""

    async def settle(self, assignment: node_service_pb2.Assignment) -> None:
        """Wait until nothing of an attempt that has ended holds its GPUs, or they are held from new work."""

    async def room(self, given_up: Callable[[], bool]) -> str:
        """Wait a little until the agent has what a launch takes, or it is given up; why there is still no room."""
