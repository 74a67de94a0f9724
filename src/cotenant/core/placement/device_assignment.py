"""Assigns cores and GPUs by name to what the ledger has counted.

One `NodeDevices` per node. Cores are chosen close to the task's GPUs and to each other (see `core_selection`); the
cpuset of a task holds all SMT siblings of its cores, its memory nodes are those of its cores. A resize keeps what it
can: a task that shrinks keeps some of its cores, a task that grows keeps all of them, and no task gets cores that a
neighbor is still giving back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Holding, Overcommitted
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.gang import Demand
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.node import Core, Gpu, Inventory
from cotenant.core.model.resources import amounts_of
from cotenant.core.placement.core_selection import choose_cores, core_positions, grow_cores


@dataclass(frozen=True, slots=True)
class Task:
    """One replica to place on a node."""

    role: str
    rank: int
    demand: Demand


@dataclass(slots=True)
class NodeDevices:
    """Which task holds which cores and GPUs of one node."""

    node_id: str
    inventory: Inventory
    free_cores: dict[int, Core] = field(init=False)
    free_milli: dict[str, int] = field(init=False)
    _seat_of: dict[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.free_cores = {core.id: core for core in self.inventory.cores}
        self.free_milli = {gpu.uuid: WHOLE_GPU_MILLI for gpu in self.inventory.gpus}

    def assign(self, tasks: Sequence[Task], shares: Sequence[tuple[int, int]] = ()) -> NodeAllocation:
        """Assign cores and GPUs to tasks and hold them.

        `shares` are the GPUs (index, thousandths) that the ledger has chosen, on nodes with shareable GPUs.

        Raises:
            Overcommitted: not enough is free; nothing is held then.
        """
        left = list(shares)
        chosen: list[TaskAllocation] = []
        cores, milli = dict(self.free_cores), dict(self.free_milli)
        for task in tasks:
            gpus = self._choose_gpus(task.demand.gpu_milli, left, cores, milli)
            picked = choose_cores(tuple(cores.values()), task.demand.cores, self._near(gpus), self.position_of)
            if len(picked) < task.demand.cores:
                raise Overcommitted(f"{self.node_id} has {len(cores)} free cores; {task} needs some")
            for core in picked:
                del cores[core.id]
            for share in gpus:
                milli[share.uuid] -= share.milli
            chosen.append(_allocation(task, picked, gpus))
        self.free_cores, self.free_milli = cores, milli
        gpu_type = self.inventory.gpu_type if any(task.gpus for task in chosen) else ""
        return NodeAllocation(self.node_id, tuple(chosen), gpu_type)

    @property
    def position_of(self) -> dict[int, int]:
        """The position of each core: see `core_selection.core_positions`."""
        if self._seat_of is None:
            self._seat_of = core_positions(self.inventory.cores)
        return self._seat_of

    def _near(self, gpus: Sequence[GpuShare]) -> tuple[int, ...]:
        uuids = {share.uuid for share in gpus}
        return tuple(sorted({gpu.numa_node for gpu in self.inventory.gpus if gpu.uuid in uuids}))

    def resize(self, allocation: NodeAllocation, cores: Mapping[int, int]) -> NodeAllocation:
        """Return an allocation with other numbers of cores for some tasks, given by rank; the others stay as they are.

        Nothing is held or released: the caller holds the cores of before and after until the node has changed them.
        Cores that the node no longer has are left out.

        Raises:
            Overcommitted: not enough is free.
        """
        known = {core.id: core for core in self.inventory.cores}
        free = dict(self.free_cores)
        tasks: list[TaskAllocation] = []
        for task in allocation.tasks:
            held = [known[core_id] for core_id in task.core_ids if core_id in known]
            wanted, near = cores.get(task.rank, len(task.core_ids)), self._near(task.gpus)
            chosen = choose_cores(held, wanted, near, self.position_of) if wanted < len(held) else held
            more = grow_cores(held, tuple(free.values()), wanted - len(held), near, self.position_of)
            if len(chosen) + len(more) < wanted:
                raise Overcommitted(f"{self.node_id} has {len(free)} free cores; {task} needs {wanted}")
            for core in more:
                del free[core.id]
            tasks.append(_named(task, [*chosen, *more]))
        return replace(allocation, tasks=tuple(tasks))

    def fit(self, allocation: NodeAllocation, spare: int) -> NodeAllocation:
        """Return what tasks hold of the cores that the node has now, with all CPUs of those cores.

        A task gets replacements for missing cores, up to its own number and to `spare` for all tasks, if they are free;
        else it holds fewer until there are more, and its `own_cores` give the number that it should have.
        """
        known = {core.id: core for core in self.inventory.cores}
        free = dict(self.free_cores)
        tasks: list[TaskAllocation] = []
        for task in allocation.tasks:
            held = [known[core_id] for core_id in task.core_ids if core_id in known]
            own = task.own_cores or len(task.core_ids)
            wanted = min(max(0, own - len(held)), spare, len(free))
            more = grow_cores(held, tuple(free.values()), wanted, self._near(task.gpus), self.position_of)
            for core in more:
                del free[core.id]
            spare -= len(more)
            fitted = _named(task, [*held, *more]) if own else task
            changed = (fitted.core_ids, fitted.cpu_ids) != (task.core_ids, tuple(sorted(task.cpu_ids)))
            tasks.append(replace(fitted, own_cores=own) if changed else task)
        return replace(allocation, tasks=tuple(tasks))

    def _choose_gpus(
        self, wanted: int, shares: list[tuple[int, int]], cores: dict[int, Core], milli: dict[str, int]
    ) -> tuple[GpuShare, ...]:
        count = wanted // WHOLE_GPU_MILLI or (1 if wanted else 0)
        if shares:
            chosen = tuple(GpuShare(self.inventory.gpus[index].uuid, part) for index, part in shares[:count])
            del shares[:count]
        elif wanted % WHOLE_GPU_MILLI:
            raise Overcommitted(f"{self.node_id}: {wanted} thousandths of a GPU that the ledger has not chosen")
        else:
            free = [gpu for gpu in self.inventory.gpus if milli[gpu.uuid] == WHOLE_GPU_MILLI]
            chosen = tuple(GpuShare(gpu.uuid) for gpu in _near_each_other(free, count, cores))
        if len(chosen) < count or any(milli[share.uuid] < share.milli for share in chosen):
            raise Overcommitted(f"{self.node_id} does not have {wanted} thousandths of GPUs free")
        return chosen

    def hold(self, allocation: NodeAllocation) -> None:
        """Hold what a live attempt holds, from its record.

        Raises:
            Overcommitted: another attempt holds a part of it; nothing is held then.
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
        """Release what an attempt held. Devices that the node no longer has are skipped."""
        cores = {core.id: core for core in self.inventory.cores}
        for task in allocation.tasks:
            for core_id in task.core_ids:
                if core_id in cores:
                    self.free_cores[core_id] = cores[core_id]
            for share in task.gpus:
                if share.uuid in self.free_milli:
                    self.free_milli[share.uuid] = min(WHOLE_GPU_MILLI, self.free_milli[share.uuid] + share.milli)

    def holding(self, node: int, allocation: NodeAllocation) -> Holding:
        """Return an allocation as counts for the ledger, in which this node has the number `node`."""
        index = {gpu.uuid: number for number, gpu in enumerate(self.inventory.gpus)}
        parts = tuple(
            (index[share.uuid], share.milli) for task in allocation.tasks for share in task.gpus if share.uuid in index
        )
        return Holding(
            node=node,
            gpus=0 if self.inventory.shareable else len(parts),
            cores=allocation.cores,
            **amounts_of(allocation.resources),
            shares=parts if self.inventory.shareable else (),
        )


