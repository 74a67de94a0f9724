"""Gives a running attempt other cores: its control groups, then its threads. All of it, or none.

In version 1 a group must hold all that its children hold; in version 2 a child has only what its group has. So the
attempt's group first gets the old and the new CPUs, then each task gets its own, then the group keeps only the new.
Where the kernel refuses one step, all go back. Without cpusets only the threads are told, as at the start of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from cotenant.core.model.node import Core
from cotenant.core.placement.core_selection import choose_cores, seats
from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.enforcement.throttle_policy import weight_of
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.v1 import resources_pb2

log = structlog.get_logger()


class CoresRefused(Exception):
    """The attempt cannot have these cores; it has what it had."""


@dataclass(frozen=True, slots=True)
class TaskCores:
    """The CPUs that a task runs on, and its memory nodes; none of these means all."""

    cpus: frozenset[int]
    memory_nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Cores:
    """What an attempt runs on: each task by rank, unless it has no CPUs of its own, and the whole attempt.

    `whole` is empty where a task may run on all CPUs.
    """

    tasks: Mapping[int, TaskCores]
    whole: frozenset[int]


@dataclass(slots=True)
class Confined:
    """A running attempt: its group, if any, how to find a task's processes, and its threads' CPUs at first sight."""

    group: Group | None
    pids: Callable[[int], Iterable[int]]
    own: affinity.Masks = field(default_factory=dict)

    def look(self, cores: Cores) -> None:
        """Note what the threads have now; see `affinity`."""
        online = frozenset(online_cpus())
        self.own = {}
        for rank, task in cores.tasks.items():
            self.own |= affinity.with_off_line(affinity.masks(self.pids(rank)), task.cpus, online)


def cores_of(allocation: resources_pb2.NodeAllocation) -> Cores:
    """What an allocation gives to its tasks."""
    tasks = {
        task.rank: TaskCores(frozenset(task.cpu_ids), frozenset(task.memory_nodes))
        for task in allocation.tasks
        if task.cpu_ids
    }
    bounded = len(tasks) == len(allocation.tasks)
    return Cores(tasks, frozenset(cpu for task in tasks.values() for cpu in task.cpus if bounded))


def narrowed(
    allocation: resources_pb2.NodeAllocation, inventory: resources_pb2.Inventory, count: int, *, at_most: bool = False
) -> Cores:
    """The same with `count` of its cores for each task: near to its GPUs and to each other, siblings together.

    With `at_most`, a task that has fewer keeps them.

    Raises:
        CoresRefused: a task has fewer.
    """
    known = {core.id: Core(core.id, tuple(core.cpus), core.numa_node, core.socket) for core in inventory.cores}
    nodes = {gpu.uuid: gpu.numa_node for gpu in inventory.gpus}
    seat_of = seats(list(known.values()))
    tasks = {}
    for task in allocation.tasks:
        held = [known[core] for core in task.core_ids if core in known]
        chosen = min(count, len(held)) if at_most else count
        if not 0 < chosen <= len(held):
            raise CoresRefused(f"rank {task.rank} holds {len(held)} cores, not {count}")
        near = sorted({nodes[share.uuid] for share in task.gpus if share.uuid in nodes})
        cpus = {cpu for core in choose_cores(held, chosen, near, seat_of) for cpu in core.cpus} & set(task.cpu_ids)
        tasks[task.rank] = TaskCores(frozenset(cpus), frozenset(task.memory_nodes))
    return Cores(tasks, cores_of(allocation).whole)


def task_group(group: Group, rank: int) -> Group:
    """The control group of one of an attempt's tasks."""
    return group.child(f"task-{rank}")


def change(attempt: Confined, first: Cores, before: Cores, after: Cores) -> None:
    """Let the tasks run on `after` in place of `before`. Blocks for as long as the kernel takes to move pages.

    `first` is what they had when their threads were looked at. All three name the same ranks.

    Raises:
        CoresRefused: for a reason that the kernel gave.
    """
    try:
        bind(attempt.group, after)
    except GroupError as error:
        reason = str(error)
        try:
            bind(attempt.group, before)
        except GroupError as second:
            log.error("cores_not_restored", error=str(second))
            reason += f"; and when going back, {second}"
        settle(attempt, first, after, before)
        raise CoresRefused(reason) from error
    settle(attempt, first, before, after)


def bind(group: Group | None, cores: Cores) -> None:
    """Write the cpusets and weights of an attempt and its tasks, in an order that the kernel takes.

    Raises:
        GroupError: it does not take one of them.
    """
    if group is None:
        return
    if cores.whole:
        group.set_cpus(cores.whole | set(group.cpus(asked_for=True)))
    for rank, task in sorted(cores.tasks.items()):
        child = task_group(group, rank)
        child.set_cpus(task.cpus, task.memory_nodes or group.memory_nodes())
        child.set_weight(weight_of(len(task.cpus)))
    if cores.whole:
        group.set_cpus(cores.whole)
        group.set_weight(weight_of(len(cores.whole)))


def settle(attempt: Confined, first: Cores, before: Cores, after: Cores) -> None:
    """Let the threads follow; see `affinity`."""
    for rank, task in sorted(after.tasks.items()):
        steps = (cores.tasks.get(rank, task).cpus for cores in (first, before, after))
        affinity.settle(lambda rank=rank: attempt.pids(rank), attempt.own, *steps)  # type: ignore[misc]  # binds the loop's own


def found_cores(group: Group | None, wanted: Cores) -> Cores | None:
    """What the kernel was told that an attempt runs on; None without cpusets.

    Not what it gives: that lacks CPUs that are off line, and is all CPUs of the group above where no other is left.
    """
    if group is None or "cpuset" not in group.enforces:
        return None
    there = {rank: task_group(group, rank) for rank in wanted.tasks}
    tasks = {
        rank: TaskCores(frozenset(task.cpus(asked_for=True)), frozenset(task.memory_nodes()))
        for rank, task in there.items()
    }
    return Cores(tasks, frozenset(group.cpus(asked_for=True)) if wanted.whole else frozenset())


def on_line(cores: Cores, online: Iterable[int]) -> Cores | None:
    """The same without CPUs that are off line; None where a task would have none left, or nobody knows."""
    there = frozenset(online)
    tasks = {rank: replace(task, cpus=task.cpus & there) for rank, task in cores.tasks.items()}
    return Cores(tasks, cores.whole & there) if all(task.cpus for task in tasks.values()) else None


def covers(found: Cores, wanted: Cores) -> bool:
    """Whether each task has at least the CPUs that are wanted for it, and the whole too."""
    return wanted.whole <= found.whole and all(
        task.cpus <= found.tasks[rank].cpus for rank, task in wanted.tasks.items()
    )


def same_cpus(one: Cores, other: Cores) -> bool:
    """Whether both say the same CPUs for each task and for the whole."""
    cpus = [{rank: task.cpus for rank, task in cores.tasks.items()} for cores in (one, other)]
    return cpus[0] == cpus[1] and one.whole == other.whole
