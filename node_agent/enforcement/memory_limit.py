"""Memory of tasks: the kernel kills a task that exceeds its limit, and gives it no swap."""

from __future__ import annotations

from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, NewAttempt, no_controller
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

NOT_LIMITED = "memory limits are not enforced: no writable memory control group"


class MemoryLimit(EnforcementHook):
    """Limits each task to the memory of its allocation."""

    def open(self, node: EnforcedNode) -> list[str]:
        """Return why memory is not limited here."""
        return no_controller(node, "memory", NOT_LIMITED)

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Limit a task's memory."""
        group.limit_memory(task.memory_bytes)
