"""Agents come, report and go: what follows for nodes and attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import structlog

from cotenant.codec import errors, specs
from cotenant.codec.errors import Problem
from cotenant.core.failures.launch_health import HoldRules
from cotenant.core.model.lifecycle import AttemptState, StopReason
from cotenant.rpc.store_marks import mark_from_wire, mark_to_wire
from cotenant.rpc.task_group import Background
from cotenant.security.identity import check_node
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import Attempts
from cotenant.services.placement.attempts.attempt_tracking import Following
from cotenant.services.placement.attempts.cpu_hotplug import Fitting
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
    may_run_on_seconds,
)
from cotenant.services.placement.registry.liveness import Attention
from cotenant.services.placement.registry.node_claims import Claims
from cotenant.services.placement.registry.node_description import describe
from cotenant.services.placement.registry.node_removal import Forgetting
from cotenant.services.placement.registry.suspects import Suspects
from cotenant.store.identity_check import Trust
from cotenant.store.port import StoreUnavailable
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import records_pb2, resources_pb2

log = structlog.get_logger()


class Registry:
    """The living side of placement: sessions, reports, drains and losses."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        attempts: Attempts,
        resizes: Resizes,
        following: Following,
        fitting: Fitting,
        attention: Attention,
        leads_for_sure: Callable[[], bool],
        background: Background,
        *,
        holding: HoldRules,
        heartbeat_seconds: float,
        lost_after_seconds: float,
        on_gone: Callable[[str], None],
        trust: Trust | None = None,
    ) -> None:
        """`trust` is what is known of the store, where it is one that may go back in time."""
        self.cluster, self.committer, self.sessions, self.attempts = cluster, committer, sessions, attempts
        self.resizes, self.following, self.fitting, self.attention = resizes, following, fitting, attention
        self.heartbeat_seconds, self.lost_after_seconds = heartbeat_seconds, lost_after_seconds
        self.term, self._trust = 0, trust
        self._on_gone, self._leads_for_sure = on_gone, leads_for_sure
        self._locks: dict[str, asyncio.Lock] = {}  # by node: its record is changed by one at a time
        self.claims = Claims(cluster)
        self.suspects = Suspects(cluster, committer, attempts.feed, background, self._lock, holding)
        self.forgetting = Forgetting(cluster, committer, attempts, self._lock, self._give_up)

    # Streams -------------------------------------------------------------------------------------------------

    async def connect(
        self, requests: AsyncIterator[node_pb2.ConnectRequest]
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        """Serve one agent's stream from its hello to its end."""
        first = await anext(aiter(requests), None)
        if first is None or not first.hello.node_id:
            raise errors.failed_precondition("HELLO_FIRST", "an agent's stream begins with its hello")
        check_node(first.hello.node_id)
        agent_sessions.check_message(first)
        session = await self._admit(first.hello)
        reader = asyncio.create_task(self._read(session, first, requests), name=f"agent-{session.node_id}")
        try:
            async for message in session.messages():
                yield message
        finally:
            reader.cancel()
            self._gone(session)

    async def _admit(self, hello: node_pb2.Hello) -> agent_sessions.Session:
        self._check_incarnation(hello)
        await self._check_store(hello)
        node = await self._register(hello.node_id, hello.inventory)
        self._check_incarnation(hello)  # another agent may have come while the record was written
        session = agent_sessions.Session(hello.node_id, hello.incarnation, self._mark)
        session.put(self._welcome())
        self._reconcile(node, session, hello)
        self.sessions.open(session)
        node.connected, node.lost = True, False
        self._hear(node)
        self.claims.connected(node)
        self.cluster.reopen(node)
        self.attempts.feed.publish_capacity()
        if node.record.node.state == NodeState.NODE_STATE_DRAINING:
            self.attempts.order_stops(self.cluster.on_node(node.id), StopReason.DRAINED)
        self.fitting.fit(node.id)
        log.info("node_connected", node=node.id, gpus=len(node.inventory.gpus), cores=len(node.inventory.cores))
        return session

    def _check_incarnation(self, hello: node_pb2.Hello) -> None:
        """Refuse an agent that takes the name of a node whose agent is alive."""
        old, node = self.sessions.get(hello.node_id), self.cluster.nodes.get(hello.node_id)
        speaks = node is not None and self._silent_seconds(node) < 2 * self.heartbeat_seconds
        if old and speaks and old.incarnation != hello.incarnation:
            raise self.claims.refuse(hello)

    async def _check_store(self, hello: node_pb2.Hello) -> None:
        """Refuse an agent while the store is not what it was, or is not the agent's: it would stop what runs.

        Raises:
            Problem: FAILED_PRECONDITION, with what is wrong.
        """
        if self._trust is None:
            return
        verdict, mark = self._trust.verdict, mark_from_wire(hello.store)
        if mark and verdict is None:
            verdict = await self._trust.testify(hello.node_id, mark)
        if verdict:
            raise errors.failed_precondition(verdict.wrong.value, f"{verdict.text}; what runs on the node, runs on")

    def _mark(self) -> node_pb2.StoreMark | None:
        mark = self._trust.mark() if self._trust else None
        identity = self._trust.identity if self._trust else None
        return mark_to_wire(mark, identity.supersedes) if mark and identity else None

    def _welcome(self) -> node_pb2.ConnectResponse:
        message = node_pb2.ConnectResponse()
        message.welcome.term = self.term
        if mark := self._mark():
            message.welcome.store.CopyFrom(mark)
        message.welcome.heartbeat_interval.FromNanoseconds(int(self.heartbeat_seconds * 1e9))
        message.welcome.lost_after.FromNanoseconds(int(self.lost_after_seconds * 1e9))
        return message

    def _lock(self, node_id: str) -> asyncio.Lock:
        return self._locks.setdefault(node_id, asyncio.Lock())

    async def _register(self, node_id: str, made_of: resources_pb2.Inventory) -> Node:
        """Keep what a node is made of, where that is new."""
        inventory = specs.inventory_from_wire(made_of)
        async with self._lock(node_id):
            node = self.cluster.nodes.get(node_id)
            if node and node.inventory == inventory and not node.given_up:
                self.attempts.order_healing(node, node.inventory)
                return node
            record = records_pb2.StoredNode(schema_version=SCHEMA_VERSION)
            if node:
                record.CopyFrom(node.record)
                record.ClearField("given_up")  # here it is
                record.ClearField("powered_off")
                log.info("node_changed", node=node.id)
            else:
                record.node.id = node_id
                record.node.state = NodeState.NODE_STATE_READY
                record.node.create_time.GetCurrentTime()
                record.request_ids.extend(self.forgetting.requests_left(node_id))
            record.node.inventory.CopyFrom(made_of)
            await self.committer.commit([Write(NODES + node_id, record.SerializeToString())])
            fresh = self.cluster.put_node(node_id, inventory, record)
        self.attempts.order_healing(fresh, node.inventory if node else None)
        return fresh

    def _reconcile(self, node: Node, session: agent_sessions.Session, hello: node_pb2.Hello) -> None:
        """Compare what the agent knows with what we believe; tell it what to start, to stop and to forget."""
        told = {(report.job_id, report.number) for report in hello.attempts}
        node.superseded.clear()
        for report in hello.attempts:
            self._take_report(node, session, report)
        for live in self.cluster.on_node(node.id):
            if not live.epoch or live.ended_on(node.id):
                continue  # what is being committed is told of when that is done
            if live.key in told:
                if live.state is AttemptState.STOPPING:
                    session.put(agent_sessions.stop_order(live))
                self.resizes.remind(live, node.id, session)
            elif live.state is AttemptState.STOPPING:
                end = attempt_reports.end_of_unknown(live, node.id)
                self.attempts.give_up(live, node.id, end, f"{node.id} does not have it")
            elif live.state is AttemptState.ASSIGNED and node.id not in live.parts:
                session.put(agent_sessions.assignment(live, live.nodes.index(node.id)))
            else:
                self.attempts.give_up(
                    live, node.id, AttemptState.LOST, f"{node.id} has forgotten it, as after a reboot"
                )

    def _hear(self, node: Node) -> None:
        """Note that a node's agent was heard just now."""
        node.seen_seconds, node.heard_seconds = time.monotonic(), self.attention.look()

    def _silent_seconds(self, node: Node) -> float:
        """For how long a node's agent was silent, of the time that was attended to."""
        return self.attention.look() - node.heard_seconds

    def _gone(self, session: agent_sessions.Session) -> None:
        """Take in that a stream has ended. Its agent was last seen when it last spoke, not now."""
        self._on_gone(session.node_id)
        if not self.sessions.close(session):
            return  # another stream has taken its place
        if node := self.cluster.nodes.get(session.node_id):
            node.connected = False
            self.claims.gone(node)
            self.cluster.reopen(node)
            self.attempts.feed.publish_capacity()
            log.warning("node_away", node=session.node_id)

    async def _read(
        self,
        session: agent_sessions.Session,
        first: node_pb2.ConnectRequest,
        requests: AsyncIterator[node_pb2.ConnectRequest],
    ) -> None:
        try:
            if await self._understood(session, first):  # what came along with the hello
                async for request in requests:
                    if not await self._understood(session, request):
                        return
        except Exception as error:  # gRPC has many ways to say that a stream is broken
            log.info("agent_stream_broken", node=session.node_id, error=f"{type(error).__name__}: {error}")
        finally:
            session.close()

    async def _understood(self, session: agent_sessions.Session, request: node_pb2.ConnectRequest) -> bool:
        try:
            agent_sessions.check_message(request)
            await self._take(session, request)
        except Problem as error:
            log.warning("agent_refused", node=session.node_id, error=error.message)
            return False
        except (Fenced, Halted, StoreUnavailable) as error:  # ours, and over with this stream: the agent comes anew
            log.info("agent_not_heard", node=session.node_id, error=str(error))
            return False
        except Exception:  # a stranger's words; the stream ends, and the agent comes back with its hello
            log.exception("agent_not_understood", node=session.node_id)
            return False
        return True

    async def _take(self, session: agent_sessions.Session, request: node_pb2.ConnectRequest) -> None:
        node = self.cluster.nodes[session.node_id]
        self._hear(node)
        if request.HasField("hello") or request.HasField("certificate"):
            node.certificate = request.certificate if request.HasField("certificate") else None
        if request.HasField("condition"):
            node.condition.take(request.condition)
        if request.beat and self._leads_for_sure():  # else another one may lead, and take this node as silent
            session.put(agent_sessions.heard(request.beat))
        if request.HasField("inventory"):  # first: what an end gives back may not be well
            node = await self._register(node.id, request.inventory)
            self.claims.connected(node)
            self.cluster.reopen(node)
            self.attempts.feed.publish_capacity()
            self.fitting.fit(node.id)
        for report in request.reports:
            self._take_report(node, session, report)
        for progress in request.progress:
            if not self._runs_on(node, progress.job_id):
                continue
            self.attempts.feed.publish_progress(progress.job_id, progress.progress)
            self.following.take_progress(progress)
        for profiled in request.profiled:
            if not self._runs_on(node, profiled.job_id):
                continue
            self.attempts.feed.publish_profiled(profiled)
            self.following.take_profiled(profiled)
        for resized in request.resized:
            self.resizes.take_report(node.id, resized)

    # Reports -------------------------------------------------------------------------------------------------

    def _runs_on(self, node: Node, job_id: str) -> bool:
        """Whether a node may tell of a job: of what it was not given it knows nothing."""
        live = self.cluster.attempts.get(job_id)
        return live is not None and node.id in live.nodes

    def _take_report(self, node: Node, session: agent_sessions.Session, report: node_pb2.AttemptReport) -> None:
        live = self.cluster.attempts.get(report.job_id)
        key = (report.job_id, report.number)
        if live is None or live.key != key or node.id not in live.nodes:
            self._take_stray(node, session, report, known_end=True)
        elif live.state.ended:
            self._take_stray(node, session, report, known_end=live.end_kept)
        else:
            before = live.parts.get(node.id)
            self.suspects.sign(live, node, report)
            self.attempts.take_report(live, node.id, report)
            self.suspects.follow(live, node, before)
            self.resizes.settle(live)

    def _take_stray(
        self, node: Node, session: agent_sessions.Session, report: node_pb2.AttemptReport, *, known_end: bool
    ) -> None:
        """An attempt that should not be there any more: it is stopped, and until it is gone it holds its node."""
        key = (report.job_id, report.number)
        if not specs.ATTEMPT_STATES.from_wire(report.state).ended:
            node.superseded.add(key)
            session.put(agent_sessions.supersede(report))
        else:
            node.superseded.discard(key)
            if known_end:  # else it is acknowledged once its end has been committed
                session.put(agent_sessions.ack(*key))
        if self.cluster.reopen(node):
            self.attempts.feed.publish_capacity()

    # Drains and losses ---------------------------------------------------------------------------------------

    def give_up_silent_nodes(self) -> None:
        """Take nodes whose agents are silent as away, and away for too long as lost, their attempts with them."""
        self.fitting.try_again()
        for node in list(self.cluster.nodes.values()):
            silent = self._silent_seconds(node)
            if (
                node.connected
                and silent > HEARTBEATS_MISSED_MAX * self.heartbeat_seconds
                and (session := self.sessions.get(node.id))
            ):
                self._gone(session)
            if node.connected:
                continue
            if node.given_up:
                self.forgetting.let_go(node)
            elif silent > self.lost_after_seconds:
                if not node.lost:
                    node.lost = True
                    self.attempts.feed.publish_capacity()
                self._give_up(node, f"{node.id} has been away for {silent:.0f} s", self.lost_after_seconds)

    def let_go(self) -> None:
        """End all agents' streams, so that they look for whoever leads; they are away until they come again."""
        for node in list(self.cluster.nodes.values()):
            if session := self.sessions.get(node.id):
                self._gone(session)

    def _give_up(self, node: Node, why: str, after_seconds: float) -> None:
        """Take attempts of a node as lost; who stops by itself must have before it is started elsewhere."""
        silent = self._silent_seconds(node)
        for live in self.cluster.on_node(node.id):
            if silent > may_run_on_seconds(live, after_seconds, self.heartbeat_seconds):
                self.attempts.give_up(live, node.id, AttemptState.LOST, why)

    async def mark(
        self, node_id: str, state: NodeState.ValueType, reason: str, owner: str, request_id: str = ""
    ) -> Node:
        """Cordon, drain or uncordon a node, durably; a request that was obeyed before changes nothing."""
        async with self._lock(node_id):
            node = self.cluster.nodes.get(node_id)
            if node is None:
                raise errors.not_found("node", node_id, near=self.cluster.nodes)  # it was forgotten meanwhile
            if request_id and request_id in node.record.request_ids:
                return node
            if state == NodeState.NODE_STATE_READY == node.record.node.state:
                self.suspects.release(node_id)  # there is no cordon to take back: it is the hold that is meant
            record = records_pb2.StoredNode()
            record.CopyFrom(node.record)
            record.request_ids[:] = [*record.request_ids, *([request_id] if request_id else [])][-REQUEST_IDS_MAX:]
            record.node.state, record.node.state_reason, record.node.state_owner = state, reason, owner
            kept = self.committer.submit([Write(NODES + node_id, record.SerializeToString())])
            node.record = record  # at once: whatever is decided now is committed after this
            self.cluster.reopen(node)
            await kept
        self.attempts.feed.publish_capacity()
        if state == NodeState.NODE_STATE_DRAINING:
            self.attempts.order_stops(self.cluster.on_node(node_id), StopReason.DRAINED)
        return node

    def release_gpu(self, node: Node, gpu_uuid: str) -> None:
        """Have a node's agent end what holds a GPU back from work, and look at it anew."""
        if not self.sessions.send(node.id, agent_sessions.release(gpu_uuid)):
            raise errors.failed_precondition(
                "NODE_AWAY", f"the agent of {node.id} is away, and it is the agent that releases a GPU"
            )
        log.info("gpu_released", node=node.id, gpu=gpu_uuid)

    def describe(self, node: Node) -> node_pb2.Node:
        """Return a node as callers see it."""
        return describe(node, self.cluster, self.claims, self._silent_seconds(node), self.heartbeat_seconds)
