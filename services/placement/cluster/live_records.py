"""A node and an attempt as placement holds them, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cotenant.codec import specs
from cotenant.core.capacity.ledger import Holding
from cotenant.core.model import health
from cotenant.core.model.allocation import Allocation, NodeAllocation, both
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import GRACE_SECONDS_DEFAULT, WHOLE_GPU_MILLI
from cotenant.core.model.lifecycle import AttemptEvent, AttemptState, StopReason, next_state
from cotenant.core.model.node import HealthAction, HealthProblem, Inventory, NodeShape, shape_of
from cotenant.core.model.validation import MEMORY_BYTES_MAX
from cotenant.core.placement.device_assignment import Book
from cotenant.core.policy.cluster_view import Stay
from cotenant.services.placement.cluster.agent_conditions import ToldCondition
from cotenant.services.placement.cluster.committer import Write
from cotenant.v1 import job_pb2, node_service_pb2, records_pb2
from cotenant.v1.certificate_pb2 import Certificate

SCHEMA_VERSION = 1
ATTEMPTS, NODES, GUARDS = "placement/attempts/", "placement/nodes/", "placement/guards/"
KINDS = "placement/kinds/"
FORGOTTEN = "placement/forgotten/"
REQUEST_IDS_MAX = 32  # of a node
KILL_SECONDS_MAX = 10.0  # for the kernel to end what was killed
HEARTBEATS_MISSED_MAX = 3  # before the agent of a node is taken as away

HEALTH = "health"  # who cordons or drains a node that is not well

NodeState = node_service_pb2.NodeState
AILING = {HealthAction.HOLD: NodeState.NODE_STATE_CORDONED, HealthAction.DRAIN: NodeState.NODE_STATE_DRAINING}
State = specs.ATTEMPT_STATES


@dataclass(slots=True)
class Node:
    """A node: its record, who holds what by name, and whether its agent is there.

    When its agent was last heard is `seen_seconds` on the monotonic clock, and `heard_seconds` on that of `Attention`.
    """

    record: records_pb2.StoredNode
    inventory: Inventory
    book: Book
    number: int
    connected: bool = False
    lost: bool = False
    strained: bool = False  # what its attempts hold is more than it has
    was_open: bool = False  # when that was last looked at
    rivalry: str = ""  # why it gets no new work beside another node of its machine
    seen_seconds: float = 0.0
    heard_seconds: float = 0.0
    certificate: Certificate | None = None  # that its agent shows, as it says
    condition: ToldCondition = field(default_factory=ToldCondition)
    shape: NodeShape = field(init=False)  # with GPUs that are ill
    unwell: HealthProblem | None = field(init=False)  # as its agent says: it gets no new work
    hold: HealthProblem | None = None  # as placement has seen: it gets a canary now and then
    superseded: set[tuple[str, int]] = field(default_factory=set)  # stopping there, unknown to us: it still holds

    def __post_init__(self) -> None:
        self.shape = shape_of(self.inventory)
        self.unwell = health.on_node(self.inventory)

    @property
    def id(self) -> str:
        """The node's id."""
        return self.record.node.id

    @property
    def given_up(self) -> str:
        """Why an operator says that it will not come back; "" where nobody does, or it has."""
        return self.record.given_up

    @property
    def ailment(self) -> HealthProblem | None:
        """For what problem it gets no new work; its agent's word goes first."""
        return self.unwell or self.hold

    @property
    def open_but_held(self) -> bool:
        """Whether the node takes new work, or would if it were not held for its launches."""
        kept = self.record.node.state
        clear = not self.superseded and not self.strained and self.unwell is None and not self.rivalry
        return self.connected and clear and kept == NodeState.NODE_STATE_READY

    @property
    def open(self) -> bool:
        """Whether the node takes new work."""
        return self.open_but_held and self.hold is None

    @property
    def state(self) -> NodeState.ValueType:
        """The state for people: the operator's word, else its health's, unless the agent is away."""
        if self.lost:
            return NodeState.NODE_STATE_LOST
        if not self.connected:
            return NodeState.NODE_STATE_AWAY
        if self.record.node.state == NodeState.NODE_STATE_READY and self.ailment:
            return AILING[self.ailment.action]
        if self.record.node.state == NodeState.NODE_STATE_READY and self.rivalry:
            return NodeState.NODE_STATE_CORDONED
        return self.record.node.state

    @property
    def why(self) -> tuple[str, str]:
        """Who gives it no new work, and why; the machine never speaks over an operator."""
        if self.record.node.state == NodeState.NODE_STATE_READY and self.ailment:
            return HEALTH, self.ailment.reason
        if self.record.node.state == NodeState.NODE_STATE_READY and self.rivalry:
            return HEALTH, self.rivalry
        return self.record.node.state_owner, self.record.node.state_reason


