"""Nodes and attempts in placement's memory: their stored records and their volatile state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import node_capabilities, specs
from cotenant.core.capacity.ledger import Holding
from cotenant.core.model import health
from cotenant.core.model.allocation import Allocation, NodeAllocation, merge_allocations
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import GRACE_SECONDS_DEFAULT, WHOLE_GPU_MILLI
from cotenant.core.model.lifecycle import AttemptEvent, AttemptState, StopReason, next_state
from cotenant.core.model.node import HealthAction, HealthProblem, Inventory, NodeShape, shape_of
from cotenant.core.model.node_capabilities import CoreControl, NodeCapabilities
from cotenant.core.model.resources import AMOUNT_MAX, Resources, added, amounts_of
from cotenant.core.placement.device_assignment import NodeDevices
from cotenant.core.policy.cluster_view import Occupancy
from cotenant.internal.v1.attempt_pb2 import AttemptEvidence, ObservedAttempt
from cotenant.services.placement.cluster.agent_conditions import ReportedCondition
from cotenant.services.placement.cluster.committer import Write
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2, node_service_pb2
from cotenant.v1.certificate_pb2 import Certificate

SCHEMA_VERSION = 1
ATTEMPTS, NODES, GUARDS = "placement/attempts/", "placement/nodes/", "placement/guards/"
JOB_CLASSES = "placement/kinds/"
FORGOTTEN = "placement/forgotten/"
REQUEST_IDS_MAX = 32  # of a node
KILL_SECONDS_MAX = 10.0  # until the kernel has ended killed processes
HEARTBEATS_MISSED_MAX = 3  # before a node's agent counts as disconnected

Owner = node_service_pb2.NodeStateOwner
HEALTH = Owner.NODE_STATE_OWNER_HEALTH  # of automatic cordons and drains of unhealthy nodes

NodeState = node_service_pb2.NodeState
HEALTH_STATES = {HealthAction.HOLD: NodeState.NODE_STATE_CORDONED, HealthAction.DRAIN: NodeState.NODE_STATE_DRAINING}
State = specs.ATTEMPT_STATES


@dataclass(slots=True)
class Node:
    """A node: its record, the assignment of its devices, and whether its agent is connected.

    The agent's last message came at `seen_seconds` on the monotonic clock and at `heard_seconds` on the liveness clock.
    """

    record: records_pb2.StoredNode
    inventory: Inventory
    book: NodeDevices
    number: int
    connected: bool = False
    lost: bool = False
    overcommitted: bool = False  # its attempts hold more than it has
    was_open: bool = False  # at the last `refresh_open`
    claim_conflict: str = ""  # why it gets no new work: another node of its machine offers the same devices
    seen_seconds: float = 0.0
    heard_seconds: float = 0.0
    certificate: Certificate | None = None  # of its agent, as reported
    condition: ReportedCondition = field(default_factory=ReportedCondition)
    capabilities: NodeCapabilities = field(init=False)  # as its executor declared them last
    shape: NodeShape = field(init=False)  # including unhealthy GPUs
    reported_problem: HealthProblem | None = field(init=False)  # reported by its agent: no new work
    hold: HealthProblem | None = None  # imposed by placement: only canaries
    superseded: set[tuple[str, int]] = field(default_factory=set)  # unexpected attempts that are being stopped

    def __post_init__(self) -> None:
        self.capabilities = node_capabilities.declared(self.record.node)
        self.shape = shape_of(self.inventory, self.capabilities)
        self.reported_problem = health.node_problem(self.inventory)

    @property
    def id(self) -> str:
        """The node's id."""
        return self.record.node.id

    @property
    def resizes_cores(self) -> bool:
        """Whether its executor changes the cores of running attempts."""
        return self.capabilities.cores is CoreControl.RESIZE

    @property
    def given_up(self) -> str:
        """Why an operator gave it up as permanently lost; "" if it was not, or has returned."""
        return self.record.given_up

    @property
    def health_problem(self) -> HealthProblem | None:
        """The health problem for which it gets no new work; the agent's report takes precedence."""
        return self.reported_problem or self.hold

    @property
    def open_without_hold(self) -> bool:
        """Whether the node takes new work, ignoring a hold for failed launches."""
        stored_state = self.record.node.state
        clear = (
            not self.superseded and not self.overcommitted and self.reported_problem is None and not self.claim_conflict
        )
        return self.connected and clear and stored_state == NodeState.NODE_STATE_READY

    @property
    def open(self) -> bool:
        """Whether the node takes new work."""
        return self.open_without_hold and self.hold is None

    @property
    def state(self) -> NodeState.ValueType:
        """The displayed state: lost or away if the agent is disconnected, else the operator's state, else health."""
        if self.lost:
            return NodeState.NODE_STATE_LOST
        if not self.connected:
            return NodeState.NODE_STATE_AWAY
        if self.record.node.state == NodeState.NODE_STATE_READY and self.health_problem:
            return HEALTH_STATES[self.health_problem.action]
        if self.record.node.state == NodeState.NODE_STATE_READY and self.claim_conflict:
            return NodeState.NODE_STATE_CORDONED
        return self.record.node.state

    @property
    def why(self) -> tuple[Owner.ValueType, str]:
        """The owner of its state and the reason; health never overrides an operator."""
        if self.record.node.state == NodeState.NODE_STATE_READY and self.health_problem:
            return HEALTH, self.health_problem.reason
        if self.record.node.state == NodeState.NODE_STATE_READY and self.claim_conflict:
            return HEALTH, self.claim_conflict
        return self.record.node.state_owner, self.record.node.state_reason


