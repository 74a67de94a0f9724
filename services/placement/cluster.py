"""Nodes and live attempts as placement knows them: what was committed, and what is being committed.

No IO: methods change the picture and say what is to be written and to whom something is to be told. Whoever calls them
commits the writes through the committer, then tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.allocations import NodeAllocation
from cotenant.core.books import Book
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.ledger import Holding, Ledger
from cotenant.core.lifecycle import AttemptEvent, AttemptState, StopReason, next_state
from cotenant.core.nodes import Inventory, NodeShape, shape_of
from cotenant.rpc import translate
from cotenant.services.placement.committer import Write
from cotenant.v1 import job_pb2, node_service_pb2, records_pb2

SCHEMA_VERSION = 1
ATTEMPTS, NODES, GUARDS = "placement/attempts/", "placement/nodes/", "placement/guards/"
MASTER_PORTS = range(29500, 30000)

NodeState = node_service_pb2.NodeState
State = translate.ATTEMPT_STATES


@dataclass(slots=True)
class Node:
    """A node: its record, who holds what by name, and whether its agent is there."""

    record: records_pb2.StoredNode
    inventory: Inventory
    book: Book
    number: int
    connected: bool = False
    lost: bool = False
    seen_seconds: float = 0.0
    superseded: set[tuple[str, int]] = field(default_factory=set)  # stopping there, unknown to us: it still holds

    @property
    def id(self) -> str:
        """The node's id."""
        return self.record.node.id

    @property
    def open(self) -> bool:
        """Whether the node takes new work."""
        kept = self.record.node.state
        return self.connected and not self.superseded and kept == NodeState.NODE_STATE_READY

    @property
    def state(self) -> NodeState.ValueType:
        """The state for people: the operator's word, unless the agent is away."""
        if self.lost:
            return NodeState.NODE_STATE_LOST
        if not self.connected:
            return NodeState.NODE_STATE_AWAY
        return self.record.node.state


@dataclass(slots=True)
class Live:
    """An attempt that has not been forgotten."""

    record: records_pb2.StoredAttempt
    allocation: tuple[NodeAllocation, ...]
    parts: dict[str, AttemptState] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    epoch: int = 0

    @property
    def attempt(self) -> job_pb2.Attempt:
        """The attempt's message."""
        return self.record.attempt

    @property
    def key(self) -> tuple[str, int]:
        """Job id and number."""
        return self.attempt.job_id, self.attempt.number

    @property
    def state(self) -> AttemptState:
        """Where it stands."""
        return State.from_wire(self.attempt.state)

    @property
    def nodes(self) -> list[str]:
        """The nodes that it is on; rank 0's first."""
        return [allocation.node_id for allocation in self.allocation]

    def move(self, event: AttemptEvent) -> None:
        """Take the attempt to the state that the table says."""
        self.attempt.state = State.to_wire(next_state(f"{self.key[0]}/{self.key[1]}", self.state, event))

    def write(self) -> Write:
        """What is to be written to keep it."""
        self.attempt.epoch = self.epoch
        return Write(ATTEMPTS + self.key[0], self.record.SerializeToString())


