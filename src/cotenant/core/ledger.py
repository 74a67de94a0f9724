"""The ledger: what is free on which node, in columns, so that one question goes to all nodes at once.

Theory of operation. Most of a schedule is counting: how many replicas of a demand could each node take? The ledger
answers that for all nodes in a few numpy operations. It knows counts, not names: which cores and which GPUs is a
second question, asked only for what is really placed (see `books`). The one exception are nodes whose GPUs may be
shared in thousandths; there a count does not tell whether a share fits, so the ledger keeps those GPUs one by one.

Placing is speculative: `with ledger.attempt() as attempt` undoes whatever was taken unless it is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cotenant.core.gangs import Demand
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.nodes import NodeShape

Counts = NDArray[np.int64]
UNLIMITED = np.int64(2**40)


class Overcommitted(Exception):
    """Something was taken that was not free, or freed that was not taken: a bug in whoever asked."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is held on one node, by count; `shares` are (GPU index, thousandths) on nodes with shareable GPUs."""

    node: int
    gpus: int = 0
    cores: int = 0
    memory_bytes: int = 0
    shares: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """A part of an offer: so many replicas of one part of the gang on one node."""

    node: int
    part: int
    replicas: int


Offer = tuple[Share, ...]


@dataclass(slots=True)
class Attempt:
    """What was taken since the attempt began, to be undone unless it is committed."""

    ledger: Ledger
    taken: list[Holding] = field(default_factory=list)
    committed: bool = False

    def take(self, node: int, demand: Demand, replicas: int = 1) -> Holding:
        """Take on the ledger, remembering it."""
        holding = self.ledger.take(node, demand, replicas)
        self.taken.append(holding)
        return holding

    def commit(self) -> tuple[Holding, ...]:
        """Let what was taken stay taken."""
        self.committed = True
        return tuple(self.taken)


