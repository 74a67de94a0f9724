"""The cores of a running attempt: what its allocation gives it, what the kernel has, and a change from one to another.

`hooks.change` applies a change, all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from cotenant.core.model.node import Core
from cotenant.core.placement.core_selection import choose_cores, core_positions
from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.v1 import resources_pb2

log = structlog.get_logger()


class CoresRefused(Exception):
    """The attempt cannot have these cores; its cores are unchanged."""


@dataclass(frozen=True, slots=True)
class TaskCores:
    """A task's CPUs and memory nodes; no memory nodes means all."""

    cpus: frozenset[int]
    memory_nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of an attempt: each task by rank, unless it has no CPUs of its own, and the whole attempt.

    `whole` is empty if a task may run on all CPUs.
    """

    tasks: Mapping[int, TaskCores]
    whole: frozenset[int]


@dataclass(frozen=True, slots=True)
class CoreChange:
    """A move from the cores `before` to the cores `after`; `first` are those when the threads' masks were recorded.

    All three have the same ranks.
    """

    first: Cores
    before: Cores
    after: Cores

    def reversed(self) -> CoreChange:
        """Return the move back."""
        return CoreChange(self.first, self.after, self.before)


@dataclass(slots=True)
class ConfinedAttempt:
    """A running attempt: its group, if any, a function for a task's processes, and its threads' initial CPU masks."""

    group: Group | None
    pids: Callable[[int], Iterable[int]]
    own: affinity.Masks = field(default_factory=dict)

    def record_masks(self, cores: Cores) -> None:
        """Record the current CPU masks of all threads; see `affinity`."""
        online = frozenset(online_cpus())
        self.own = {}
        for rank, task in cores.tasks.items():
            self.own |= affinity.add_offline_cpus(affinity.masks(self.pids(rank)), task.cpus, online)


def cores_of(allocation: resources_pb2.NodeAllocation) -> Cores:
    """Return the cores that an allocation gives to its tasks."""
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
    """Return the cores reduced to `count` per task: close to its GPUs and to each other, siblings together.

    With `at_most`, a task that has fewer keeps them.

    Raises:
        CoresRefused: a task has fewer.
    """
    known = {core.id: Core(core.id, tuple(core.cpus), core.numa_node, core.socket) for core in inventory.cores}
    nodes = {gpu.uuid: gpu.numa_node for gpu in inventory.gpus}
    position_of = core_positions(list(known.values()))
    tasks = {}
    for task in allocation.tasks:
        held = [known[core] for core in task.core_ids if core in known]
        chosen = min(count, len(held)) if at_most else count
        if not 0 < chosen <= len(held):
            raise CoresRefused(f"rank {task.rank} holds {len(held)} cores, not {count}")
        near = sorted({nodes[share.uuid] for share in task.gpus if share.uuid in nodes})
        cpus = {cpu for core in choose_cores(held, chosen, near, position_of) for cpu in core.cpus} & set(task.cpu_ids)
        tasks[task.rank] = TaskCores(frozenset(cpus), frozenset(task.memory_nodes))
    return Cores(tasks, cores_of(allocation).whole)


def task_group(group: Group, rank: int) -> Group:
    """Return the control group of one of an attempt's tasks."""
    return group.child(f"task-{rank}")


def write_or_restore(group: Group | None, change: CoreChange, write: Callable[[Group, Cores], None]) -> None:
    """Write new cores to an attempt's groups; if the kernel refuses, write the previous ones again.

    Raises:
        CoresRefused: the kernel refused, for the given reason.
    """
    if group is None:
        return
    try:
        write(group, change.after)
    except GroupError as error:
        reason = str(error)
        try:
            write(group, change.before)
        except GroupError as second:
            log.error("cores_restore_failed", error=str(second))
            reason += f"; rollback failed: {second}"
        raise CoresRefused(reason) from error


def current_cores(group: Group | None, wanted: Cores) -> Cores | None:
    """Return the cores that were last requested from the kernel for an attempt; None without cpusets.

    The effective cores would lack offline CPUs, and are all CPUs of the parent group if no others are left.
    """
    if group is None or "cpuset" not in group.enforces:
        return None
    there = {rank: task_group(group, rank) for rank in wanted.tasks}
    tasks = {
        rank: TaskCores(frozenset(task.cpus(asked_for=True)), frozenset(task.memory_nodes()))
        for rank, task in there.items()
    }
    return Cores(tasks, frozenset(group.cpus(asked_for=True)) if wanted.whole else frozenset())


def online_only(cores: Cores, online: Iterable[int]) -> Cores | None:
    """Return the cores without offline CPUs; None if a task would have none left or the kernel does not tell."""
    there = frozenset(online)
    tasks = {rank: replace(task, cpus=task.cpus & there) for rank, task in cores.tasks.items()}
    return Cores(tasks, cores.whole & there) if all(task.cpus for task in tasks.values()) else None


def covers(found: Cores, wanted: Cores) -> bool:
    """Return whether each task, and the whole attempt, has at least the wanted CPUs."""
    return wanted.whole <= found.whole and all(
        task.cpus <= found.tasks[rank].cpus for rank, task in wanted.tasks.items()
    )


def same_cpus(one: Cores, other: Cores) -> bool:
    """Return whether both have the same CPUs for each task and for the whole attempt."""
    cpus = [{rank: task.cpus for rank, task in cores.tasks.items()} for cores in (one, other)]
    return cpus[0] == cpus[1] and one.whole == other.whole
