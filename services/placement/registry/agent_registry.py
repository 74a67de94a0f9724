"""Registry of agents: connects and disconnects them, applies their reports, and expires silent nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors, node_capabilities, specs
from cotenant.codec.errors import Problem
from cotenant.core.failures.launch_health import HoldRules
from cotenant.core.model.lifecycle import AttemptState, StopReason
from cotenant.leadership.leadership_term import LeadershipTerm
from cotenant.rpc.store_marks import mark_from_wire, mark_to_wire
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.identity import check_node
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import AttemptStore
from cotenant.services.placement.attempts.attempt_tracking import AttemptTracker
from cotenant.services.placement.attempts.cpu_hotplug import CpuHotplug
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster import attempt_reports
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Write
from cotenant.services.placement.cluster.live_records import (
    HEARTBEATS_MISSED_MAX,
    NODES,
    REQUEST_IDS_MAX,
    SCHEMA_VERSION,
    Node,
    NodeState,
    Owner,
    may_outlive_contact_seconds,
)
from cotenant.services.placement.registry.liveness import LivenessClock
from cotenant.services.placement.registry.node_claims import NodeClaims
from cotenant.services.placement.registry.node_description import describe
from cotenant.services.placement.registry.node_removal import NodeRemoval
from cotenant.services.placement.registry.suspects import SuspectNodes
from cotenant.storage.v1 import records_pb2
from cotenant.store.identity_check import Trust
from cotenant.store.port import StoreUnavailable
from cotenant.v1 import node_capabilities_pb2, resources_pb2
from cotenant.v1 import node_service_pb2 as node_pb2

log = structlog.get_logger()

REASON_LENGTH_MAX = 200  # of an agent's goodbye


class AgentRegistry:
    """Handles agents' sessions and reports, drains, and lost nodes."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        attempts: AttemptStore,
        resizes: Resizes,
        tracker: AttemptTracker,
        cpu_hotplug: CpuHotplug,
        liveness_clock: LivenessClock,
        leadership_term: LeadershipTerm,
        background: BackgroundTasks,
        *,
        holding: HoldRules,
        heartbeat_seconds: float,
        lost_after_seconds: float,
        on_disconnect: Callable[[str], None],
        trust: Trust | None = None,
    ) -> None:
        """`trust` judges the store's identity, for stores that may be restored to an older state."""
        self.cluster, self.committer, self.sessions, self.attempts = cluster, committer, sessions, attempts
        self.resizes, self.tracker, self.cpu_hotplug, self.liveness_clock = (
            resizes,
            tracker,
            cpu_hotplug,
            liveness_clock,
        )
        self.heartbeat_seconds, self.lost_after_seconds = heartbeat_seconds, lost_after_seconds
        self._leadership_term, self._trust = leadership_term, trust
        self._on_gone, self._background = on_disconnect, background
        self._locks: dict[str, asyncio.Lock] = {}  # by node: serializes changes of its record
        self.claims = NodeClaims(cluster)
        self.suspects = SuspectNodes(cluster, committer, attempts.events, background, self._lock, holding)
        self.node_removal = NodeRemoval(cluster, committer, attempts, self._lock, self._give_up)

    # Streams -------------------------------------------------------------------------------------------------

    async def connect(
        self, requests: AsyncIterator[agent_pb2.ConnectRequest]
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        """Serve one agent's stream, from its hello to its end."""
        first = await anext(aiter(requests), None)
        if first is None or not first.hello.node_id:
            raise errors.failed_precondition("HELLO_FIRST", "the first message of an agent's stream must be its hello")
        check_node(first.hello.node_id)
        agent_sessions.check_message(first)
        session = await self._admit(first.hello)
        reader = asyncio.create_task(self._read(session, first, requests), name=f"agent-{session.node_id}")
        try:
            async for message in session.messages():
                yield message
        finally:
            reader.cancel()
            self._disconnected(session)

    async def _admit(self, hello: agent_pb2.Hello) -> agent_sessions.Session:
        self._check_incarnation(hello)
        await self._check_store(hello)
        declared = hello.capabilities if hello.HasField("capabilities") else None
        node = await self._register(hello.node_id, hello.inventory, declared)
        self._check_incarnation(hello)  # another agent may have connected while the record was written
        session = agent_sessions.Session(hello.node_id, hello.incarnation, self._mark, node.capabilities)
        session.put(self._welcome())
        self._reconcile(node, session, hello)
        self.sessions.open(session)
        node.connected, node.lost = True, False
        self._record_contact(node)
        self.claims.connected(node)
        self.cluster.refresh_open(node)
        self.attempts.events.publish_capacity()
        if node.record.node.state == NodeState.NODE_STATE_DRAINING:
            self.attempts.order_stops(self.cluster.on_node(node.id), StopReason.DRAINED)
        self.cpu_hotplug.fit(node.id)
        log.info("node_connected", node=node.id, gpus=len(node.inventory.gpus), cores=len(node.inventory.cores))
        return session

    def _check_incarnation(self, hello: agent_pb2.Hello) -> None:
        """Refuse an agent with the id of a node whose agent is alive."""
        old, node = self.sessions.get(hello.node_id), self.cluster.nodes.get(hello.node_id)
        alive = node is not None and self._silent_seconds(node) < 2 * self.heartbeat_seconds
        if old and alive and old.incarnation != hello.incarnation:
            raise self.claims.refuse(hello)

    async def _check_store(self, hello: agent_pb2.Hello) -> None:
        """Refuse agents while the store is older than known or not the agent's, which would stop running jobs.

        Raises:
            Problem: FAILED_PRECONDITION, with the verdict on the store.
        """
        if self._trust is None:
            return
        verdict, mark = self._trust.verdict, mark_from_wire(hello.store)
        if mark and verdict is None:
            verdict = await self._trust.add_witness(hello.node_id, mark)
        if verdict:
            raise errors.failed_precondition(verdict.mismatch.value, f"{verdict.text}; jobs on the node keep running")

    def _mark(self) -> agent_pb2.StoreMark | None:
        mark = self._trust.mark() if self._trust else None
        identity = self._trust.identity if self._trust else None
        return mark_to_wire(mark, identity.supersedes) if mark and identity else None

    def _welcome(self) -> agent_pb2.ConnectResponse:
        message = agent_pb2.ConnectResponse()
        message.welcome.term = self._leadership_term.fence.mod_revision
        if mark := self._mark():
            message.welcome.store.CopyFrom(mark)
        message.welcome.heartbeat_interval.FromNanoseconds(int(self.heartbeat_seconds * 1e9))
        message.welcome.lost_after.FromNanoseconds(int(self.lost_after_seconds * 1e9))
        return message

    def _lock(self, node_id: str) -> asyncio.Lock:
        return self._locks.setdefault(node_id, asyncio.Lock())

    async def _register(
        self, node_id: str, reported: resources_pb2.Inventory, declared: node_capabilities_pb2.NodeCapabilities | None
    ) -> Node:
        """Return a node with the reported inventory and capabilities, which are stored if they have changed."""
        inventory, message = specs.inventory_from_wire(reported), node_pb2.Node(capabilities=declared)
        same = node_capabilities.declared(message)
        async with self._lock(node_id):
            node = self.cluster.nodes.get(node_id)
            if node and (node.inventory, node.capabilities) == (inventory, same) and not node.given_up:
                self.attempts.order_health_stops(node, node.inventory)
                return node
            record = records_pb2.StoredNode(schema_version=SCHEMA_VERSION)
            if node:
                record.CopyFrom(node.record)
                record.ClearField("given_up")  # it is back
                record.ClearField("powered_off")
                log.info("node_changed", node=node.id)
            else:
                record.node.id = node_id
                record.node.state = NodeState.NODE_STATE_READY
                record.node.create_time.GetCurrentTime()
                record.request_ids.extend(self.node_removal.past_request_ids(node_id))
            record.node.inventory.CopyFrom(reported)
            record.node.ClearField("capabilities")
            record.node.MergeFrom(message)
            await self.committer.commit([Write(NODES + node_id, record.SerializeToString())])
            fresh = self.cluster.put_node(node_id, inventory, record)
        self.attempts.order_health_stops(fresh, node.inventory if node else None)
        return fresh

    def _reconcile(self, node: Node, session: agent_sessions.Session, hello: agent_pb2.Hello) -> None:
        """Reconcile the agent's attempts with placement's: queue the starts, stops and acknowledgments it needs."""
        reported = {(report.job_id, report.number) for report in hello.attempts}
        node.superseded.clear()
        for report in hello.attempts:
            self._take_report(node, session, report)
        for live in self.cluster.on_node(node.id):
            if not live.epoch or live.ended_on(node.id):
                continue  # an attempt whose start is being committed is assigned after the commit
            if live.key in reported:
                if live.state is AttemptState.STOPPING:
                    session.put(agent_sessions.stop_order(live))
                else:  # it may have missed a change
                    session.put(agent_sessions.time_limit_order(live))
                self.resizes.resend(live, node.id, session)
            elif live.state is AttemptState.STOPPING:
                end = attempt_reports.end_of_unknown(live, node.id)
                self.attempts.give_up(live, node.id, end, f"{node.id} does not have it")
            elif live.state is AttemptState.ASSIGNED and node.id not in live.parts:
                session.put(agent_sessions.assignment(live, live.nodes.index(node.id), self.cluster.address_of))
            else:
                self.attempts.give_up(
                    live, node.id, AttemptState.LOST, f"{node.id} no longer has it, as after a reboot"
                )

    def _record_contact(self, node: Node) -> None:
        """Record that a node's agent sent a message now."""
        node.seen_seconds, node.heard_seconds = time.monotonic(), self.liveness_clock.tick()

    def _silent_seconds(self, node: Node) -> float:
        """Return how long a node's agent has been silent, by the liveness clock."""
        return self.liveness_clock.tick() - node.heard_seconds

    def _disconnected(self, session: agent_sessions.Session) -> None:
        """Handle the end of a stream. The agent was last seen at its last message, not now."""
        self._on_gone(session.node_id)
        if not self.sessions.close(session):
            return  # another stream has replaced it
        if node := self.cluster.nodes.get(session.node_id):
            node.connected = False
            self.claims.disconnected(node)
            self.cluster.refresh_open(node)
            self.attempts.events.publish_capacity()
            log.warning("node_disconnected", node=session.node_id)

    async def _read(
        self,
        session: agent_sessions.Session,
        first: agent_pb2.ConnectRequest,
        requests: AsyncIterator[agent_pb2.ConnectRequest],
    ) -> None:
        try:
            if await self._handle(session, first):  # the first message may carry more than the hello
                async for request in requests:
                    if not await self._handle(session, request):
                        return
        except Exception as error:  # gRPC raises various errors for a broken stream
            log.info("agent_stream_broken", node=session.node_id, error=f"{type(error).__name__}: {error}")
        finally:
            session.close()

    async def _handle(self, session: agent_sessions.Session, request: agent_pb2.ConnectRequest) -> bool:
        try:
            agent_sessions.check_message(request)
            await self._apply(session, request)
        except Problem as error:
            log.warning("agent_refused", node=session.node_id, error=error.message)
            return False
        except (Fenced, Halted, StoreUnavailable) as error:  # placement's own error: the agent reconnects
            log.info("agent_message_not_committed", node=session.node_id, error=str(error))
            return False
        except Exception:  # unexpected input: the stream ends, and the agent reconnects
            log.exception("agent_message_failed", node=session.node_id)
            return False
        return True

    def _certainly_leads(self) -> bool:
        """Return whether no other process can have led for longer than a heartbeat."""
        return time.monotonic() < self._leadership_term.valid_until_seconds + self.heartbeat_seconds

    async def _apply(self, session: agent_sessions.Session, request: agent_pb2.ConnectRequest) -> None:
        node = self.cluster.nodes[session.node_id]
        self._record_contact(node)
        if request.HasField("hello") or request.HasField("certificate"):
            node.certificate = request.certificate if request.HasField("certificate") else None
        if request.HasField("condition"):
            node.condition.take(request.condition)
        if request.beat and self._certainly_leads():  # otherwise another leader may count this node as silent
            session.put(agent_sessions.heartbeat_ack(request.beat))
        if request.HasField("inventory"):  # first, because an ended attempt may free unhealthy GPUs
            declared = node.record.node.capabilities if node.record.node.HasField("capabilities") else None
            node = await self._register(node.id, request.inventory, declared)
            self.claims.connected(node)
            self.cluster.refresh_open(node)
            self.attempts.events.publish_capacity()
            self.cpu_hotplug.fit(node.id)
        for report in request.reports:
            self._take_report(node, session, report)
        for progress in request.progress:
            if not self._runs_on(node, progress.job_id):
                continue
            self.attempts.events.publish_progress(progress.job_id, progress.progress)
            self.tracker.take_progress(progress)
        for profiled in request.profiled:
            if not self._runs_on(node, profiled.job_id):
                continue
            self.attempts.events.publish_profiled(profiled)
            self.tracker.take_profiled(profiled)
        for resized in request.resized:
            self.resizes.take_report(node.id, resized)
        if request.HasField("goodbye"):
            self._disconnected(session)  # which ends this task
            reason = request.goodbye.reason[:REASON_LENGTH_MAX]
            self._background.start(self.node_removal.leave(node.id, reason))

    # Reports -------------------------------------------------------------------------------------------------

    def _runs_on(self, node: Node, job_id: str) -> bool:
        """Return whether a node may report on a job: only on jobs that were assigned to it."""
        live = self.cluster.attempts.get(job_id)
        return live is not None and node.id in live.nodes

    def _take_report(self, node: Node, session: agent_sessions.Session, report: agent_pb2.AttemptReport) -> None:
        live = self.cluster.attempts.get(report.job_id)
        key = (report.job_id, report.number)
        if live is None or live.key != key or node.id not in live.nodes:
            self._take_unexpected(node, session, report, known_end=True)
        elif live.state.ended:
            self._take_unexpected(node, session, report, known_end=live.end_committed)
        else:
            before = live.parts.get(node.id)
            self.suspects.mark_suspected(live, node, report)
            self.attempts.take_report(live, node.id, report)
            self.suspects.record_outcome(live, node, before)
            self.resizes.settle(live)

    def _take_unexpected(
        self, node: Node, session: agent_sessions.Session, report: agent_pb2.AttemptReport, *, known_end: bool
    ) -> None:
        """Stop an attempt that should not be on the node; the node takes no new work until it is gone."""
        key = (report.job_id, report.number)
        if not specs.ATTEMPT_STATES.from_wire(report.state).ended:
            node.superseded.add(key)
            session.put(agent_sessions.supersede(report))
        else:
            node.superseded.discard(key)
            if known_end:  # otherwise it is acknowledged after its end is committed
                session.put(agent_sessions.ack(*key))
        if self.cluster.refresh_open(node):
            self.attempts.events.publish_capacity()

    # Drains and losses ---------------------------------------------------------------------------------------

    def expire_silent_nodes(self) -> None:
        """Disconnect nodes with silent agents, and mark nodes lost after a longer silence, with their attempts."""
        self.cpu_hotplug.retry()
        for node in list(self.cluster.nodes.values()):
            silent = self._silent_seconds(node)
            if (
                node.connected
                and silent > HEARTBEATS_MISSED_MAX * self.heartbeat_seconds
                and (session := self.sessions.get(node.id))
            ):
                self._disconnected(session)
            if node.connected:
                continue
            if node.given_up:
                self.node_removal.mark_lost(node)
            elif silent > self.lost_after_seconds:
                if not node.lost:
                    node.lost = True
                    self.attempts.events.publish_capacity()
                self._give_up(node, f"{node.id} has been away for {silent:.0f} s", self.lost_after_seconds)

    def disconnect_all(self) -> None:
        """Close all agents' streams, so that the agents look for the leader; nodes are away until they reconnect."""
        for node in list(self.cluster.nodes.values()):
            if session := self.sessions.get(node.id):
                self._disconnected(session)

    def _give_up(self, node: Node, why: str, after_seconds: float) -> None:
        """Give up a node's attempts; one that stops when disconnected is given up only after it must have stopped."""
        silent = self._silent_seconds(node)
        for live in self.cluster.on_node(node.id):
            if silent > may_outlive_contact_seconds(live, after_seconds, self.heartbeat_seconds):
                self.attempts.give_up(live, node.id, AttemptState.LOST, why)

    async def mark(
        self, node_id: str, state: NodeState.ValueType, reason: str, owner: Owner.ValueType, request_id: str = ""
    ) -> Node:
        """Cordon, drain or uncordon a node durably; a repeated request id changes nothing."""
        async with self._lock(node_id):
            node = self.cluster.nodes.get(node_id)
            if node is None:
                raise errors.not_found("node", node_id, near=self.cluster.nodes)  # it was removed in between
            if request_id and request_id in node.record.request_ids:
                return node
            if state == NodeState.NODE_STATE_READY == node.record.node.state:
                self.suspects.release(node_id)  # there is no cordon, so the request means the hold
            record = records_pb2.StoredNode()
            record.CopyFrom(node.record)
            record.request_ids[:] = [*record.request_ids, *([request_id] if request_id else [])][-REQUEST_IDS_MAX:]
            record.node.state, record.node.state_reason, record.node.state_owner = state, reason, owner
            committed = self.committer.submit([Write(NODES + node_id, record.SerializeToString())])
            node.record = record  # at once, because later decisions are committed after this
            self.cluster.refresh_open(node)
            await committed
        self.attempts.events.publish_capacity()
        if state == NodeState.NODE_STATE_DRAINING:
            self.attempts.order_stops(self.cluster.on_node(node_id), StopReason.DRAINED)
        return node

    def release_gpu(self, node: Node, gpu_uuid: str) -> None:
        """Order a node's agent to clear a GPU's health hold and check the GPU again."""
        if not self.sessions.send(node.id, agent_sessions.release(gpu_uuid)):
            raise errors.failed_precondition(
                "NODE_AWAY", f"the agent of {node.id} is disconnected; only the agent can release a GPU"
            )
        log.info("gpu_released", node=node.id, gpu=gpu_uuid)

    def describe(self, node: Node) -> node_pb2.Node:
        """Return a node message for callers."""
        return describe(node, self.cluster, self.claims, self._silent_seconds(node), self.heartbeat_seconds)
