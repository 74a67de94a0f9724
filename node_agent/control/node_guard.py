"""The checks that an attempt waits for on its node before its launch and after its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey


class NodeGuard(Protocol):
    """Checks that GPUs are free and that the agent has the resources to launch an attempt."""

    async def busy(self, assignment: agent_pb2.Assignment) -> str:
        """Return why the GPUs of an attempt that is about to start are not free; "" if they are."""

    async def wait_for_gpus(self, assignment: agent_pb2.Assignment) -> None:
        """Wait until no process of an ended attempt uses its GPUs, or the GPUs are held from new work."""

    async def wait_for_resources(self, given_up: Callable[[], bool]) -> str:
        """Wait briefly until the agent has the resources for a launch; return what is missing, or "" if `given_up`."""

    def signs_of(self, key: AttemptKey) -> Sequence[str]:
        """Return what was seen on this node that may have made an attempt fail."""
