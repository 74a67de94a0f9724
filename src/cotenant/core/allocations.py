"""What an attempt holds, by name: cores by id, GPUs by UUID."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GPU, or a part of one in thousandths."""

    uuid: str
    milli: int = 1000


@dataclass(frozen=True, slots=True)
class TaskAllocation:
    """What one replica holds on its node."""

    role: str
    rank: int
    core_ids: tuple[int, ...] = ()
    cpu_ids: tuple[int, ...] = ()
    gpus: tuple[GpuShare, ...] = ()
    memory_bytes: int = 0
    memory_nodes: tuple[int, ...] = ()
    reclaimable: bool = False


@dataclass(frozen=True, slots=True)
class NodeAllocation:
    """What an attempt holds on one node."""

    node_id: str
    tasks: tuple[TaskAllocation, ...]

    @property
    def gpu_milli(self) -> int:
        """GPUs on this node, in thousandths."""
        return sum(share.milli for task in self.tasks for share in task.gpus)

    @property
    def cores(self) -> int:
        """Cores on this node."""
        return sum(len(task.core_ids) for task in self.tasks)

    @property
    def memory_bytes(self) -> int:
        """Memory on this node."""
        return sum(task.memory_bytes for task in self.tasks)


Allocation = tuple[NodeAllocation, ...]