class Cluster:
    """All nodes and attempts, the ledger over them, and what follows from events."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.attempts: dict[str, Live] = {}
        self._by_node: dict[str, dict[str, Live]] = {}
        self._ledger: Ledger | None = None
        self._order: list[Node] = []

    def replace(self, fresh: Cluster) -> None:
        """Believe another picture from now on."""
        self.nodes, self.attempts, self._by_node = fresh.nodes, fresh.attempts, fresh._by_node
        self.touch()

    # Nodes ---------------------------------------------------------------------------------------------------

    def put_node(self, node_id: str, inventory: Inventory, record: records_pb2.StoredNode) -> Node:
        """Register a node, or take in that it is made of something else now."""
        old = self.nodes.get(node_id)
        node = Node(record, inventory, Book(node_id, healthy(inventory)), number=old.number if old else -1)
        if old:
            node.connected, node.lost, node.seen_seconds = old.connected, old.lost, old.seen_seconds
            node.superseded = old.superseded
        self.nodes[node_id] = node
        self.touch()
        return node

    def touch(self) -> None:
        """Note that nodes came or changed: the ledger is made anew when it is next asked for."""
        self._ledger = None

    def reopen(self, node: Node) -> None:
        """Let the ledger know whether a node takes work now."""
        if self._ledger is not None:
            self._ledger.open[node.number] = node.open

    @property
    def ledger(self) -> Ledger:
        """What is free, counted over all nodes; nodes are numbered by id."""
        if self._ledger is None:
            self._ledger = self._rebuild()
        return self._ledger

    def _rebuild(self) -> Ledger:
        self._order = [self.nodes[node_id] for node_id in sorted(self.nodes)]
        for number, node in enumerate(self._order):
            node.number = number
            node.book = Book(node.id, healthy(node.inventory))
        ledger = Ledger(
            [shape_of(node.book.inventory) for node in self._order],
            [node.inventory.rack for node in self._order],
        )
        for live in self.attempts.values():
            if not live.state.ended:
                live.holdings = tuple(self._hold(ledger, live))
        for number, node in enumerate(self._order):
            ledger.open[number] = node.open
        return ledger

    def _hold(self, ledger: Ledger, live: Live) -> Iterable[Holding]:
        for allocation in live.allocation:
            node = self.nodes.get(allocation.node_id)
            if node is None:
                continue
            still = within(node.book.inventory, allocation)
            node.book.hold(still)
            holding = node.book.holding(node.number, still)
            ledger.hold(holding)
            yield holding

    def node_at(self, number: int) -> Node:
        """The node that has this number in the ledger."""
        return self._order[number]

    def shapes(self) -> tuple[NodeShape, ...]:
        """The shapes of all registered nodes, with their counts."""
        counts: dict[NodeShape, int] = {}
        for node in self.nodes.values():
            shape = shape_of(node.inventory)
            counts[shape] = counts.get(shape, 0) + 1
        return tuple(replace(shape, count=count) for shape, count in counts.items())

    def open_shapes(self) -> tuple[NodeShape, ...]:
        """The shapes of the nodes that take work, for sizing."""
        return tuple({shape_of(node.book.inventory): None for node in self.nodes.values() if node.open})

    # Attempts ------------------------------------------------------------------------------------------------

    def add(self, live: Live) -> None:
        """Note an attempt; what it holds is held already, or will be when the ledger is made anew."""
        self.forget(live.key[0])
        self.attempts[live.key[0]] = live
        for node_id in live.nodes:
            self._by_node.setdefault(node_id, {})[live.key[0]] = live

    def forget(self, job_id: str) -> None:
        """Drop an attempt that holds nothing any more."""
        if live := self.attempts.pop(job_id, None):
            for node_id in live.nodes:
                self._by_node[node_id].pop(job_id, None)

    def release(self, live: Live) -> None:
        """Give back what an attempt held."""
        if self._ledger is not None:
            for holding in live.holdings:
                self._ledger.release(holding)
            for allocation in live.allocation:
                if node := self.nodes.get(allocation.node_id):
                    node.book.release(allocation)
        live.holdings = ()

    def on_node(self, node_id: str) -> list[Live]:
        """Attempts that are on a node and have not ended."""
        return [live for live in self._by_node.get(node_id, {}).values() if not live.state.ended]

    def leaving(self) -> list[Holding]:
        """What stopping attempts hold on nodes that take work: it will be free soon."""
        return [
            holding
            for live in self.attempts.values()
            if live.state is AttemptState.STOPPING
            for holding in live.holdings
        ]

    def master_port(self, node_id: str) -> int:
        """The first port of the range that no live attempt's rank 0 has on a node."""
        taken = {live.attempt.master_port for live in self.on_node(node_id) if live.nodes[0] == node_id}
        return next((port for port in MASTER_PORTS if port not in taken), MASTER_PORTS[0])

    def stop(self, live: Live, reason: StopReason) -> bool:
        """Order an attempt to stop; False where it has ended, or stops already."""
        if live.state.ended or live.state is AttemptState.STOPPING:
            return False
        live.move(AttemptEvent.STOP_ORDERED)
        live.attempt.stop_reason = translate.STOP_REASONS.to_wire(reason)
        return True

    def report(self, live: Live, node_id: str, told: node_service_pb2.AttemptReport) -> bool:
        """Take in what an agent says of its part of an attempt; False where that changes nothing."""
        state = State.from_wire(told.state)
        if live.state.ended or live.parts.get(node_id) is state:
            return False
        live.parts[node_id] = state
        if state is AttemptState.RUNNING:
            return self._launched(live, told)
        if not state.ended:
            return False
        if state is AttemptState.FAILED and not live.attempt.HasField("exit"):
            live.attempt.exit.CopyFrom(told.exit)
            live.attempt.exit.node_id = node_id
            live.attempt.message = told.message
        if all(live.parts.get(node) and live.parts[node].ended for node in live.nodes):
            self._ended(live, told)
            return True
        if state is not AttemptState.SUCCEEDED:
            return self.stop(live, StopReason.GANG_BROKEN)
        return False

    def _launched(self, live: Live, told: node_service_pb2.AttemptReport) -> bool:
        if live.state is not AttemptState.ASSIGNED:
            return False
        if any(live.parts.get(node) is not AttemptState.RUNNING for node in live.nodes):
            return False
        live.move(AttemptEvent.LAUNCHED)
        live.attempt.start_time.CopyFrom(told.time)
        return True

    def _ended(self, live: Live, told: node_service_pb2.AttemptReport) -> None:
        ends = set(live.parts.values())
        if AttemptState.FAILED in ends:
            event = AttemptEvent.FAILED
        elif ends == {AttemptState.SUCCEEDED}:
            event = AttemptEvent.SUCCEEDED
        else:
            event = AttemptEvent.STOPPED
        live.move(event)
        if event is not AttemptEvent.FAILED:
            live.attempt.exit.CopyFrom(told.exit)
        live.attempt.end_time.CopyFrom(told.time)
        if live.state is AttemptState.STOPPED and not live.attempt.stop_reason:
            live.attempt.stop_reason = translate.STOP_REASONS.to_wire(StopReason.GANG_BROKEN)
        self.release(live)

    def lose(self, live: Live, why: str, now: float) -> None:
        """Give an attempt up: its node is away for too long, or has forgotten it."""
        live.move(AttemptEvent.LOST)
        live.attempt.message = why
        live.attempt.end_time.FromNanoseconds(int(now * 1e9))
        self.release(live)

    def victims(self, wanted: Sequence[tuple[str, int]]) -> list[Live]:
        """Find the attempts that are named and still hold something."""
        found = (self.attempts.get(job_id) for job_id, _ in wanted)
        numbers = dict(wanted)
        return [
            live
            for live in found
            if live
            and live.key[1] == numbers[live.key[0]]
            and live.state in (AttemptState.ASSIGNED, AttemptState.RUNNING)
        ]


