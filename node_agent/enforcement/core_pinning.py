"""Pins attempts to their cores: cpusets and, for threads that exist already or without cpusets, CPU affinity.

In version 1 a group must hold all that its children hold; in version 2 a child has only what its group has. So at a
change the attempt's group first gets the old and the new CPUs, then each task gets its own, then the group keeps only
the new ones. Without cpusets only the threads' affinity is set, as at a job's start.
"""

from __future__ import annotations

from dataclasses import replace

from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.enforcement.core_changes import (
    ConfinedAttempt,
    CoreChange,
    Cores,
    CoresRefused,
    task_group,
    write_or_restore,
)
from cotenant.node_agent.enforcement.hook import (
    EnforcedNode,
    EnforcementHook,
    NewAttempt,
    ThrottleChange,
    no_controller,
)
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

ADVISORY = "cores are only advisory (CPU affinity): no writable cpuset control group"


class CorePinning(EnforcementHook):
    """Pins each task to the CPUs and memory nodes of its allocation."""

    def open(self, node: EnforcedNode) -> list[str]:
        """Return why cores are only advisory here."""
        return no_controller(node, "cpuset", ADVISORY)

    def prepare(self, attempt: NewAttempt) -> None:
        """Bind the attempt to the CPUs of its tasks, unless one of them may run on all CPUs."""
        tasks = attempt.assignment.allocation.tasks
        if all(task.cpu_ids for task in tasks):
            attempt.group.set_cpus(cpu for task in tasks for cpu in task.cpu_ids)

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Bind a task to its CPUs and memory nodes."""
        group.set_cpus(task.cpu_ids, task.memory_nodes)

    def environment(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> dict[str, str]:
        """Name the task's cores."""
        return {"COTENANT_CORES": ",".join(str(core) for core in task.core_ids)}

    def change_cores(self, attempt: ConfinedAttempt, change: CoreChange) -> None:
        """Bind the tasks to their new cores, then their threads. Blocks while the kernel moves pages."""
        try:
            write_or_restore(attempt.group, change, write_cpusets)
        except CoresRefused:
            apply_to_threads(attempt, change.reversed())
            raise
        apply_to_threads(attempt, change)

    def throttle(self, change: ThrottleChange) -> None:
        """Narrow each task to the wanted number of its cores; a task that holds fewer keeps them."""
        most = max((len(task.core_ids) for task in change.assignment.allocation.tasks), default=0)
        count = change.wanted.cores if change.wanted.cores < most else 0
        if count == change.now.cores and not change.uncertain:
            return
        try:
            change.narrow(count or None)
        except CoresRefused as error:
            change.refused.append(str(error))
            return
        change.now = replace(change.now, cores=count)


def write_cpusets(group: Group, cores: Cores) -> None:
    """Write the cpusets of an attempt and its tasks, in an order that the kernel accepts. Raises `GroupError`."""
    if cores.whole:
        group.set_cpus(cores.whole | set(group.cpus(asked_for=True)))
    for rank, task in sorted(cores.tasks.items()):
        task_group(group, rank).set_cpus(task.cpus, task.memory_nodes or group.memory_nodes())
    if cores.whole:
        group.set_cpus(cores.whole)


def apply_to_threads(attempt: ConfinedAttempt, change: CoreChange) -> None:
    """Set the threads' CPU masks; see `affinity`."""
    for rank, task in sorted(change.after.tasks.items()):  # the lambda binds the loop variable
        steps = (cores.tasks.get(rank, task).cpus for cores in (change.first, change.before, change.after))
        affinity.apply_masks(lambda rank=rank: attempt.pids(rank), attempt.own, *steps)  # type: ignore[misc]  # bound above