@dataclass(slots=True)
class Live:
    """An attempt that has not been forgotten. Epoch 0: its commit is under way, and nobody has been told of it.

    While it is resized it has a `target`, and holds the cores of before and after.
    """

    record: records_pb2.StoredAttempt
    allocation: tuple[NodeAllocation, ...]
    parts: dict[str, AttemptState] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    epoch: int = 0
    end_kept: bool = False  # its end has been committed
    before: Live | None = None  # the job's attempt before, which has ended, until the start of this one is committed
    stop_wanted: StopReason | None = None  # as soon as its start has been committed
    target: tuple[NodeAllocation, ...] = ()  # what it holds once all of its nodes have applied a resize
    applied: dict[str, str] = field(default_factory=dict)  # what nodes said of it: "" where they did it, else why not
    disconnected: str = ""  # what the agent says of a part that stopped because its node was without us
    turned_back: bool = False  # the resize takes it back to what it held before one that could not be applied
    ordering: bool = False  # the resize is being committed: its revision will be the epoch
    gang: Gang | None = None  # as policies see it, once one has looked, until its cores or its estimate change
    stay: Stay | None = None  # what it holds, as policies see it, once one has looked
    told_seconds: float = 0.0  # when its estimate was told, in unix seconds; 0: before its start
    resize_after_seconds: float = 0.0  # a resize has failed: not before then again; 0: whenever

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
    def held(self) -> tuple[NodeAllocation, ...]:
        """What is to be given to nobody else: more than `allocation` while it is resized."""
        return both(self.allocation, self.target) if self.target else self.allocation

    @property
    def nodes(self) -> list[str]:
        """The nodes that it is on; rank 0's first."""
        return [allocation.node_id for allocation in self.allocation]

    @property
    def reclaimable(self) -> bool:
        """Whether what it holds was lent to it."""
        return any(task.reclaimable for part in self.allocation for task in part.tasks)

    @property
    def ended_everywhere(self) -> bool:
        """Whether every part of it has ended."""
        return all(self.ended_on(node_id) for node_id in self.nodes)

    def ended_on(self, node_id: str) -> bool:
        """Whether its part on a node has ended."""
        part = self.parts.get(node_id)
        return part is not None and part.ended

    def move(self, event: AttemptEvent) -> None:
        """Take the attempt to the state that the table says."""
        self.attempt.state = State.to_wire(next_state(f"{self.key[0]}/{self.key[1]}", self.state, event))

    def write(self) -> Write:
        """What is to be written to keep it."""
        self.attempt.epoch = 0 if self.ordering else self.epoch
        write = Write(ATTEMPTS + self.key[0], self.record.SerializeToString())
        self.attempt.epoch = self.epoch
        return write

    def write_down(self) -> None:
        """Put what it holds, and is to hold, into its messages."""
        del self.attempt.allocations[:], self.record.resizing[:]
        self.attempt.allocations.extend(specs.allocation_to_wire(part) for part in self.allocation)
        self.record.resizing.extend(specs.allocation_to_wire(part) for part in self.target)
        for part, then in zip(self.attempt.allocations, self.record.resizing, strict=False):
            for task, wanted in zip(part.tasks, then.tasks, strict=True):
                task.target_cores = len(wanted.core_ids)


def may_run_on_seconds(live: Live, lost_after_seconds: float, heartbeat_seconds: float) -> float:
    """For how long after its agent was last heard an attempt may still run.

    One that stops by itself without us is not given up before it must have: so it never runs twice. Others may run on
    for as long as they like, and are stopped when their node is back.
    """
    spec = live.record.spec
    if not spec.HasField("stop_after_disconnected"):
        return lost_after_seconds
    grace_seconds = specs.seconds(spec.grace) if spec.HasField("grace") else GRACE_SECONDS_DEFAULT
    stops_seconds = specs.seconds(spec.stop_after_disconnected) + grace_seconds
    stops_seconds += KILL_SECONDS_MAX + HEARTBEATS_MISSED_MAX * heartbeat_seconds
    return max(lost_after_seconds, stops_seconds)


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


def check_amounts(allocation: Allocation) -> None:
    """See that what an attempt holds can be counted.

    Raises:
        ValueError: it cannot.
    """
    for task in (task for part in allocation for task in part.tasks):
        if not 0 <= task.memory_bytes <= MEMORY_BYTES_MAX:
            raise ValueError(f"nobody holds {task.memory_bytes} bytes of memory")
        for share in task.gpus:
            if not 0 < share.milli <= WHOLE_GPU_MILLI:
                raise ValueError(f"nobody holds {share.milli} thousandths of a GPU")


def used(node: Node, lives: Sequence[Live]) -> tuple[int, int, int]:
    """GPUs in thousandths, cores and memory in bytes that attempts hold on a node."""
    parts = [part for live in lives for part in live.held if part.node_id == node.id]
    return (
        sum(part.gpu_milli for part in parts),
        sum(part.cores for part in parts),
        sum(part.memory_bytes for part in parts),
    )
