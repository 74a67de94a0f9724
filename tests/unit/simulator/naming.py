"""Assigns names to counted cores and GPUs of a simulation, with the device assignment of live nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import Core, Gpu, Inventory, NodeShape
from cotenant.core.placement.device_assignment import NodeDevices, Task
from cotenant.simulator import Cluster
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.recording.events import Event, Place

Run = tuple[str, int]  # a job, and the number of its run
SIBLINGS_FROM = 1000


def inventory_of(shape: NodeShape, numa_nodes: int) -> Inventory:
    """Return a node of a shape: cores of two threads and GPUs, distributed over its memory domains."""
    cores = (Core(at, (at, SIBLINGS_FROM + at), numa_node=at % numa_nodes) for at in range(shape.cores))
    gpus = (
        Gpu(f"GPU-{at}", shape.gpu_type, numa_node=at % numa_nodes, shareable=shape.shareable)
        for at in range(shape.gpus)
    )
    return Inventory(tuple(cores), tuple(gpus), memory_bytes=shape.memory_bytes)


@dataclass
class Names:
    """What each run holds by name, node by node; cores are the firm ones."""

    cluster: Cluster
    held: dict[Run, dict[int, NodeAllocation]] = field(default_factory=dict)
    counted: dict[Run, tuple[Holding, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = zip(self.cluster.shapes, self.cluster.numa_nodes, strict=True)
        self.books = [NodeDevices(f"n{at}", inventory_of(*told)) for at, told in enumerate(shapes)]

    def follow(self, running: Iterable[SimulatedJob], started: Mapping[str, Event]) -> None:
        """Assign names to new runs and changed holdings; then check everything."""
        now = {(sim_job.job.id, sim_job.runs): sim_job.holdings for sim_job in running}
        for run in [run for run in self.held if run not in now]:
            for node, allocation in self.held.pop(run).items():
                self.books[node].release(allocation)
            del self.counted[run]
        changed = [run for run in now if run in self.counted and self.counted[run] != now[run]]
        for run in sorted(changed, key=lambda run: sum(one.cores for one in now[run]) - self._cores(run)):
            self._resize(run, now[run], started[run[0]])
        for run in [run for run in now if run not in self.counted]:
            by_node = tasks_of(now[run], started[run[0]].nodes)
            self.held[run] = {node: self.books[node].assign(*told) for node, told in by_node.items()}
        self.counted = now
        self._check()

    def _cores(self, run: Run) -> int:
        return sum(one.cores for one in self.counted[run])

    def _resize(self, run: Run, holdings: tuple[Holding, ...], event: Event) -> None:
        for node, (tasks, _) in tasks_of(holdings, event.nodes).items():
            book, before = self.books[node], self.held[run][node]
            after = book.resize(before, {task.rank: task.demand.cores for task in tasks})
            book.release(before)
            book.hold(after)
            self.held[run][node] = after

    def _check(self) -> None:
        """No run holds another's core or GPU, each has its counted number, and memory beside its cores."""
        on: dict[int, list[NodeAllocation]] = {}
        for run, by_node in self.held.items():
            assert sum(part.cores for part in by_node.values()) == self._cores(run)
            for node, allocation in by_node.items():
                on.setdefault(node, []).append(allocation)
        for node, allocations in on.items():
            tasks = [task for allocation in allocations for task in allocation.tasks]
            cores = [core for task in tasks for core in task.core_ids]
            assert len(set(cores)) == len(cores) <= self.cluster.shapes[node].cores, "a core was given twice"
            milli: dict[str, int] = {}
            for share in (share for task in tasks for share in task.gpus):
                milli[share.uuid] = milli.get(share.uuid, 0) + share.milli
            assert all(given <= 1000 for given in milli.values()), "a GPU was given twice"
            domains = self.cluster.numa_nodes[node]
            for task in tasks:
                assert {cpu % SIBLINGS_FROM for cpu in task.cpu_ids} == set(task.core_ids), "siblings are kept together"
                assert {core % domains for core in task.core_ids} <= set(task.memory_nodes or range(domains))


def tasks_of(
    holdings: Iterable[Holding], places: Iterable[Place]
) -> dict[int, tuple[list[Task], list[tuple[int, int]]]]:
    """Return tasks for a run's holdings, with the selected GPU shares, node by node."""
    by_node: dict[int, tuple[list[Task], list[tuple[int, int]]]] = {}
    ranks = iter(range(10**6))
    for held, place in zip(holdings, places, strict=True):
        tasks, shares = by_node.setdefault(held.node, ([], []))
        tasks += one_each(held, place, ranks)
        shares += held.shares
    return by_node


def one_each(held: Holding, place: Place, ranks: Iterator[int]) -> Iterator[Task]:
    count = place.replicas
    demand = Demand(place.gpu_milli // count, held.cores // count, memory_bytes=place.memory_bytes // count)
    return (Task(place.role, next(ranks), demand) for _ in range(count))