class Ledger:
    """Free resources by node. Nodes are numbered from 0 in the order given; `open` says which take new work."""

    def __init__(self, shapes: Sequence[NodeShape], racks: Sequence[str] = ()) -> None:
        self.shapes = tuple(shapes)
        count = len(self.shapes)
        self.total_gpus: Counts = np.array([shape.gpus for shape in shapes], dtype=np.int64)
        self.total_cores: Counts = np.array([shape.cores for shape in shapes], dtype=np.int64)
        self.total_memory: Counts = np.array([shape.memory_bytes for shape in shapes], dtype=np.int64)
        self.free_gpus = self.total_gpus.copy()
        self.free_cores = self.total_cores.copy()
        self.free_memory = self.total_memory.copy()
        self.open: NDArray[np.bool_] = np.ones(count, dtype=np.bool_)
        self.racks = tuple(racks) or ("",) * count
        self._types = tuple(shape.gpu_type for shape in shapes)
        self._of_type: dict[str, NDArray[np.bool_]] = {}
        self._journals: list[list[tuple[Holding, int]]] = []  # one per `undone` that is under way
        self._parts = {node: [WHOLE_GPU_MILLI] * shape.gpus for node, shape in enumerate(shapes) if shape.shareable}

    def __len__(self) -> int:
        return len(self.shapes)

    def of_type(self, gpu_type: str) -> NDArray[np.bool_]:
        """Tell which nodes have GPUs of a type; the type is found anywhere in the GPU's name, case aside."""
        if gpu_type not in self._of_type:
            wanted = gpu_type.lower()
            self._of_type[gpu_type] = np.array([wanted in name.lower() for name in self._types], dtype=np.bool_)
        return self._of_type[gpu_type]

    def room(self, demand: Demand, *, empty: bool = False, everywhere: bool = False) -> Counts:
        """Count for each node how many replicas of a demand it could take now, or if it were `empty`.

        Nodes that take no new work have no room, unless `everywhere` is asked.

        >>> ledger = Ledger([NodeShape(gpus=8, cores=24), NodeShape(gpus=4, cores=2)])
        >>> ledger.room(Demand(gpu_milli=1000, cores=1)).tolist()
        [8, 2]
        """
        gpus, cores, memory = (
            (self.total_gpus, self.total_cores, self.total_memory)
            if empty
            else (self.free_gpus, self.free_cores, self.free_memory)
        )
        room = np.full(len(self.shapes), UNLIMITED)
        if demand.gpu_milli >= WHOLE_GPU_MILLI:
            np.minimum(room, gpus // (demand.gpu_milli // WHOLE_GPU_MILLI), out=room)
        elif demand.gpu_milli:
            np.minimum(room, self._room_for_share(demand.gpu_milli, empty=empty), out=room)
        if demand.cores:
            np.minimum(room, cores // demand.cores, out=room)
        if demand.memory_bytes:
            np.minimum(room, memory // demand.memory_bytes, out=room)
        if demand.gpu_milli and demand.gpu_type:
            room[~self.of_type(demand.gpu_type)] = 0
        if not everywhere:
            room[~self.open] = 0
        return room

    def _room_for_share(self, milli: int, *, empty: bool) -> Counts:
        room = np.zeros(len(self.shapes), dtype=np.int64)
        for node, parts in self._parts.items():
            per_gpu = WHOLE_GPU_MILLI // milli
            room[node] = len(parts) * per_gpu if empty else sum(free // milli for free in parts)
        return room

    def take(self, node: int, demand: Demand, replicas: int = 1) -> Holding:
        """Take room for some replicas on a node.

        Raises:
            Overcommitted: there is not that much free.
        """
        wanted = demand.gpu_milli * replicas
        shares: tuple[tuple[int, int], ...] = ()
        if node in self._parts and wanted:
            shares = self._pick_shares(node, demand.gpu_milli, replicas)
        elif demand.gpu_milli % WHOLE_GPU_MILLI:
            raise Overcommitted(f"node {node} gives no shares of GPUs; {demand.gpu_milli} thousandths were taken")
        holding = Holding(
            node=node,
            gpus=0 if shares else wanted // WHOLE_GPU_MILLI,
            cores=demand.cores * replicas,
            memory_bytes=demand.memory_bytes * replicas,
            shares=shares,
        )
        self.hold(holding)
        return holding

    def _pick_shares(self, node: int, milli: int, replicas: int) -> tuple[tuple[int, int], ...]:
        """Choose GPUs for shares: the fullest that still fits; for whole ones the first that are free."""
        parts = list(self._parts[node])
        picked: list[tuple[int, int]] = []
        whole, each = (milli // WHOLE_GPU_MILLI, WHOLE_GPU_MILLI) if milli >= WHOLE_GPU_MILLI else (1, milli)
        for _ in range(replicas * whole):
            fitting = [(free, index) for index, free in enumerate(parts) if free >= each]
            if not fitting:
                raise Overcommitted(f"node {node} has no GPU with {each} thousandths free")
            _, index = min(fitting)
            parts[index] -= each
            picked.append((index, each))
        return tuple(picked)

    def can_hold(self, holding: Holding) -> bool:
        """Tell whether exactly this is free."""
        node = holding.node
        if self.free_cores[node] < holding.cores or self.free_memory[node] < holding.memory_bytes:
            return False
        if holding.shares:
            wanted: dict[int, int] = {}
            for index, milli in holding.shares:
                wanted[index] = wanted.get(index, 0) + milli
            return all(self._parts[node][index] >= milli for index, milli in wanted.items())
        return bool(self.free_gpus[node] >= holding.gpus)

    def hold(self, holding: Holding) -> None:
        """Take exactly this.

        Raises:
            Overcommitted: it is not free.
        """
        if not self.can_hold(holding):
            raise Overcommitted(f"{holding} is not free: {self.story(holding.node)}")
        self._add(holding, -1)

    def release(self, holding: Holding) -> None:
        """Give back what was taken.

        Raises:
            Overcommitted: it was not taken.
        """
        self._add(holding, +1)
        node = holding.node
        if (
            self.free_gpus[node] > self.total_gpus[node]
            or self.free_cores[node] > self.total_cores[node]
            or self.free_memory[node] > self.total_memory[node]
            or any(self._parts[node][index] > WHOLE_GPU_MILLI for index, _ in holding.shares)
        ):
            self._add(holding, -1)
            raise Overcommitted(f"{holding} was given back but never taken: {self.story(node)}")

    def _add(self, holding: Holding, sign: int) -> None:
        if self._journals:
            self._journals[-1].append((holding, sign))
        self._apply(holding, sign)

    def _apply(self, holding: Holding, sign: int) -> None:
        node = holding.node
        self.free_cores[node] += sign * holding.cores
        self.free_memory[node] += sign * holding.memory_bytes
        if holding.shares:
            parts = self._parts[node]
            for index, milli in holding.shares:
                parts[index] += sign * milli
            self.free_gpus[node] = sum(free >= WHOLE_GPU_MILLI for free in parts)
        else:
            self.free_gpus[node] += sign * holding.gpus

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo at the end whatever was taken or given back inside, in whatever way it ends."""
        journal: list[tuple[Holding, int]] = []
        self._journals.append(journal)
        try:
            yield
        finally:
            self._journals.pop()
            for holding, sign in reversed(journal):
                self._apply(holding, -sign)

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Speculate: what is taken inside is given back at the end unless the attempt was committed."""
        attempt = Attempt(self)
        try:
            yield attempt
        finally:
            if not attempt.committed:
                for holding in reversed(attempt.taken):
                    self.release(holding)

    def sums(self, nodes: NDArray[np.bool_], *, empty: bool = False) -> tuple[int, int, int]:
        """Sum up GPUs in thousandths, cores and memory on some nodes: what is free, or all if they were `empty`."""
        if empty:
            gpus, cores, memory = self.total_gpus, self.total_cores, self.total_memory
        else:
            gpus, cores, memory = self.free_gpus, self.free_cores, self.free_memory
        parts = 0 if empty else sum(self._broken_milli(node) for node in self._parts if nodes[node])
        return int(gpus[nodes].sum()) * WHOLE_GPU_MILLI + parts, int(cores[nodes].sum()), int(memory[nodes].sum())

    def _broken_milli(self, node: int) -> int:
        return sum(free for free in self._parts[node] if free < WHOLE_GPU_MILLI)

    @property
    def free_gpu_milli(self) -> int:
        """Free GPUs on nodes that take work, in thousandths; parts of shared GPUs count."""
        return self.sums(self.open)[0]

    @property
    def total_gpu_milli(self) -> int:
        """GPUs of nodes that take work, in thousandths."""
        return int(self.total_gpus[self.open].sum()) * WHOLE_GPU_MILLI

    def parts_of(self, node: int) -> tuple[int, ...]:
        """Free thousandths of each GPU of a node with shareable GPUs; empty for others."""
        return tuple(self._parts.get(node, ()))

    def story(self, node: int) -> str:
        """Tell what a node has and what of it is free, for errors."""
        return (
            f"node {node} has {self.free_gpus[node]} of {self.total_gpus[node]} GPUs, "
            f"{self.free_cores[node]} of {self.total_cores[node]} cores, "
            f"{self.free_memory[node]} of {self.total_memory[node]} bytes free"
        )
