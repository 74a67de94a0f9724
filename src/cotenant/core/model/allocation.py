"""What an attempt holds on its nodes, by name: cores by id, GPUs by UUID."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.model.resources import AMOUNTS, Amounts, Resources


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GPU, or a share of one in thousandths."""

    uuid: str
    milli: int = 1000


@dataclass(frozen=True, slots=True)
class TaskAllocation(Amounts):
    """What one replica holds on its node.

    `own_cores` is the number of cores that the replica may keep, known once its cores have been changed; cores beyond
    that are lent. `target_cores` is the number that it will hold after a change in progress; 0 if there is none.
    """

    role: str
    rank: int
    core_ids: tuple[int, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    gpus: tuple[GpuShare, ...] = ()
    memory_nodes: tuple[int, ...] = ()
    reclaimable: bool = False
    own_cores: int = 0
    target_cores: int = 0

    @property
    def lent(self) -> int:
        """Spare cores that are lent to the replica and can be reclaimed at once."""
        return max(0, len(self.core_ids) - self.own_cores) if self.own_cores else 0


@dataclass(frozen=True, slots=True)
class NodeAllocation:
    """What an attempt holds on one node."""

    node_id: str
    tasks: tuple[TaskAllocation, ...]
    gpu_type: str = ""  # of the node's GPUs; empty if the attempt holds no GPU

    @property
    def gpu_milli(self) -> int:
        """GPUs on this node, in thousandths."""
        return sum(share.milli for task in self.tasks for share in task.gpus)

    @property
    def cores(self) -> int:
        """Cores on this node."""
        return sum(len(task.core_ids) for task in self.tasks)

    @property
    def own_cores(self) -> int:
        """Cores on this node that are not lent."""
        return self.cores - sum(task.lent for task in self.tasks)

    @property
    def resources(self) -> Resources:
        """Resources on this node."""
        amounts = {name: sum(getattr(task, name) for task in self.tasks) for name in AMOUNTS}
        return Resources(self.gpu_milli, self.cores, **amounts)


Allocation = tuple[NodeAllocation, ...]


def merge_allocations(one: Allocation, other: Allocation) -> Allocation:
    """Return what an attempt holds while it is being resized: its cores before and after the change.

    >>> before, after = (NodeAllocation("n1", (TaskAllocation("worker", 0, ids, ids),)) for ids in ((1, 2), (2, 3)))
    >>> merge_allocations((before,), (after,))[0].tasks[0].core_ids
    (1, 2, 3)
    """
    others = {part.node_id: {task.rank: task for task in part.tasks} for part in other}
    return tuple(
        replace(
            part, tasks=tuple(_joined(task, others.get(part.node_id, {}).get(task.rank, task)) for task in part.tasks)
        )
        for part in one
    )


def _joined(one: TaskAllocation, other: TaskAllocation) -> TaskAllocation:
    return replace(
        one,
        core_ids=tuple(dict.fromkeys((*one.core_ids, *other.core_ids))),
        cpu_ids=tuple(sorted({*one.cpu_ids, *other.cpu_ids})),
        memory_nodes=tuple(sorted({*one.memory_nodes, *other.memory_nodes})),
    )
