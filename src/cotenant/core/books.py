"""Which cores and which GPUs: names for what the ledger has counted.

One book per node. Cores are chosen close to the task's GPUs and to each other; the cpuset of a task holds all SMT
siblings of its cores, its memory nodes are those of its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.allocations import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.gangs import Demand
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.ledger import Holding, Overcommitted
from cotenant.core.nodes import Core, Gpu, Inventory


@dataclass(frozen=True, slots=True)
class Task:
    """One replica to be given names on a node."""

    role: str
    rank: int
    demand: Demand


@dataclass(slots=True)
class Book:
    """Who holds what on one node, by name."""

    node_id: str
    inventory: Inventory
    free_cores: dict[int, Core] = field(init=False)
    free_milli: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.free_cores = {core.id: core for core in self.inventory.cores}
        self.free_milli = {gpu.uuid: WHOLE_GPU_MILLI for gpu in self.inventory.gpus}

    def assign(self, tasks: Sequence[Task], shares: Sequence[tuple[int, int]] = ()) -> NodeAllocation:
        """Choose names for tasks and hold them.

        `shares` are the GPUs (index, thousandths) that the ledger has chosen, on nodes with shareable GPUs.

        Raises:
            Overcommitted: there is not that much free; nothing is held then.
        """
        left = list(shares)
        chosen: list[TaskAllocation] = []
        cores, milli = dict(self.free_cores), dict(self.free_milli)
        for task in tasks:
            gpus = self._choose_gpus(task.demand.gpu_milli, left, cores, milli)
            near = tuple(sorted({self._gpu(share.uuid).numa_node for share in gpus}))
            picked = choose_cores(tuple(cores.values()), task.demand.cores, near)
            if len(picked) < task.demand.cores:
                raise Overcommitted(f"{self.node_id} has {len(cores)} free cores; {task} was to be given some")
            for core in picked:
                del cores[core.id]
            for share in gpus:
                milli[share.uuid] -= share.milli
            chosen.append(_allocation(task, picked, gpus))
        self.free_cores, self.free_milli = cores, milli
        return NodeAllocation(self.node_id, tuple(chosen))

    def _gpu(self, uuid: str) -> Gpu:
        return next(gpu for gpu in self.inventory.gpus if gpu.uuid == uuid)

    def _choose_gpus(
        self, wanted: int, shares: list[tuple[int, int]], cores: dict[int, Core], milli: dict[str, int]
    ) -> tuple[GpuShare, ...]:
        count = wanted // WHOLE_GPU_MILLI or (1 if wanted else 0)
        if shares:
            chosen = tuple(GpuShare(self.inventory.gpus[index].uuid, part) for index, part in shares[:count])
            del shares[:count]
        elif wanted % WHOLE_GPU_MILLI:
            raise Overcommitted(f"{self.node_id}: {wanted} thousandths of a GPU that nobody has chosen")
        else:
            free = [gpu for gpu in self.inventory.gpus if milli[gpu.uuid] == WHOLE_GPU_MILLI]
            chosen = tuple(GpuShare(gpu.uuid) for gpu in _near_each_other(free, count, cores))
        if len(chosen) < count or any(milli[share.uuid] < share.milli for share in chosen):
            raise Overcommitted(f"{self.node_id} has not {wanted} thousandths of GPUs free")
        return chosen

    def hold(self, allocation: NodeAllocation) -> None:
        """Note what a live attempt holds, from a record.

        Raises:
            Overcommitted: someone else holds a part of it; nothing is noted then.
        """
        wanted: dict[str, int] = {}
        for task in allocation.tasks:
            for share in task.gpus:
                wanted[share.uuid] = wanted.get(share.uuid, 0) + share.milli
        cores = [core_id for task in allocation.tasks for core_id in task.core_ids]
        taken = [core_id for core_id in cores if core_id not in self.free_cores]
        short = [uuid for uuid, milli in wanted.items() if self.free_milli.get(uuid, 0) < milli]
        if taken or short or len(set(cores)) != len(cores):
            raise Overcommitted(f"{self.node_id}: cores {taken} and GPUs {short} of {allocation} are not free")
        for core_id in cores:
            del self.free_cores[core_id]
        for uuid, milli in wanted.items():
            self.free_milli[uuid] -= milli

    def release(self, allocation: NodeAllocation) -> None:
        """Give back what an attempt held. What the node no longer has is passed over."""
        cores = {core.id: core for core in self.inventory.cores}
        for task in allocation.tasks:
            for core_id in task.core_ids:
                if core_id in cores:
                    self.free_cores[core_id] = cores[core_id]
            for share in task.gpus:
                if share.uuid in self.free_milli:
                    self.free_milli[share.uuid] = min(WHOLE_GPU_MILLI, self.free_milli[share.uuid] + share.milli)

    def holding(self, node: int, allocation: NodeAllocation) -> Holding:
        """Count an allocation for the ledger, in which this node has the number `node`."""
        index = {gpu.uuid: number for number, gpu in enumerate(self.inventory.gpus)}
        parts = tuple(
            (index[share.uuid], share.milli) for task in allocation.tasks for share in task.gpus if share.uuid in index
        )
        return Holding(
            node=node,
            gpus=0 if self.inventory.shareable else len(parts),
            cores=allocation.cores,
            memory_bytes=allocation.memory_bytes,
            shares=parts if self.inventory.shareable else (),
        )


def _allocation(task: Task, cores: Sequence[Core], gpus: tuple[GpuShare, ...]) -> TaskAllocation:
    return TaskAllocation(
        role=task.role,
        rank=task.rank,
        core_ids=tuple(core.id for core in cores),
        cpu_ids=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
        gpus=gpus,
        memory_bytes=task.demand.memory_bytes,
        memory_nodes=tuple(sorted({core.numa_node for core in cores})),
    )


def _near_each_other(free: Sequence[Gpu], count: int, cores: dict[int, Core]) -> list[Gpu]:
    """Prefer GPUs of one NUMA node: the one with the fewest free GPUs that suffice, and with cores left."""
    by_node: dict[int, list[Gpu]] = {}
    for gpu in free:
        by_node.setdefault(gpu.numa_node, []).append(gpu)
    cores_of = {node: sum(core.numa_node == node for core in cores.values()) for node in by_node}
    enough = [node for node, gpus in by_node.items() if len(gpus) >= count]
    if enough:
        node = min(enough, key=lambda node: (cores_of[node] == 0, len(by_node[node]), node))
        return by_node[node][:count]
    crowded = sorted(by_node, key=lambda node: (-len(by_node[node]), node))
    return [gpu for node in crowded for gpu in by_node[node]][:count]


def choose_cores(free: Sequence[Core], count: int, near: Sequence[int]) -> list[Core]:
    """Choose cores: on the NUMA nodes `near` to the GPUs first, then from as few others as can be, contiguous.

    Where no GPU decides, the NUMA node with the fewest free cores that suffice is used up first.

    >>> cores = [Core(n, (n,), numa_node=n // 4) for n in range(8)]
    >>> [core.id for core in choose_cores(cores, 2, near=[1])]
    [4, 5]
    """
    by_node: dict[int, list[Core]] = {}
    for core in sorted(free, key=lambda core: core.id):
        by_node.setdefault(core.numa_node, []).append(core)
    nearest = [node for node in near if node in by_node]
    others = [node for node in by_node if node not in nearest]
    still = count - sum(len(by_node[node]) for node in nearest)
    enough = [node for node in others if len(by_node[node]) >= still]
    best = min(enough, key=lambda node: (len(by_node[node]), node), default=None)
    rest = sorted(others, key=lambda node: (node != best, -len(by_node[node]), node))
    picked: list[Core] = []
    for node in [*nearest, *rest]:
        if len(picked) < count:
            picked += contiguous(by_node[node], count - len(picked))
    return picked


def contiguous(cores: Sequence[Core], count: int) -> list[Core]:
    """Take cores from the smallest gap-free run that suffices, else from the first on.

    >>> [core.id for core in contiguous([Core(n, (n,)) for n in (0, 2, 3, 4, 7, 8)], 2)]
    [7, 8]
    """
    runs: list[list[Core]] = []
    for core in cores:
        if runs and core.id == runs[-1][-1].id + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    enough = [run for run in runs if len(run) >= count]
    return min(enough, key=lambda run: (len(run), run[0].id))[:count] if enough else list(cores[:count])