@dataclass(slots=True)
class LiveAttempt:
    """An attempt that has not been forgotten. Epoch 0: its start is being committed, and no agent knows of it.

    During a resize it has a `target`, and holds the cores of both allocations.
    """

    record: records_pb2.StoredAttempt
    allocation: tuple[NodeAllocation, ...]
    parts: dict[str, AttemptState] = field(default_factory=dict)
    part_starts: dict[str, Timestamp] = field(default_factory=dict)  # when its processes began, by node, as reported
    holdings: tuple[Holding, ...] = ()
    epoch: int = 0
    end_committed: bool = False  # its end has been committed
    before: LiveAttempt | None = (
        None  # the job's attempt before, which has ended, until the start of this one is committed
    )
    pending_stop: StopReason | None = None  # to be stopped after its start is committed
    target: tuple[NodeAllocation, ...] = ()  # its allocation once all of its nodes have applied a resize
    applied: dict[str, str] = field(default_factory=dict)  # nodes' answers to the resize: "" if applied, else the error
    disconnected: str = ""  # the agent's message on a part that stopped because its node was disconnected
    rolling_back: bool = False  # the resize is the rollback of one that failed
    committing_resize: bool = False  # the resize is being committed: its revision will be the epoch
    gang: Gang | None = None  # cached for policies until its cores or its estimate change
    stay: Occupancy | None = None  # cached for policies: what it holds
    estimate_seconds: float = 0.0  # when its estimate arrived, in unix seconds; 0: before its start
    retry_resize_after_seconds: float = 0.0  # after a failed resize: no other before this time; 0: at any time

    @property
    def attempt(self) -> job_pb2.Attempt:
        """The attempt's message."""
        return self.record.attempt

    @property
    def evidence(self) -> AttemptEvidence:
        """The evidence about its failure."""
        return self.record.evidence

    @property
    def key(self) -> tuple[str, int]:
        """Job id and number."""
        return self.attempt.job_id, self.attempt.number

    @property
    def state(self) -> AttemptState:
        """The attempt's state."""
        return State.from_wire(self.attempt.state)

    @property
    def held(self) -> tuple[NodeAllocation, ...]:
        """Everything that it holds: more than `allocation` during a resize."""
        return merge_allocations(self.allocation, self.target) if self.target else self.allocation

    @property
    def nodes(self) -> list[str]:
        """The ids of its nodes; rank 0's first."""
        return [allocation.node_id for allocation in self.allocation]

    @property
    def reclaimable(self) -> bool:
        """Whether it holds lent resources that may be reclaimed."""
        return any(task.reclaimable for part in self.allocation for task in part.tasks)

    @property
    def ended_everywhere(self) -> bool:
        """Whether every part of it has ended."""
        return all(self.ended_on(node_id) for node_id in self.nodes)

    def ended_on(self, node_id: str) -> bool:
        """Return whether its part on a node has ended."""
        part = self.parts.get(node_id)
        return part is not None and part.ended

    def move(self, event: AttemptEvent) -> None:
        """Apply an event by the lifecycle table."""
        self.attempt.state = State.to_wire(next_state(f"{self.key[0]}/{self.key[1]}", self.state, event))

    def observed(self) -> ObservedAttempt:
        """Return a copy of the attempt and its evidence, as sent to the queue."""
        return ObservedAttempt(attempt=self.attempt, evidence=self.evidence)

    def write(self) -> Write:
        """Return the write that stores the attempt."""
        self.attempt.epoch = 0 if self.committing_resize else self.epoch
        write = Write(ATTEMPTS + self.key[0], self.record.SerializeToString())
        self.attempt.epoch = self.epoch
        return write

    def update_messages(self) -> None:
        """Copy its allocation and target into its messages."""
        del self.attempt.allocations[:], self.record.resizing[:]
        self.attempt.allocations.extend(specs.allocation_to_wire(part) for part in self.allocation)
        self.record.resizing.extend(specs.allocation_to_wire(part) for part in self.target)
        for part, then in zip(self.attempt.allocations, self.record.resizing, strict=False):
            for task, wanted in zip(part.tasks, then.tasks, strict=True):
                task.target_cores = len(wanted.core_ids)


