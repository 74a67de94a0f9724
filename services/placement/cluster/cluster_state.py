"""In-memory cluster state of placement: nodes and live attempts, both committed and being committed.

No I/O: methods change the state and return what changed. Callers commit the writes through the committer, and then
inform agents and watchers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.lifecycle import AttemptEvent, AttemptState, StopReason
from cotenant.core.model.node import Inventory, NodeShape, UnhealthyCapacity, shape_of
from cotenant.core.model.tenancy import Headroom
from cotenant.core.model.validation import PARAMETER_SERVER
from cotenant.core.placement.device_assignment import NodeDevices
from cotenant.services.placement.cluster import attempt_reports
from cotenant.services.placement.cluster.live_records import LiveAttempt, Node, healthy, within
from cotenant.services.placement.cluster.rendezvous_ports import RendezvousPorts
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

log = structlog.get_logger()

UNEXPLAINED = (job_pb2.STOP_REASON_UNSPECIFIED, job_pb2.STOP_REASON_GANG_BROKEN, job_pb2.STOP_REASON_DISCONNECTED)
FORGOTTEN_ATTEMPTS_MAX = 20_000


class ForgottenAttempt(NamedTuple):
    """What is remembered of an attempt whose record is deleted."""

    number: int
    state: AttemptState


class Cluster:
    """All nodes and attempts, their ledger, and the effects of events."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.attempts: dict[str, LiveAttempt] = {}
        self._by_node: dict[str, dict[str, LiveAttempt]] = {}
        self._ports = RendezvousPorts()
        self._resized: set[str] = set()  # ids of jobs whose cores were ever resized or are being resized
        self.claimed: dict[str, int] = {}  # cores by node reserved for a waiting job: no attempt may grow into them
        self.limits = Headroom(())  # tenants' limits from the queue's last plan, with no usage counted
        self.changed_nodes: set[str] = set()  # ids of nodes to consider in the next CPU rebalancing
        self.forgotten: dict[str, records_pb2.StoredNode] = {}  # records of removed nodes, newest last
        self.forgotten_attempts: dict[str, ForgottenAttempt] = {}  # the last by job, for late plans that name it
        self._ledger: Ledger | None = None
        self._order: list[Node] = []
        self._stopping: dict[str, LiveAttempt] = {}
        self._open_shapes: tuple[Ledger, bytes, tuple[NodeShape, ...]] | None = None  # cached by ledger and open nodes

    def replace(self, fresh: Cluster) -> None:
        """Replace the whole state by a freshly loaded one."""
        self.nodes, self.attempts, self._by_node = fresh.nodes, fresh.attempts, fresh._by_node
        self._resized, self.claimed, self.changed_nodes = fresh._resized, {}, set(fresh.nodes)
        self._ports = fresh._ports
        self._stopping, self.forgotten = fresh._stopping, fresh.forgotten
        self.invalidate_ledger()

    # Nodes ---------------------------------------------------------------------------------------------------

    def put_node(self, node_id: str, inventory: Inventory, record: records_pb2.StoredNode) -> Node:
        """Register a node or update its inventory."""
        old = self.nodes.get(node_id)
        node = Node(record, inventory, NodeDevices(node_id, healthy(inventory)), number=old.number if old else -1)
        if old:
            node.connected, node.lost, node.superseded = old.connected, old.lost, old.superseded
            node.seen_seconds, node.heard_seconds, node.was_open = old.seen_seconds, old.heard_seconds, old.was_open
            node.certificate, node.claim_conflict, node.hold = old.certificate, old.claim_conflict, old.hold
            node.condition = old.condition
        self.nodes[node_id] = node
        self.invalidate_ledger()
        return node

    def remove_node(self, node: Node) -> None:
        """Remove a node that has no attempts."""
        del self.nodes[node.id]
        self.claimed.pop(node.id, None)
        self.invalidate_ledger()

    def invalidate_ledger(self) -> None:
        """Drop the ledger after nodes came or changed; it is rebuilt on the next use."""
        self._ledger = None

    def refresh_open(self, node: Node) -> bool:
        """Update whether the ledger may place work on a node; return True if that changed."""
        changed, node.was_open = node.open != node.was_open, node.open
        if changed:
            self.changed_nodes.add(node.id)
        if self._ledger is not None:
            self._ledger.open[node.number] = node.open
        return changed

    @property
    def ledger(self) -> Ledger:
        """The ledger of free resources over all nodes, which are numbered in the order of their ids."""
        if self._ledger is None:
            self._ledger = self._rebuild()
        return self._ledger

    def set_time(self, now: float) -> None:
        """Set how long each node of the ledger is still available at `now` (unix time)."""
        ledger = self.ledger  # first, because rebuilding it numbers the nodes
        ends = [node.inventory.available_until for node in self._order]
        some = any(end is not None for end in ends)
        ledger.seconds_left = np.array([np.inf if end is None else end - now for end in ends]) if some else None

    def _rebuild(self) -> Ledger:
        self._order = [self.nodes[node_id] for node_id in sorted(self.nodes)]
        for number, node in enumerate(self._order):
            node.number, node.overcommitted = number, False
            node.book = NodeDevices(node.id, healthy(node.inventory))
        ledger = Ledger(
            [shape_of(node.book.inventory, node.capabilities) for node in self._order],
            [node.inventory.rack for node in self._order],
            [node.id for node in self._order],
        )
        ledger.unhealthy = UnhealthyCapacity(
            gpus=sum(node.shape.gpus - len(node.book.inventory.gpus) for node in self._order),
            nodes=sum(node.health_problem is not None for node in self._order),
            healthy_shapes=tuple(node.shape for node in self._order),
        )
        for live in self.attempts.values():
            if not live.state.ended:
                live.holdings = tuple(self._hold(ledger, live))
        for number, node in enumerate(self._order):
            ledger.open[number] = node.open
        return ledger

    def _hold(self, ledger: Ledger, live: LiveAttempt) -> Iterable[Holding]:
        """Hold an attempt's allocation on each node, as far as the node still has the devices.

        A node that shrank under its attempts may have less than they hold together: it takes no new work until it has
        enough again.
        """
        for allocation in live.held:
            node = self.nodes.get(allocation.node_id)
            if node is None:
                continue
            still = within(node.book.inventory, allocation)
            holding = node.book.holding(node.number, still)
            try:
                if not ledger.can_hold(holding):
                    raise Overcommitted(ledger.describe_node(node.number))
                node.book.hold(still)
            except Overcommitted as error:
                node.overcommitted = True
                log.error("node_overcommitted", node=node.id, job=live.key[0], error=str(error))
                continue
            ledger.hold(holding)
            yield holding

    def node_at(self, number: int) -> Node:
        """Return the node with this number in the ledger."""
        return self._order[number]

    def shapes(self) -> tuple[NodeShape, ...]:
        """Return the shapes of all registered nodes, with counts."""
        return _counted(self.nodes.values())

    def open_shapes(self) -> tuple[NodeShape, ...]:
        """Return the shapes of the open nodes, for sizing; unhealthy GPUs keep their share of the cores."""
        ledger, taking = self.ledger, self.ledger.open.tobytes()
        known = self._open_shapes
        if known is None or known[0] is not ledger or known[1] != taking:
            shapes = _counted(node for node in self.nodes.values() if ledger.open[node.number])
            known = self._open_shapes = ledger, taking, shapes
        return known[2]

    # Attempts ------------------------------------------------------------------------------------------------

    def add(self, live: LiveAttempt) -> None:
        """Add an attempt, whose resources are already held or will be when the ledger is rebuilt."""
        live.before = self.attempts.get(live.key[0])
        self.forget(live.key[0])
        self.attempts[live.key[0]] = live
        if live.state is AttemptState.STOPPING:
            self._stopping[live.key[0]] = live
        if live.target or any(task.own_cores for part in live.allocation for task in part.tasks):
            self._resized.add(live.key[0])
        for node_id in live.nodes:
            self._by_node.setdefault(node_id, {})[live.key[0]] = live
        if live.attempt.master_port:
            self._ports.add(live, [live.attempt.master_address, *self._listening(live.allocation)[1:]])

    def forget(self, job_id: str) -> None:
        """Drop an attempt that no longer holds anything."""
        self._resized.discard(job_id)
        self._stopping.pop(job_id, None)
        self._ports.forget(job_id)
        if live := self.attempts.pop(job_id, None):
            for node_id in live.nodes:
                self._by_node[node_id].pop(job_id, None)

    def remember_forgotten(self, live: LiveAttempt) -> None:
        """Remember an attempt, to recognize a late plan that names it after it is gone."""
        job_id, number = live.key
        self.forgotten_attempts.pop(job_id, None)
        self.forgotten_attempts[job_id] = ForgottenAttempt(number, live.state)
        if len(self.forgotten_attempts) > FORGOTTEN_ATTEMPTS_MAX:
            del self.forgotten_attempts[next(iter(self.forgotten_attempts))]

    def release(self, live: LiveAttempt) -> None:
        """Release everything that an attempt holds."""
        self.changed_nodes.update(live.nodes)
        nodes = [node for node_id in live.nodes if (node := self.nodes.get(node_id))]
        if any(node.overcommitted for node in nodes):
            self.invalidate_ledger()  # the node's book does not know which attempt holds which device
        if self._ledger is not None:
            for holding in live.holdings:
                self._ledger.release(holding)
            for allocation in live.held:
                if node := self.nodes.get(allocation.node_id):
                    node.book.release(allocation)
        live.holdings = ()

    def set_allocation(
        self, live: LiveAttempt, allocation: tuple[NodeAllocation, ...], target: tuple[NodeAllocation, ...] = ()
    ) -> None:
        """Set an attempt's cores; with a `target`, it holds those too until its nodes have applied the resize."""
        self.release(live)
        live.allocation, live.target, live.gang = allocation, target, None
        self._resized.add(live.key[0])
        live.update_messages()
        if self._ledger is not None:
            live.holdings = tuple(self._hold(self._ledger, live))

    def undo(self, live: LiveAttempt) -> None:
        """Release what an uncommitted start held, unless the state has been reloaded since."""
        if self.attempts.get(live.key[0]) is live:
            self.release(live)
            self.forget(live.key[0])
            if live.before:
                self.add(live.before)

    def on_node(self, node_id: str) -> list[LiveAttempt]:
        """Return the attempts on a node that have not ended."""
        return [live for live in self._by_node.get(node_id, {}).values() if not live.state.ended]

    def leaving(self) -> list[Holding]:
        """Return what will be free soon: everything that stopping attempts hold, and lent cores."""
        soon: list[Holding] = []
        for live in self._stopping.values():
            soon += live.holdings
        for job_id in sorted(self._resized.difference(self._stopping)):
            coming = self.returning_cores(self.attempts[job_id])
            soon += [Holding(self.nodes[node_id].number, cores=cores) for node_id, cores in coming.items()]
        return soon

    def returning_cores(self, live: LiveAttempt) -> dict[str, int]:
        """Return the cores by node that a running attempt is releasing, or would release on request."""
        if live.rolling_back or live.retry_resize_after_seconds:
            return {}
        if live.target:
            after = {part.node_id: part.cores for part in live.target}
            back = {part.node_id: part.cores - after[part.node_id] for part in live.held}
        elif self.can_resize(live):
            back = {part.node_id: sum(task.lent for task in part.tasks) for part in live.allocation}
        else:
            return {}
        return {node_id: cores for node_id, cores in back.items() if cores}

    def firm_holdings(self, live: LiveAttempt) -> tuple[Holding, ...]:
        """Return what an attempt holds without the cores that are about to be released."""
        if live.key[0] not in self._resized:
            return live.holdings
        coming = {self.nodes[node_id].number: cores for node_id, cores in self.returning_cores(live).items()}
        firm_holdings: list[Holding] = []
        for holding in live.holdings:
            less = min(holding.cores, coming.get(holding.node, 0))
            coming[holding.node] = coming.get(holding.node, 0) - less
            firm_holdings.append(replace(holding, cores=holding.cores - less))
        return tuple(firm_holdings)

    def can_resize(self, live: LiveAttempt) -> bool:
        """Return whether an attempt can be resized now: it runs, and the agents of all its nodes are there and able.

        A pre-run is never resized, since it ends soon.
        """
        if live.attempt.pre_run or live.state is not AttemptState.RUNNING or live.target or not live.epoch:
            return False
        nodes = [self.nodes.get(node_id) for node_id in live.nodes]
        there = all(node and node.connected and node.resizes_cores and not node.overcommitted for node in nodes)
        return there and not any(live.ended_on(node_id) for node_id in live.nodes)

    def headroom(self, limits: Headroom) -> Headroom:
        """Return the headroom under tenants' limits after their own holdings; a resize counts with its larger side."""
        room = limits.copy()
        for live in self.attempts.values() if room else ():
            spec = live.record.spec
            if spec.tenant in room.bound and not live.state.ended:
                milli = sum(role.replicas * role.resources.gpu_milli for role in spec.roles)
                cores = max(sum(part.own_cores for part in parts) for parts in (live.allocation, live.target))
                room.take(spec.tenant, milli, cores)
        return room

    def address_of(self, node_id: str) -> str:
        """Return the address at which other nodes reach a node's processes."""
        node = self.nodes.get(node_id)
        return (node.inventory.address if node else "") or node_id

    def rendezvous(self, allocation: Sequence[NodeAllocation]) -> tuple[str, int]:
        """Return the address of a new gang's rank 0, and a port that no running attempt uses there."""
        hosts = self._listening(allocation)
        return hosts[0], self._ports.first_free(hosts)

    def _listening(self, allocation: Sequence[NodeAllocation]) -> list[str]:
        """Return the addresses of replicas that listen, by rank: all of a gang with parameter servers, or rank 0."""
        tasks = sorted((task.rank, task.role, part.node_id) for part in allocation for task in part.tasks)
        if all(role != PARAMETER_SERVER for _, role, _ in tasks):
            return [self.address_of(allocation[0].node_id)]
        return [self.address_of(node_id) for _, _, node_id in tasks]

    def stop(self, live: LiveAttempt, reason: StopReason) -> bool:
        """Move an attempt to stopping; return False if it has ended or is stopping already."""
        if not self.can_stop(live):
            return False
        live.move(AttemptEvent.STOP_ORDERED)
        if self.attempts.get(live.key[0]) is live:
            self._stopping[live.key[0]] = live
        live.attempt.stop_reason = specs.STOP_REASONS.to_wire(reason)
        return True

    @staticmethod
    def can_stop(live: LiveAttempt) -> bool:
        """Return whether an attempt has neither ended nor been ordered to stop."""
        return not live.state.ended and live.state is not AttemptState.STOPPING

    def report(self, live: LiveAttempt, node_id: str, report: agent_pb2.AttemptReport) -> bool:
        """Apply an agent's report on its part of an attempt; return False if it changes nothing."""
        state = attempt_reports.state_of(live, node_id, report)
        if live.state.ended or live.ended_on(node_id) or live.parts.get(node_id) is state:
            return False
        live.parts[node_id] = state
        attempt_reports.note_start(live, node_id, report, ended=state.ended)
        if state is AttemptState.RUNNING:
            return self._launched(live, report)
        if not state.ended:
            return False
        attempt_reports.record_end(live, node_id, state, report)
        return self._part_ended(live, node_id, report)

    def _launched(self, live: LiveAttempt, report: agent_pb2.AttemptReport) -> bool:
        if live.state is not AttemptState.ASSIGNED:
            return False
        if any(live.parts.get(node) is not AttemptState.RUNNING for node in live.nodes):
            return False
        live.move(AttemptEvent.LAUNCHED)
        self.changed_nodes.update(live.nodes)
        live.attempt.start_time.CopyFrom(report.time)
        return True

    def give_up(self, live: LiveAttempt, node_id: str, state: AttemptState, why: str, now: float) -> bool:
        """End a part of an attempt without a report from its agent; the other parts have to stop."""
        if live.state.ended or live.ended_on(node_id):
            return False
        live.parts[node_id] = state
        live.attempt.message = live.attempt.message or why
        report = agent_pb2.AttemptReport()
        report.time.FromNanoseconds(int(now * 1e9))
        return self._part_ended(live, node_id, report)

    def _part_ended(self, live: LiveAttempt, node_id: str, report: agent_pb2.AttemptReport) -> bool:
        if live.ended_everywhere:
            self._ended(live, report)
            return True
        if live.parts[node_id] is AttemptState.SUCCEEDED:
            return False
        if live.disconnected:
            return self.stop(live, StopReason.DISCONNECTED)
        ordered = live.attempt.stop_reason  # by a leader that could not record it
        return self.stop(live, specs.STOP_REASONS.from_wire(ordered) if ordered else StopReason.GANG_BROKEN)

    def _ended(self, live: LiveAttempt, report: agent_pb2.AttemptReport) -> None:
        """End an attempt after all its parts have ended.

        A part that was lost, disconnected, not launched or at its time limit explains why other parts failed, not the
        reverse.
        """
        ends = set(live.parts.values())
        if AttemptState.LOST in ends:
            event = AttemptEvent.LOST
        elif live.disconnected or live.attempt.stop_reason == job_pb2.STOP_REASON_TIME_LIMIT:
            event = AttemptEvent.STOPPED
        elif AttemptState.NOT_LAUNCHED in ends:
            event = AttemptEvent.NOT_LAUNCHED
        elif AttemptState.FAILED in ends:
            event = AttemptEvent.FAILED
        elif ends == {AttemptState.SUCCEEDED}:
            event = AttemptEvent.SUCCEEDED
        else:
            event = AttemptEvent.STOPPED
        live.move(event)
        if self._stopping.get(live.key[0]) is live:
            del self._stopping[live.key[0]]
        if event in (AttemptEvent.SUCCEEDED, AttemptEvent.STOPPED):
            live.attempt.exit.CopyFrom(report.exit)
        live.attempt.end_time.CopyFrom(report.time)
        if live.state is AttemptState.STOPPED and live.attempt.stop_reason in UNEXPLAINED:
            reason = StopReason.DISCONNECTED if live.disconnected else StopReason.GANG_BROKEN
            live.attempt.stop_reason = specs.STOP_REASONS.to_wire(reason)
            live.attempt.stop_detail = live.disconnected
        self.release(live)
        if live.target:
            live.target = ()
            live.update_messages()

    def victims(self, wanted: Sequence[tuple[str, int]]) -> list[LiveAttempt]:
        """Return the named attempts that are still assigned or running."""
        found = ((self.attempts.get(job_id), number) for job_id, number in wanted)
        active = AttemptState.ASSIGNED, AttemptState.RUNNING
        return [live for live, number in found if live and live.key[1] == number and live.state in active]


def _counted(nodes: Iterable[Node]) -> tuple[NodeShape, ...]:
    counts = Counter(node.shape for node in nodes)
    return tuple(replace(shape, count=count) for shape, count in counts.items())
