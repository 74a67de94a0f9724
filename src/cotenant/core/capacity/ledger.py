"""The ledger: what is free on each node, in columns, so that one question goes to all nodes at once.

Theory of operation. Most of scheduling is counting: how many replicas of a demand could each node take? The ledger
answers that for all nodes in a few numpy operations. It knows counts, not names: the choice of cores and GPUs is a
second step, made only for what is really placed (see `device_assignment`). The one exception are nodes whose GPUs may
be shared in thousandths; there a count does not tell whether a share fits, so the ledger keeps those GPUs one by one: a
row per node in a table, as wide as the node with the most GPUs.

Placing is speculative: `with ledger.transaction() as transaction` undoes what was taken unless it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.replica_counts import UNLIMITED as UNLIMITED
from cotenant.core.capacity.replica_counts import Counts as Counts
from cotenant.core.capacity.replica_counts import count_in_each, count_room
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import NodeShape, UnhealthyCapacity, matches_gpu_type
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.resources import (
    KINDS,
    NAMES,
    WHOLE_GPU_MILLI,
    Amounts,
    Resources,
    amounts_times,
    counts_of,
)

KINDS_FEW = 32  # classes are counted one by one
DEMANDS_MAX = 4096  # cached: how many of each an empty node could take
CHANGES_MAX = 2**14  # remembered for users that keep figures by node


_counted_of: Callable[[object], tuple[int, ...]] = attrgetter(*NAMES[1:])


class Overcommitted(Exception):
    """Something was taken that was not free, or released that was not taken: a bug in the caller."""


@dataclass(frozen=True, slots=True)
class Holding(Amounts):
    """What is held on one node, by count; `shares` are (GPU index, thousandths) on nodes with shareable GPUs."""

    node: int
    gpus: int = 0
    cores: int = 0
    shares: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """A part of an offer: some replicas of one part of the gang on one node.

    `gpus` may give for each replica the index of the GPU to share; if empty, the ledger chooses.
    """

    node: int
    part: int
    replicas: int
    gpus: tuple[int, ...] = ()


Offer = tuple[Share, ...]


@dataclass(slots=True)
class Transaction:
    """What was taken since the transaction began, to be undone unless it is committed."""

    ledger: Ledger
    taken: list[Holding] = field(default_factory=list)
    committed: bool = False

    def take(self, node: int, demand: Demand, replicas: int = 1, gpus: tuple[int, ...] = ()) -> Holding:
        """Take resources on the ledger as part of the transaction."""
        holding = self.ledger.take(node, demand, replicas, gpus)
        self.taken.append(holding)
        return holding

    def commit(self) -> tuple[Holding, ...]:
        """Keep what was taken."""
        self.committed = True
        return tuple(self.taken)


class Ledger:
    """Free resources by node. Nodes are numbered from 0 in the order given; `open` marks those that take new work.

    `rack_numbers` gives the rack of each node; racks are numbered as they first appear; `numbers` are by node id.
    """

    def __init__(self, shapes: Sequence[NodeShape], racks: Sequence[str] = (), ids: Iterable[str] = ()) -> None:
        self.shapes, self.unhealthy = tuple(shapes), UnhealthyCapacity()
        self.numbers = {node_id: number for number, node_id in enumerate(ids)}
        count = len(self.shapes)
        self.total: Counts = (
            np.array([counts_of(shape) for shape in shapes], dtype=np.int64).reshape(count, len(KINDS)).T.copy()
        )
        self.total_gpus: Counts = self.total[0]
        self.total_cores: Counts = self.total[1]
        self.total_memory: Counts = self.total[2]
        self.has_gpus: NDArray[np.bool_] = self.total_gpus > 0
        self.mixed = not self.has_gpus.all()  # some nodes have no GPUs
        self._set_free(self.total.copy())
        self.open: NDArray[np.bool_] = np.ones(count, dtype=np.bool_)
        self.racks = tuple(racks) or ("",) * count
        names = {rack: number for number, rack in enumerate(dict.fromkeys(self.racks))}
        self.rack_numbers: Counts = np.array([names[rack] for rack in self.racks], dtype=np.int64)
        self.gives_containers_gpus: NDArray[np.bool_] = np.array(
            [shape.containers and shape.container_gpus for shape in shapes], dtype=np.bool_
        )
        self.runs_containers: NDArray[np.bool_] = np.array([shape.containers for shape in shapes], dtype=np.bool_)
        self._able: dict[tuple[Capability, ...], NDArray[np.bool_]] = {}
        self.seconds_left: NDArray[np.float64] | None = None  # of each node's availability; None: no node ends
        self._types = tuple(shape.gpu_type for shape in shapes)
        self._of_type: dict[str, NDArray[np.bool_]] = {}
        self.gpu_types = tuple(dict.fromkeys(self._types))  # "" stands for nodes without GPUs, or of no known type
        self._type_numbers: Counts | None = None
        self._journals: list[list[tuple[Holding, int]]] = []  # one per active `rolled_back`
        self._changes: list[int] = []  # nodes on which something was taken or released, after the first `_forgotten`
        self._forgotten = 0
        kind_of_shape = [(counts_of(shape), shape.gpu_type, shape.shareable) for shape in shapes]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(kind_of_shape))}
        self.kind_of: Counts = np.array([kinds[kind] for kind in kind_of_shape], dtype=np.int64)
        self._kinds = [(counts, counts[0] if shareable else 0) for counts, _, shareable in kinds]  # and shareable GPUs
        self._kind_types = [gpu_type for _, gpu_type, _ in kinds]
        counts_of_kinds = [counts for counts, _ in self._kinds]
        self.kinds: Counts = np.array(counts_of_kinds, dtype=np.int64).reshape(len(kinds), len(KINDS)).T.copy()
        self._room_of_kind: dict[Demand, tuple[int, ...]] = {}
        self.override_version = 0  # changes while more or less counts as free than is free
        self.totals: object = None  # cache of `free_totals`
        self.open_kinds: tuple[bytes, tuple[int, ...]] | None = None  # likewise: open nodes of each class
        sharing = [node for node, shape in enumerate(shapes) if shape.shareable]
        self._row = {node: row for row, node in enumerate(sharing)}  # of a node in the table of its GPUs' thousandths
        self._sharing: Counts = np.array(sharing, dtype=np.int64)
        wide = np.arange(max((shapes[node].gpus for node in sharing), default=0))
        self._milli: Counts = np.where(wide < self.total_gpus[self._sharing, None], WHOLE_GPU_MILLI, 0)

    def __len__(self) -> int:
        return len(self.shapes)

    def copy(self) -> Ledger:
        """Return a ledger that changes independently; the shapes, which never change, are shared."""
        other = shallow_copy(self)
        other._set_free(self.free.copy())
        other._milli, other.open = self._milli.copy(), self.open.copy()
        other._of_type, other._room_of_kind, other._able = {}, {}, {}  # caches, filled on demand
        other.totals = None
        other._journals, other._changes, other._forgotten = [], [], 0
        return other

    def _set_free(self, free: Counts) -> None:
        """Set what is free: a row for each resource, and views of the rows, also by name.

        For one node, a `memoryview` of a row is twice as fast as the row.
        """
        self.free, self.rows = free, tuple(free)
        self._whole, *counted = cells = [memoryview(row) for row in free]
        self._counted = tuple(counted)
        self._pairs = tuple(zip(cells, [memoryview(row) for row in self.total], strict=True))
        self.free_gpus: Counts = free[0]
        self.free_cores: Counts = free[1]
        self.free_memory: Counts = free[2]

    def of_type(self, gpu_type: str) -> NDArray[np.bool_]:
        """Return which nodes have GPUs of a type, or of one of several (see `node.matches_gpu_type`)."""
        if gpu_type not in self._of_type:
            kinds = {name: matches_gpu_type(name, gpu_type) for name in set(self._types)}
            self._of_type[gpu_type] = np.array([kinds[name] for name in self._types], dtype=np.bool_)
        return self._of_type[gpu_type]

    @property
    def type_numbers(self) -> Counts:
        """The place of each node's type among `gpu_types`."""
        if self._type_numbers is None:
            places = {kind: place for place, kind in enumerate(self.gpu_types)}
            self._type_numbers = np.array([places[kind] for kind in self._types], dtype=np.int64)
        return self._type_numbers

    def able(self, needs: tuple[Capability, ...]) -> NDArray[np.bool_]:
        """Return which nodes have executors that can do all of this."""
        if needs not in self._able:
            self._able[needs] = np.array([shape.lacks.isdisjoint(needs) for shape in self.shapes], dtype=np.bool_)
        return self._able[needs]

    def room(self, demand: Demand, *, empty: bool = False, everywhere: bool = False) -> Counts:
        """Return for each node how many replicas of a demand it could take now, or if it were `empty`.

        Nodes that take no new work have no room, unless `everywhere` is set.

        >>> ledger = Ledger([NodeShape(gpus=8, cores=24), NodeShape(gpus=4, cores=2)])
        >>> ledger.room(Demand(gpu_milli=1000, cores=1)).tolist()
        [8, 2]
        """
        room = self._room_if_empty(demand) if empty else self._room_in_free(demand)
        if not (everywhere or self.open.all()):
            room *= self.open
        return room

    def room_by_kind(self, demand: Demand) -> tuple[int, ...]:
        """Return for each node class how many replicas of a demand an empty node could take, open or not.

        All nodes of a class have the same room, so classes are counted, not nodes; results are cached.
        """
        known = self._room_of_kind.get(demand)
        if known is None:
            if len(self._room_of_kind) >= DEMANDS_MAX:
                self._room_of_kind.clear()
            if len(self._kinds) <= KINDS_FEW:
                known = count_in_each(demand, self._kinds)
            else:
                shares = np.array([shared for _, shared in self._kinds], dtype=np.int64) * (
                    WHOLE_GPU_MILLI // max(1, demand.gpu_milli)
                )
                known = tuple(count_room(demand, self.kinds, shares).tolist())
            if demand.gpu_milli and demand.gpu_type:
                of_type = [matches_gpu_type(name, demand.gpu_type) for name in self._kind_types]
                known = tuple([room if able else 0 for room, able in zip(known, of_type, strict=True)])
            self._room_of_kind[demand] = known
        return known

    def _room_if_empty(self, demand: Demand) -> Counts:
        room: Counts = np.array(self.room_by_kind(demand), dtype=np.int64)[self.kind_of]
        return room

    def _room_in_free(self, demand: Demand) -> Counts:
        room = count_room(demand, self.rows)
        if 0 < demand.gpu_milli < WHOLE_GPU_MILLI:
            np.minimum(room, self._room_for_share(demand.gpu_milli), out=room)
        if demand.gpu_milli and demand.gpu_type:
            room *= self.of_type(demand.gpu_type)
        return room

    def _room_for_share(self, milli: int) -> Counts:
        room = np.zeros(len(self.shapes), dtype=np.int64)
        room[self._sharing] = (self._milli // milli).sum(axis=1)
        return room

    def take(self, node: int, demand: Demand, replicas: int = 1, gpus: tuple[int, ...] = ()) -> Holding:
        """Take resources for some replicas on a node; `gpus` gives the GPU that each of them shares, if that matters.

        Raises:
            Overcommitted: not enough is free.
        """
        wanted = demand.gpu_milli * replicas
        shares: tuple[tuple[int, int], ...] = ()
        if gpus:
            shares = self._given_shares(node, demand.gpu_milli, replicas, gpus)
        elif node in self._row and wanted:
            shares = self._pick_shares(node, demand.gpu_milli, replicas)
        elif demand.gpu_milli % WHOLE_GPU_MILLI:
            raise Overcommitted(f"node {node} has no shareable GPUs; {demand.gpu_milli} thousandths were requested")
        holding = Holding(
            node=node,
            gpus=0 if shares else wanted // WHOLE_GPU_MILLI,
            cores=demand.cores * replicas,
            **amounts_times(demand, replicas),
            shares=shares,
        )
        self.hold(holding)
        return holding

    def _given_shares(self, node: int, milli: int, replicas: int, gpus: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        known = self.shapes[node].gpus if node in self._row else 0
        if len(gpus) != replicas or not 0 < milli <= WHOLE_GPU_MILLI or not all(0 <= gpu < known for gpu in gpus):
            raise Overcommitted(
                f"node {node} shares {known} GPUs; {replicas} replicas of {milli} were requested on {gpus}"
            )
        return tuple((gpu, milli) for gpu in gpus)

    def _pick_shares(self, node: int, milli: int, replicas: int) -> tuple[tuple[int, int], ...]:
        """Return GPUs for shares: the fullest that still fit; for whole GPUs the first that are free."""
        parts = list(self.parts_of(node))
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

    def lacks_beside_gpus(self, node: int, record: Demand | Holding) -> bool:
        """Return whether a node has less free of any resource but GPUs than a record has of it."""
        counted = self._counted
        for at, count in enumerate(_counted_of(record)):  # noqa: SIM110 - half the time of a generator
            if counted[at][node] < count:
                return True
        return False

    def can_hold(self, holding: Holding) -> bool:
        """Return whether exactly this is free."""
        node = holding.node
        if self.lacks_beside_gpus(node, holding):
            return False
        if holding.shares:
            wanted: dict[int, int] = {}
            for index, milli in holding.shares:
                wanted[index] = wanted.get(index, 0) + milli
            parts = self._milli[self._row[node]]
            return all(parts[index] >= milli for index, milli in wanted.items())
        return self._whole[node] >= holding.gpus

    def hold(self, holding: Holding) -> None:
        """Take exactly this.

        Raises:
            Overcommitted: it is not free.
        """
        if not self.hold_if_free(holding):
            raise Overcommitted(f"{holding} is not free: {self.describe_node(holding.node)}")

    def hold_if_free(self, holding: Holding) -> bool:
        """Take exactly this if it is free; returns whether it was."""
        if not self.can_hold(holding):
            return False
        self._add(holding, -1)
        return True

    def release(self, holding: Holding) -> None:
        """Release what was taken.

        Raises:
            Overcommitted: it was not taken.
        """
        self._add(holding, +1)
        if self._exceeds(holding):
            self._add(holding, -1)
            raise Overcommitted(f"{holding} was released but never taken: {self.describe_node(holding.node)}")

    def _exceeds(self, holding: Holding) -> bool:
        """Return whether more is free than there is, where this was released."""
        node = holding.node
        for free, there in self._pairs:
            if free[node] > there[node]:
                return True
        return any(self._milli[self._row[node], index] > WHOLE_GPU_MILLI for index, _ in holding.shares)

    def _add(self, holding: Holding, sign: int) -> None:
        if self._journals:
            self._journals[-1].append((holding, sign))
        self._apply(holding, sign)

    def _apply(self, holding: Holding, sign: int) -> None:
        node = holding.node
        if len(self._changes) >= CHANGES_MAX:
            self._forgotten += len(self._changes)
            self._changes.clear()
        self._changes.append(node)
        counted = self._counted
        for at, count in enumerate(_counted_of(holding)):
            if count:
                counted[at][node] += sign * count
        if holding.shares:
            parts = self._milli[self._row[node]]
            for index, milli in holding.shares:
                parts[index] += sign * milli
            self._whole[node] = int((parts >= WHOLE_GPU_MILLI).sum())
        elif holding.gpus:
            self._whole[node] += sign * holding.gpus

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Undo at the end whatever was taken or released inside, however the block ends."""
        journal: list[tuple[Holding, int]] = []
        self._journals.append(journal)
        try:
            yield
        finally:
            self._journals.pop()
            for holding, sign in reversed(journal):
                self._apply(holding, -sign)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Open a transaction: what is taken inside is released at the end unless the transaction was committed."""
        transaction = Transaction(self)
        try:
            yield transaction
        finally:
            if not transaction.committed:
                for holding in reversed(transaction.taken):
                    self.release(holding)

    def sums(self, nodes: NDArray[np.bool_], *, empty: bool = False) -> Resources:
        """Return the resources of some nodes, added up: what is free, or all if `empty`."""
        whole, *others = ((self.total if empty else self.free) @ nodes).tolist()
        milli = whole * WHOLE_GPU_MILLI
        if len(self._sharing) and not empty:
            parts = self._milli[nodes[self._sharing]]
            milli += int(parts[parts < WHOLE_GPU_MILLI].sum())
        return tuple.__new__(Resources, (milli, *others))

    @property
    def free_gpu_milli(self) -> int:
        """Free GPUs on nodes that take work, in thousandths, including parts of shared GPUs."""
        return self.sums(self.open)[0]

    @property
    def total_gpu_milli(self) -> int:
        """GPUs of nodes that take work, in thousandths."""
        return int(self.total_gpus[self.open].sum()) * WHOLE_GPU_MILLI

    def parts_of(self, node: int) -> tuple[int, ...]:
        """Return the free thousandths of each GPU of a node with shareable GPUs; empty for other nodes."""
        return tuple(self._milli[self._row[node], : self.shapes[node].gpus].tolist()) if node in self._row else ()

    @property
    def mark(self) -> int:
        """A moment in the ledger's history, for `changed_since`."""
        return self._forgotten + len(self._changes)

    def changed_since(self, mark: int) -> Counts | None:
        """Return the nodes on which something was taken or released since a mark; None if the mark is too old."""
        if mark < self._forgotten:
            return None
        return np.array(sorted(set(self._changes[mark - self._forgotten :])), dtype=np.int64)

    @property
    def free_milli(self) -> Counts:
        """Free thousandths of GPUs on each node, including parts of shared GPUs."""
        milli = self.free_gpus * WHOLE_GPU_MILLI
        milli[self._sharing] = self._milli.sum(axis=1)
        return milli

    def parts_on(self, nodes: Counts) -> Counts:
        """Return the free thousandths of each GPU of some nodes with shareable GPUs, one node a row, padded with zeros.

        Rows of other nodes are all zeros.
        """
        rows = np.searchsorted(self._sharing, nodes)
        known = rows < len(self._sharing)
        known[known] = self._sharing[rows[known]] == nodes[known]
        parts = np.zeros((len(nodes), self._milli.shape[1]), dtype=np.int64)
        parts[known] = self._milli[rows[known]]
        return parts

    @property
    def sharing(self) -> NDArray[np.bool_]:
        """Which nodes have shareable GPUs."""
        shares = np.zeros(len(self), dtype=np.bool_)
        shares[self._sharing] = True
        return shares

    def describe_node(self, node: int) -> str:
        """Return what a node has and what of it is free, for errors."""
        rows = zip(KINDS, self.free[:, node], self.total[:, node], strict=True)
        return f"node {node} has {', '.join(f'{free} of {total} {kind.noun}' for kind, free, total in rows)} free"
