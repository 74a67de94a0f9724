"""Agents come, report and go: what follows for nodes and attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

import structlog

from cotenant.core.lifecycle import AttemptState, StopReason
from cotenant.rpc import errors, translate
from cotenant.services.placement import agents
from cotenant.services.placement.cluster import (
    NODES,
    SCHEMA_VERSION,
    Cluster,
    Live,
    Node,
    NodeState,
    used,
)
from cotenant.services.placement.committer import Committer, Fenced, Write
from cotenant.services.placement.feed import Feed
from cotenant.store.port import StoreUnavailable
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import records_pb2

log = structlog.get_logger()


class Registry:
    """The living side of placement: sessions, reports, drains and losses."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agents.Sessions,
        feed: Feed,
        *,
        heartbeat_seconds: float,
        lost_after_seconds: float,
        distrust: Callable[[], None],
    ) -> None:
        self.cluster, self.committer, self.sessions, self.feed = cluster, committer, sessions, feed
        self.heartbeat_seconds, self.lost_after_seconds = heartbeat_seconds, lost_after_seconds
        self.term = 0
        self._distrust = distrust  # called when what we believe may differ from what the store holds

    # Streams -------------------------------------------------------------------------------------------------

    async def connect(
        self, requests: AsyncIterator[node_pb2.ConnectRequest]
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        """Serve one agent's stream from its hello to its end."""
        first = await anext(aiter(requests), None)
        if first is None or not first.hello.node_id:
            raise errors.failed_precondition("HELLO_FIRST", "an agent's stream begins with its hello")
        session = await self._admit(first.hello)
        reader = asyncio.create_task(self._read(session, requests), name=f"agent-{session.node_id}")
        try:
            async for message in session.messages():
                yield message
        finally:
            reader.cancel()
            self._gone(session)

    async def _admit(self, hello: node_pb2.Hello) -> agents.Session:
        old = self.sessions.get(hello.node_id)
        node = self.cluster.nodes.get(hello.node_id)
        if old and node and old.incarnation != hello.incarnation:
            silent = time.monotonic() - node.seen_seconds
            if silent < 2 * self.heartbeat_seconds:
                raise errors.already_exists("node", hello.node_id)
            old.close()
        node = await self._register(hello, node)
        session = agents.Session(hello.node_id, hello.incarnation)
        session.put(self._welcome())
        self._reconcile(node, session, hello)
        self.sessions.open(session)
        node.connected, node.lost, node.seen_seconds = True, False, time.monotonic()
        self.cluster.reopen(node)
        self.feed.publish_capacity()
        log.info("node_connected", node=node.id, gpus=len(node.inventory.gpus), cores=len(node.inventory.cores))
        return session

    def _welcome(self) -> node_pb2.ConnectResponse:
        message = node_pb2.ConnectResponse()
        message.welcome.term = self.term
        message.welcome.heartbeat_interval.FromNanoseconds(int(self.heartbeat_seconds * 1e9))
        message.welcome.lost_after.FromNanoseconds(int(self.lost_after_seconds * 1e9))
        return message

    async def _register(self, hello: node_pb2.Hello, node: Node | None) -> Node:
        inventory = translate.inventory_from_wire(hello.inventory)
        if node and node.inventory == inventory:
            return node
        record = records_pb2.StoredNode(schema_version=SCHEMA_VERSION)
        if node:
            record.CopyFrom(node.record)
            log.info("node_changed", node=node.id)
        else:
            record.node.id = hello.node_id
            record.node.state = NodeState.NODE_STATE_READY
            record.node.create_time.GetCurrentTime()
        record.node.inventory.CopyFrom(hello.inventory)
        await self.commit([Write(NODES + hello.node_id, record.SerializeToString())])
        return self.cluster.put_node(hello.node_id, inventory, record)

    def _reconcile(self, node: Node, session: agents.Session, hello: node_pb2.Hello) -> None:
        """Compare what the agent knows with what we believe; tell it what to start, to stop and to forget."""
        told = {(report.job_id, report.number): report for report in hello.attempts}
        node.superseded.clear()
        for report in hello.attempts:
            self._take_report(node, session, report)
        for live in self.cluster.on_node(node.id):
            if live.key in told:
                if live.state is AttemptState.STOPPING:
                    session.put(agents.stop_order(live))
            elif live.state is AttemptState.ASSIGNED:
                session.put(agents.assignment(live, live.nodes.index(node.id)))
            else:
                self._lose(live, f"{node.id} has forgotten it, as after a reboot", except_node=node.id)

    def _gone(self, session: agents.Session) -> None:
        node = self.cluster.nodes.get(session.node_id)
        if self.sessions.close(session) and node:
            node.connected, node.seen_seconds = False, time.monotonic()
            self.cluster.reopen(node)
            self.feed.publish_capacity()
            log.warning("node_away", node=session.node_id)

    async def _read(self, session: agents.Session, requests: AsyncIterator[node_pb2.ConnectRequest]) -> None:
        try:
            async for request in requests:
                node = self.cluster.nodes[session.node_id]
                node.seen_seconds = time.monotonic()
                for report in request.reports:
                    self._take_report(node, session, report)
                for progress in request.progress:
                    self.feed.publish_progress(progress.job_id, progress.progress)
                if request.HasField("inventory"):
                    hello = node_pb2.Hello(node_id=node.id, inventory=request.inventory)
                    await self._register(hello, node)
                    self.feed.publish_capacity()
        finally:
            session.close()

    # Reports -------------------------------------------------------------------------------------------------

    def _take_report(self, node: Node, session: agents.Session, report: node_pb2.AttemptReport) -> None:
        live = self.cluster.attempts.get(report.job_id)
        ended = translate.ATTEMPT_STATES.from_wire(report.state).ended
        key = (report.job_id, report.number)
        if live is None or live.key != key or node.id not in live.nodes:
            if ended:
                session.put(agents.ack(*key))
                node.superseded.discard(key)
            else:
                node.superseded.add(key)
                session.put(agents.supersede(report))
            self.cluster.reopen(node)
        elif live.state.ended:
            session.put(agents.ack(*key) if ended else agents.supersede(report))
        elif self.cluster.report(live, node.id, report):
            if live.state is AttemptState.STOPPING and not ended_everywhere(live):
                self.sessions.stop(live, [other for other in live.nodes if other != node.id])
            self.keep([live])

    def keep(self, lives: Iterable[Live]) -> None:
        """Commit changed attempts in the background, in order; then tell the queue, and agents of ends."""
        lives = list(lives)
        task = asyncio.ensure_future(self._keep(lives, [live.write() for live in lives]))
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)

    async def _keep(self, lives: list[Live], writes: list[Write]) -> None:
        copies = [type(live.attempt).FromString(live.attempt.SerializeToString()) for live in lives]
        try:
            revision = await self.commit(writes)
        except (Fenced, StoreUnavailable):
            return  # told already; agents report again when they reconnect
        self.feed.publish(revision, copies)
        for live in lives:
            if live.state.ended:
                self.sessions.ack(live)

    async def commit(self, writes: list[Write]) -> int:
        """Commit through the committer; when that fails nothing in memory can be trusted any more."""
        try:
            return await self.committer.commit(writes)
        except (Fenced, StoreUnavailable) as error:
            log.error("commit_failed", error=str(error))
            self._distrust()
            raise

    # Stops, drains, losses -----------------------------------------------------------------------------------

    def order_stops(self, lives: Iterable[Live], reason: StopReason) -> None:
        """Stop attempts with their grace: commit the order, and tell the agents."""
        stopped = [live for live in lives if self.cluster.stop(live, reason)]
        if stopped:
            self.keep(stopped)
            for live in stopped:
                self.sessions.stop(live, live.nodes)

    def _lose(self, live: Live, why: str, except_node: str = "") -> None:
        others = [node_id for node_id in live.nodes if node_id != except_node]
        self.cluster.lose(live, why, time.time())
        log.warning("attempt_lost", job=live.key[0], attempt=live.key[1], why=why)
        self.sessions.stop(live, others)
        self.keep([live])

    def give_up_silent_nodes(self) -> None:
        """Take nodes whose agents have been away for too long as lost, and their attempts with them."""
        now = time.monotonic()
        for node in self.cluster.nodes.values():
            away = now - node.seen_seconds
            if node.connected and away > max(3 * self.heartbeat_seconds, self.lost_after_seconds):
                if session := self.sessions.get(node.id):
                    session.close()
            elif not node.connected and not node.lost and away > self.lost_after_seconds:
                node.lost = True
                self.feed.publish_capacity()
                for live in self.cluster.on_node(node.id):
                    self._lose(live, f"{node.id} has been away for {away:.0f} s")

    async def mark(self, node: Node, state: NodeState.ValueType, reason: str, owner: str) -> None:
        """Cordon, drain or uncordon a node, durably."""
        record = records_pb2.StoredNode()
        record.CopyFrom(node.record)
        record.node.state, record.node.state_reason, record.node.state_owner = state, reason, owner
        await self.commit([Write(NODES + node.id, record.SerializeToString())])
        node.record = record
        self.cluster.reopen(node)
        self.feed.publish_capacity()
        if state == NodeState.NODE_STATE_DRAINING:
            self.order_stops(self.cluster.on_node(node.id), StopReason.DRAINED)

    def describe(self, node: Node) -> node_pb2.Node:
        """A node as callers see it."""
        message = node_pb2.Node()
        message.CopyFrom(node.record.node)
        lives = self.cluster.on_node(node.id)
        message.state = node.state
        message.used_gpu_milli, message.used_cores, message.used_memory_bytes = used(node, lives)
        message.attempts.extend(f"{job_id}/{number}" for job_id, number in sorted(live.key for live in lives))
        seen = time.time() - (0.0 if node.connected else time.monotonic() - node.seen_seconds)
        message.seen_time.FromNanoseconds(int(seen * 1e9))
        return message


_TASKS: set[asyncio.Future[None]] = set()


def ended_everywhere(live: Live) -> bool:
    """Whether every part of an attempt has ended."""
    return all(node in live.parts and live.parts[node].ended for node in live.nodes)
