"""What the agent tells placement about its node: the hello of each stream, and its own condition with a heartbeat."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import node_capabilities
from cotenant.core.model.node_capabilities import EVERYTHING
from cotenant.name_resolution import NAMES
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.rpc import channel
from cotenant.rpc.loop_lag import LoopLagMonitor
from cotenant.rpc.store_marks import mark_to_wire
from cotenant.v1 import resources_pb2


class NodeDescription:
    """The node as it is now. `incarnation` distinguishes this process from earlier agents of the node."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        inventory: resources_pb2.Inventory,
        manager: AttemptManager,
        fence: EpochFence,
        loop_lag: LoopLagMonitor,
    ) -> None:
        self._node_id, self._incarnation, self._inventory = node_id, incarnation, inventory
        self._manager, self._fence, self._loop_lag = manager, fence, loop_lag

    def hello(self) -> agent_pb2.Hello:
        """Return the first message of a stream."""
        return agent_pb2.Hello(
            node_id=self._node_id,
            inventory=self._inventory,
            attempts=self._manager.reports(),
            incarnation=self._incarnation,
            store=mark_to_wire(self._fence.store) if self._fence.store else None,
            capabilities=node_capabilities.to_wire(EVERYTHING),
        )

    def condition(self) -> agent_pb2.AgentCondition:
        """Return how the agent itself is."""
        condition = agent_pb2.AgentCondition(
            loop_lag=self._loop_lag.lag(), name_errors=NAMES.errors(), tls_error=channel.certificate_rejection()
        )
        condition.wall_time.GetCurrentTime()
        return condition

    def min_disconnect_seconds(self) -> float:
        """Return the shortest time that a job here may run without the control plane; infinity if no job sets one."""
        return self._manager.min_disconnect_seconds()