def healthy(inventory: Inventory) -> Inventory:
    """An inventory without the GPUs that may get no new work."""
    if not any(gpu.unhealthy_reason for gpu in inventory.gpus):
        return inventory
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if not gpu.unhealthy_reason))


def within(inventory: Inventory, allocation: NodeAllocation) -> NodeAllocation:
    """An allocation without the cores and GPUs that its node no longer has."""
    cores = {core.id for core in inventory.cores}
    gpus = {gpu.uuid for gpu in inventory.gpus}
    return replace(
        allocation,
        tasks=tuple(
            replace(
                task,
                core_ids=tuple(core for core in task.core_ids if core in cores),
                gpus=tuple(share for share in task.gpus if share.uuid in gpus),
            )
            for task in allocation.tasks
        ),
    )


def used(node: Node, lives: Sequence[Live]) -> tuple[int, int, int]:
    """GPUs in thousandths, cores and memory in bytes that attempts hold on a node."""
    parts = [part for live in lives for part in live.allocation if part.node_id == node.id]
    return (
        sum(part.gpu_milli for part in parts),
        sum(part.cores for part in parts),
        sum(part.memory_bytes for part in parts),
    )


def total(shapes: Iterable[NodeShape]) -> tuple[int, int, int]:
    """GPUs in thousandths, cores and memory of so many nodes."""
    shapes = tuple(shapes)
    return (
        sum(shape.gpus * shape.count for shape in shapes) * WHOLE_GPU_MILLI,
        sum(shape.cores * shape.count for shape in shapes),
        sum(shape.memory_bytes * shape.count for shape in shapes),
    )
