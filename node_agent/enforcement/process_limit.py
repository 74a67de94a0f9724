"""The number of processes and threads of tasks and attempts, so that a fork bomb leaves the node usable."""

from __future__ import annotations

from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, NewAttempt, no_controller
from cotenant.node_agent.supervisor.cgroups import Group, read_text
from cotenant.v1 import resources_pb2

NOT_LIMITED = "the number of a job's processes is not limited: no writable pids control group"
PROCESSES_MIN = 1024


class ProcessLimit(EnforcementHook):
    """Limits each task to what its job or the node allows, and each attempt to half of the node's process ids."""

    def __init__(self) -> None:
        self._task_max = 0

    def open(self, node: EnforcedNode) -> list[str]:
        """Return why processes are not limited here."""
        self._task_max = node.settings.pids_max
        return no_controller(node, "pids", NOT_LIMITED)

    def prepare(self, attempt: NewAttempt) -> None:
        """Limit the processes of all tasks together."""
        attempt.group.limit_processes(processes_max())

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Limit a task's processes."""
        group.limit_processes(attempt.assignment.spec.pids_max or self._task_max)


def processes_max() -> int:
    """Return one attempt's limit of process ids: half of the node's."""
    text = read_text("/proc/sys/kernel/pid_max")
    return max(PROCESSES_MIN, int(text) // 2) if text.isdigit() else PROCESSES_MIN