def may_outlive_contact_seconds(live: LiveAttempt, lost_after_seconds: float, heartbeat_seconds: float) -> float:
    """Return for how long after its agent's last message an attempt is not given up.

    An attempt that stops when disconnected is not given up before it must have stopped, so it never runs twice. Others
    may run for longer, and are stopped when their node is back.
    """
    spec = live.record.spec
    if not spec.HasField("stop_after_disconnected"):
        return lost_after_seconds
    grace_seconds = specs.seconds(spec.grace) if spec.HasField("grace") else GRACE_SECONDS_DEFAULT
    stops_seconds = specs.seconds(spec.stop_after_disconnected) + grace_seconds
    stops_seconds += KILL_SECONDS_MAX + HEARTBEATS_MISSED_MAX * heartbeat_seconds
    return max(lost_after_seconds, stops_seconds)


def healthy(inventory: Inventory) -> Inventory:
    """Return an inventory without the unhealthy GPUs."""
    if not any(gpu.unhealthy_reason for gpu in inventory.gpus):
        return inventory
    return replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if not gpu.unhealthy_reason))


def within(inventory: Inventory, allocation: NodeAllocation) -> NodeAllocation:
    """Return an allocation without the cores and GPUs that its node no longer has."""
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
    """Check the amounts of an allocation.

    Raises:
        ValueError: an amount is out of range.
    """
    for task in (task for part in allocation for task in part.tasks):
        for name, amount in amounts_of(task).items():
            if not 0 <= amount <= AMOUNT_MAX:
                raise ValueError(f"{name} is {amount}; it must be from 0 to {AMOUNT_MAX}")
        for share in task.gpus:
            if not 0 < share.milli <= WHOLE_GPU_MILLI:
                raise ValueError(f"a GPU share is {share.milli} milli; it must be from 1 to {WHOLE_GPU_MILLI}")


def used(node: Node, lives: Sequence[LiveAttempt]) -> Resources:
    """Return what attempts hold on a node."""
    return added(part.resources for live in lives for part in live.held if part.node_id == node.id)
