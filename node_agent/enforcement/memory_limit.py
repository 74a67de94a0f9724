"""Memory of tasks: the kernel kills a task that exceeds its limit, and gives it no swap."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, no_controller
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

NOT_LIMITED = "memory limits are not enforced: no writable memory control group"


class MemoryLimit(EnforcementHook):
    """Limits each task to the memory of its allocation."""

    def open(self, node: EnforcedNode) -> list[str]:
        """Return why memory is not limited here."""
        return no_controller(node, "memory", NOT_LIMITED)

    def prepare_task(self, group: Group, assignment: agent_pb2.Assignment, task: resources_pb2.TaskAllocation) -> None:
        """Limit a task's memory."""
        group.limit_memory(task.memory_bytes)
