"""Nodes and live attempts as placement knows them: what was committed, and what is being committed.

No IO: methods change the picture and say what is to be written and to whom something is to be told. Whoever calls them
commits the writes through the committer, then tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from cotenant.codec import specs
from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.lifecycle import AttemptEvent, AttemptState, StopReason
from cotenant.core.model.node import Illness, Inventory, NodeShape, shape_of
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.device_assignment import Book
from cotenant.services.placement.cluster import attempt_reports
from cotenant.services.placement.cluster.live_records import Live, Node, healthy, within
from cotenant.v1 import job_pb2, node_service_pb2, records_pb2

log = structlog.get_logger()

MASTER_PORTS = range(29500, 30000)
UNEXPLAINED = (job_pb2.STOP_REASON_UNSPECIFIED, job_pb2.STOP_REASON_GANG_BROKEN, job_pb2.STOP_REASON_DISCONNECTED)
PAST_MAX = 20_000


class Cluster:
    """All nodes and attempts, the ledger over them, and what follows from events."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.attempts: dict[str, Live] = {}
        self._by_node: dict[str, dict[str, Live]] = {}
        self._resized: set[str] = set()  # ids of those whose cores were ever changed, or are being changed
        self.claimed: dict[str, int] = {}  # cores by node that a waiting job was promised: nobody grows there
        self.limits = Headroom(())  # tenants' limits as the queue last told them, with nothing counted
        self.stirred: set[str] = set()  # nodes on which somebody came, went or changed since cores were last dealt
        self.forgotten: dict[str, records_pb2.StoredNode] = {}  # what is left of nodes, the last ones last
        self.past: dict[str, int] = {}  # the last attempts that were forgotten: a plan may come later that names one
        self._ledger: Ledger | None = None
        self._order: list[Node] = []
        self._stopping: dict[str, Live] = {}
        self._open_shapes: tuple[Ledger, bytes, tuple[NodeShape, ...]] | None = None  # as of what was open then

    def replace(self, fresh: Cluster) -> None:
        """Believe another picture from now on."""
        self.nodes, self.attempts, self._by_node = fresh.nodes, fresh.attempts, fresh._by_node
        self._resized, self.claimed, self.stirred = fresh._resized, {}, set(fresh.nodes)
        self._stopping, self.forgotten = fresh._stopping, fresh.forgotten
        self.touch()

    # Nodes ---------------------------------------------------------------------------------------------------

    def put_node(self, node_id: str, inventory: Inventory, record: records_pb2.StoredNode) -> Node:
        """Register a node, or take in that it is made of something else now."""
        old = self.nodes.get(node_id)
        node = Node(record, inventory, Book(node_id, healthy(inventory)), number=old.number if old else -1)
        if old:
            node.connected, node.lost, node.superseded = old.connected, old.lost, old.superseded
            node.seen_seconds, node.heard_seconds, node.was_open = old.seen_seconds, old.heard_seconds, old.was_open
            node.certificate, node.rivalry, node.hold = old.certificate, old.rivalry, old.hold
            node.condition = old.condition
        self.nodes[node_id] = node
        self.touch()
        return node

    def remove_node(self, node: Node) -> None:
        """Forget a node on which no attempt is left."""
        del self.nodes[node.id]
        self.claimed.pop(node.id, None)
        self.touch()

    def touch(self) -> None:
        """Note that nodes came or changed: the ledger is made anew when it is next asked for."""
        self._ledger = None

    def reopen(self, node: Node) -> bool:
        """Let the ledger know whether a node takes work now; True where that has changed."""
        changed, node.was_open = node.open != node.was_open, node.open
        if changed:
            self.stirred.add(node.id)
        if self._ledger is not None:
            self._ledger.open[node.number] = node.open
        return changed

    @property
    def ledger(self) -> Ledger:
        """What is free, counted over all nodes; nodes are numbered by id."""
        if self._ledger is None:
            self._ledger = self._rebuild()
        return self._ledger

    def _rebuild(self) -> Ledger:
        self._order = [self.nodes[node_id] for node_id in sorted(self.nodes)]
        for number, node in enumerate(self._order):
            node.number, node.strained = number, False
            node.book = Book(node.id, healthy(node.inventory))
        ledger = Ledger(
            [shape_of(node.book.inventory) for node in self._order],
            [node.inventory.rack for node in self._order],
            [node.id for node in self._order],
        )
        ledger.illness = Illness(
            gpus=sum(node.shape.gpus - len(node.book.inventory.gpus) for node in self._order),
            nodes=sum(node.ailment is not None for node in self._order),
            shapes_when_well=tuple(node.shape for node in self._order),
        )
        for live in self.attempts.values():
            if not live.state.ended:
                live.holdings = tuple(self._hold(ledger, live))
        for number, node in enumerate(self._order):
            ledger.open[number] = node.open
        return ledger

    def _hold(self, ledger: Ledger, live: Live) -> Iterable[Holding]:
        """Hold what an attempt has on each node, as far as the node still has it.

        A node that changed under its attempts may have less than they hold together: it takes no new work until it
        has enough again.
        """
        for allocation in live.held:
            node = self.nodes.get(allocation.node_id)
            if node is None:
                continue
            still = within(node.book.inventory, allocation)
            holding = node.book.holding(node.number, still)
            try:
                if not ledger.can_hold(holding):
                    raise Overcommitted(ledger.story(node.number))
                node.book.hold(still)
            except Overcommitted as error:
                node.strained = True
                log.error("node_overcommitted", node=node.id, job=live.key[0], error=str(error))
                continue
            ledger.hold(holding)
            yield holding

    def node_at(self, number: int) -> Node:
        """The node that has this number in the ledger."""
        return self._order[number]

    def shapes(self) -> tuple[NodeShape, ...]:
        """The shapes of all registered nodes, with their counts."""
        return _counted(self.nodes.values())

    def open_shapes(self) -> tuple[NodeShape, ...]:
        """The shapes of the nodes that take work, for sizing; a GPU that is ill keeps its share of the cores."""
        ledger, taking = self.ledger, self.ledger.open.tobytes()
        known = self._open_shapes
        if known is None or known[0] is not ledger or known[1] != taking:
            shapes = _counted(node for node in self.nodes.values() if ledger.open[node.number])
            known = self._open_shapes = ledger, taking, shapes
        return known[2]

    # Attempts ------------------------------------------------------------------------------------------------

    def add(self, live: Live) -> None:
        """Note an attempt; what it holds is held already, or will be when the ledger is made anew."""
        live.before = self.attempts.get(live.key[0])
        self.forget(live.key[0])
        self.attempts[live.key[0]] = live
        if live.state is AttemptState.STOPPING:
            self._stopping[live.key[0]] = live
        if live.target or any(task.own_cores for part in live.allocation for task in part.tasks):
            self._resized.add(live.key[0])
        for node_id in live.nodes:
            self._by_node.setdefault(node_id, {})[live.key[0]] = live

    def forget(self, job_id: str) -> None:
        """Drop an attempt that holds nothing any more."""
        self._resized.discard(job_id)
        self._stopping.pop(job_id, None)
        if live := self.attempts.pop(job_id, None):
            for node_id in live.nodes:
                self._by_node[node_id].pop(job_id, None)

    def remember(self, live: Live) -> None:
        """Know that a plan comes late that names an attempt, once that is gone."""
        job_id, number = live.key
        self.past.pop(job_id, None)
        self.past[job_id] = number
        if len(self.past) > PAST_MAX:
            del self.past[next(iter(self.past))]

    def release(self, live: Live) -> None:
        """Give back what an attempt held."""
        self.stirred.update(live.nodes)
        nodes = [node for node_id in live.nodes if (node := self.nodes.get(node_id))]
        if any(node.strained for node in nodes):
            self.touch()  # which of its attempts held what is not known in names
        if self._ledger is not None:
            for holding in live.holdings:
                self._ledger.release(holding)
            for allocation in live.held:
                if node := self.nodes.get(allocation.node_id):
                    node.book.release(allocation)
        live.holdings = ()

    def reshape(
        self, live: Live, allocation: tuple[NodeAllocation, ...], target: tuple[NodeAllocation, ...] = ()
    ) -> None:
        """Let an attempt hold other cores: with a `target`, those too until its nodes have changed them."""
        self.release(live)
        live.allocation, live.target, live.gang = allocation, target, None
        self._resized.add(live.key[0])
        live.write_down()
        if self._ledger is not None:
            live.holdings = tuple(self._hold(self._ledger, live))

    def undo(self, live: Live) -> None:
        """Give back what a start held that was not committed, unless the picture has been read anew since."""
        if self.attempts.get(live.key[0]) is live:
            self.release(live)
            self.forget(live.key[0])
            if live.before:
                self.add(live.before)

    def on_node(self, node_id: str) -> list[Live]:
        """Attempts that are on a node and have not ended."""
        return [live for live in self._by_node.get(node_id, {}).values() if not live.state.ended]

    def leaving(self) -> list[Holding]:
        """What will be free soon: all that stopping attempts hold, and cores that others give back when asked."""
        soon: list[Holding] = []
        for live in self._stopping.values():
            soon += live.holdings
        for job_id in sorted(self._resized.difference(self._stopping)):
            coming = self.coming_back(self.attempts[job_id])
            soon += [Holding(self.nodes[node_id].number, cores=cores) for node_id, cores in coming.items()]
        return soon

    def coming_back(self, live: Live) -> dict[str, int]:
        """Cores by node that a running attempt is giving back, or would as soon as it is asked."""
        if live.turned_back or live.resize_after_seconds:
            return {}
        if live.target:
            after = {part.node_id: part.cores for part in live.target}
            back = {part.node_id: part.cores - after[part.node_id] for part in live.held}
        elif self.can_resize(live):
            back = {part.node_id: sum(task.lent for task in part.tasks) for part in live.allocation}
        else:
            return {}
        return {node_id: cores for node_id, cores in back.items() if cores}

    def firm(self, live: Live) -> tuple[Holding, ...]:
        """What an attempt holds beside the cores that are coming back."""
        if live.key[0] not in self._resized:
            return live.holdings
        coming = {self.nodes[node_id].number: cores for node_id, cores in self.coming_back(live).items()}
        firm: list[Holding] = []
        for holding in live.holdings:
            less = min(holding.cores, coming.get(holding.node, 0))
            coming[holding.node] = coming.get(holding.node, 0) - less
            firm.append(replace(holding, cores=holding.cores - less))
        return tuple(firm)

    def can_resize(self, live: Live) -> bool:
        """Whether an attempt's cores may be changed now: it runs, and the agents of all its nodes are there.

        Those of a pre-run, which is over soon, stay as they are.
        """
        if live.attempt.pre_run or live.state is not AttemptState.RUNNING or live.target or not live.epoch:
            return False
        nodes = [self.nodes.get(node_id) for node_id in live.nodes]
        there = all(node and node.connected and not node.strained for node in nodes)
        return there and not any(live.ended_on(node_id) for node_id in live.nodes)

    def headroom(self, limits: Headroom) -> Headroom:
        """Count what tenants with limits hold for good: of cores that change, as many as before or after."""
        room = limits.copy()
        for live in self.attempts.values() if room else ():
            spec = live.record.spec
            if spec.tenant in room.bound and not live.state.ended:
                milli = sum(role.replicas * role.resources.gpu_milli for role in spec.roles)
                cores = max(sum(part.own_cores for part in parts) for parts in (live.allocation, live.target))
                room.take(spec.tenant, milli, cores)
        return room

    def master_port(self, node_id: str) -> int:
        """The first port of the range that no live attempt's rank 0 has on a node."""
        taken = {live.attempt.master_port for live in self.on_node(node_id) if live.nodes[0] == node_id}
        return next((port for port in MASTER_PORTS if port not in taken), MASTER_PORTS[0])

    def stop(self, live: Live, reason: StopReason) -> bool:
        """Order an attempt to stop; False where it has ended, or stops already."""
        if not self.can_stop(live):
            return False
        live.move(AttemptEvent.STOP_ORDERED)
        if self.attempts.get(live.key[0]) is live:
            self._stopping[live.key[0]] = live
        live.attempt.stop_reason = specs.STOP_REASONS.to_wire(reason)
        return True

    @staticmethod
    def can_stop(live: Live) -> bool:
        """Whether an attempt has neither ended nor been told to stop."""
        return not live.state.ended and live.state is not AttemptState.STOPPING

    def report(self, live: Live, node_id: str, told: node_service_pb2.AttemptReport) -> bool:
        """Take in what an agent says of its part of an attempt; False where that changes nothing."""
        state = attempt_reports.state_of(live, node_id, told)
        if live.state.ended or live.ended_on(node_id) or live.parts.get(node_id) is state:
            return False
        live.parts[node_id] = state
        if state is AttemptState.RUNNING:
            return self._launched(live, told)
        if not state.ended:
            return False
        attempt_reports.keep(live, node_id, state, told)
        return self._part_ended(live, node_id, told)

    def _launched(self, live: Live, told: node_service_pb2.AttemptReport) -> bool:
        if live.state is not AttemptState.ASSIGNED:
            return False
        if any(live.parts.get(node) is not AttemptState.RUNNING for node in live.nodes):
            return False
        live.move(AttemptEvent.LAUNCHED)
        self.stirred.update(live.nodes)
        live.attempt.start_time.CopyFrom(told.time)
        return True

    def give_up(self, live: Live, node_id: str, state: AttemptState, why: str, now: float) -> bool:
        """Take a part of an attempt as ended, though its agent does not say so; the other parts have to stop."""
        if live.state.ended or live.ended_on(node_id):
            return False
        live.parts[node_id] = state
        live.attempt.message = live.attempt.message or why
        told = node_service_pb2.AttemptReport()
        told.time.FromNanoseconds(int(now * 1e9))
        return self._part_ended(live, node_id, told)

    def _part_ended(self, live: Live, node_id: str, told: node_service_pb2.AttemptReport) -> bool:
        if live.ended_everywhere:
            self._ended(live, told)
            return True
        if live.parts[node_id] is not AttemptState.SUCCEEDED:
            return self.stop(live, StopReason.DISCONNECTED if live.disconnected else StopReason.GANG_BROKEN)
        return False

    def _ended(self, live: Live, told: node_service_pb2.AttemptReport) -> None:
        """End an attempt of which all parts have ended.

        A part that was lost, stopped without us or not launched explains why others failed, not the reverse.
        """
        ends = set(live.parts.values())
        if AttemptState.LOST in ends:
            event = AttemptEvent.LOST
        elif live.disconnected:
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
            live.attempt.exit.CopyFrom(told.exit)
        live.attempt.end_time.CopyFrom(told.time)
        if live.state is AttemptState.STOPPED and live.attempt.stop_reason in UNEXPLAINED:
            reason = StopReason.DISCONNECTED if live.disconnected else StopReason.GANG_BROKEN
            live.attempt.stop_reason = specs.STOP_REASONS.to_wire(reason)
            live.attempt.stop_detail = live.disconnected
        self.release(live)
        if live.target:
            live.target = ()
            live.write_down()

    def victims(self, wanted: Sequence[tuple[str, int]]) -> list[Live]:
        """Find the attempts that are named and still hold something."""
        found = ((self.attempts.get(job_id), number) for job_id, number in wanted)
        active = AttemptState.ASSIGNED, AttemptState.RUNNING
        return [live for live, number in found if live and live.key[1] == number and live.state in active]


def _counted(nodes: Iterable[Node]) -> tuple[NodeShape, ...]:
    counts = Counter(node.shape for node in nodes)
    return tuple(replace(shape, count=count) for shape, count in counts.items())