def _allocation(task: Task, cores: Sequence[Core], gpus: tuple[GpuShare, ...]) -> TaskAllocation:
    return _named(TaskAllocation(task.role, task.rank, gpus=gpus, **amounts_of(task.demand)), cores)


def _named(task: TaskAllocation, cores: Sequence[Core]) -> TaskAllocation:
    return replace(
        task,
        core_ids=tuple(core.id for core in cores),
        cpu_ids=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
        memory_nodes=tuple(sorted({core.numa_node for core in cores})),
    )


def _near_each_other(free: Sequence[Gpu], count: int, cores: dict[int, Core]) -> list[Gpu]:
    """Return GPUs of one NVLink island if possible: the one with the fewest free GPUs that suffice.

    Within the island, GPUs of one NUMA node come first. A single GPU needs no link, and preferably comes from outside
    islands.
    """
    islands: dict[int, list[Gpu]] = {}
    for gpu in free:
        islands.setdefault(gpu.island, []).append(gpu)
    apart = islands.pop(0, [])
    if count == 1 and apart:
        return _of_one_numa_node(apart, count, cores)
    enough = [island for island, gpus in islands.items() if len(gpus) >= count]
    if enough:
        island = min(enough, key=lambda island: (len(islands[island]), island))
        return _of_one_numa_node(islands[island], count, cores)
    return _of_one_numa_node(free, count, cores)


def _of_one_numa_node(free: Sequence[Gpu], count: int, cores: dict[int, Core]) -> list[Gpu]:
    """Return GPUs of one NUMA node if possible: the one with the fewest free GPUs that suffice, and with cores left."""
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
