"""Placement's three services: gRPC in, effects out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import structlog

from cotenant import plugins, telemetry
from cotenant.core.ledger import Overcommitted
from cotenant.core.lifecycle import StopReason
from cotenant.core.nodes import NodeShape
from cotenant.core.policy import CpuAllocator, PlacementPolicy
from cotenant.rpc import errors, translate
from cotenant.rpc.pages import page_of
from cotenant.rpc.policies import PolicyServicer
from cotenant.rpc.server import Server
from cotenant.services.placement import planner
from cotenant.services.placement.agents import Sessions
from cotenant.services.placement.cluster import ATTEMPTS, GUARDS, NODES, Cluster, Live, Node, NodeState
from cotenant.services.placement.committer import Committer, Fenced, TooLarge, Write
from cotenant.services.placement.feed import Feed
from cotenant.services.placement.outputs import Outputs
from cotenant.services.placement.registry import Registry
from cotenant.store.port import Put, Store, StoreUnavailable
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc as node_grpc
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc as placement_grpc
from cotenant.v1 import records_pb2

log = structlog.get_logger()

PLACEMENT = "cotenant.v1.PlacementService"
NODE = "cotenant.v1.NodeService"
AGENT = "cotenant.v1.AgentService"
PLACEMENTS, ALLOCATORS = "cotenant.placement_policies", "cotenant.cpu_allocators"
LEADER = "placement/leader"
OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How placement is run. `could_join` are shapes of nodes that may join; with `elastic` any number of them."""

    placement: str = "consolidate"
    allocator: str = "proportional"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by policy
    heartbeat_seconds: float = 5.0
    lost_after_seconds: float = 300.0
    could_join: tuple[NodeShape, ...] = ()
    elastic: bool = False


class Placement(placement_grpc.PlacementServiceServicer, node_grpc.NodeServiceServicer, node_grpc.AgentServiceServicer):
    """Serves planning, nodes and agents from one picture of the cluster."""

    def __init__(self, store: Store, config: PlacementConfig) -> None:
        self.store, self.config = store, config
        options = config.options
        self.policy: PlacementPolicy = plugins.load(PLACEMENTS, config.placement, options.get(config.placement, {}))
        self.allocator: CpuAllocator = plugins.load(ALLOCATORS, config.allocator, options.get(config.allocator, {}))
        self.cluster = Cluster()
        self.committer = Committer(store)
        self.sessions = Sessions()
        self.feed = Feed(lambda: [live.attempt for live in self.cluster.attempts.values()])
        self.outputs = Outputs(self.sessions)
        self.registry = Registry(
            self.cluster,
            self.committer,
            self.sessions,
            self.feed,
            heartbeat_seconds=config.heartbeat_seconds,
            lost_after_seconds=config.lost_after_seconds,
            distrust=self._distrust,
        )
        self._planning = asyncio.Lock()
        self._trusted = asyncio.Event()
        self._doubt = asyncio.Event()
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # Life ----------------------------------------------------------------------------------------------------

    def add_to(self, server: Server) -> None:
        """Serve this on a server that has not started yet."""
        self._server = server
        server.add(placement_grpc.add_PlacementServiceServicer_to_server, self, PLACEMENT)
        server.add(node_grpc.add_NodeServiceServicer_to_server, self, NODE)
        server.add(node_grpc.add_AgentServiceServicer_to_server, self, AGENT)

    async def start(self) -> None:
        """Read the state and begin to keep it."""
        await self._load()
        self._tasks = [
            asyncio.create_task(self._watch_nodes(), name="placement-nodes"),
            asyncio.create_task(self._regain_trust(), name="placement-trust"),
        ]

    async def close(self) -> None:
        """End all streams and stop committing."""
        self.sessions.close_all()
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.committer.close()

    async def _load(self) -> None:
        """Read everything anew, under a new term: whatever was believed before is forgotten."""
        result = await self.store.transact([], [Put(LEADER, b"")])
        nodes = await self.store.list(NODES)
        guards = await self.store.list(GUARDS)
        attempts = await self.store.list(ATTEMPTS)
        fresh = Cluster()
        now = time.monotonic()
        for entry in nodes.entries:
            stored = records_pb2.StoredNode.FromString(entry.value)
            old = self.cluster.nodes.get(stored.node.id)
            node = fresh.put_node(stored.node.id, translate.inventory_from_wire(stored.node.inventory), stored)
            node.seen_seconds = old.seen_seconds if old else now
        for entry in attempts.entries:
            record = records_pb2.StoredAttempt.FromString(entry.value)
            allocation = tuple(translate.allocation_from_wire(part) for part in record.attempt.allocations)
            record.attempt.epoch = record.attempt.epoch or entry.mod_revision
            fresh.add(Live(record, allocation, epoch=record.attempt.epoch))
        self.cluster.replace(fresh)
        every = (*nodes.entries, *guards.entries, *attempts.entries)
        self.committer.start({entry.key: entry.mod_revision for entry in every})
        self.registry.term = result.revision
        self.feed.start(max(result.revision, attempts.revision))
        self._trusted.set()
        self._set_serving(True)
        log.info("placement_loaded", nodes=len(nodes.entries), attempts=len(attempts.entries), term=result.revision)

    def _distrust(self) -> None:
        self._trusted.clear()
        self._doubt.set()
        self._set_serving(False)

    def _set_serving(self, serving: bool) -> None:
        if self._server:
            for service in (PLACEMENT, NODE, AGENT):
                self._server.set_serving(service, serving)

    async def _regain_trust(self) -> None:
        """After a failed commit read everything anew, and let the agents tell their side anew."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            self.sessions.close_all()
            while not self._trusted.is_set():
                try:
                    await self._load()
                except StoreUnavailable as error:
                    log.warning("store_away", error=str(error))
                    await asyncio.sleep(0.5)

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(min(self.config.heartbeat_seconds, self.config.lost_after_seconds / 4))
            self.registry.give_up_silent_nodes()

    def _check_trust(self) -> None:
        if not self._trusted.is_set():
            raise errors.unavailable("placement is reading its state anew", 0.5, "STORE_AWAY")

    # Planning ------------------------------------------------------------------------------------------------

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: object
    ) -> placement_pb2.PlanPlacementResponse:
        """Decide, hold, commit, tell."""
        self._check_trust()
        async with self._planning:
            begin = time.time()
            standing = self._standing(request)
            outcome, _ = planner.plan(self.cluster, request, self.policy, self.allocator)
            decision = planner.decide(self.cluster, request, outcome)
            if request.validate_only:
                response = planner.answer(self.cluster, decision)
                planner.undo(self.cluster, decision.starts)
                return response
            placed = time.time()
            await self._commit_starts(decision, begin, placed)
            self.registry.order_stops(decision.stops, StopReason.PREEMPTED)
            response = planner.answer(self.cluster, decision)
            response.placed.extend(standing)
            return response

    def _standing(self, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Placed]:
        """Candidates that have a live attempt already, from a call whose answer was lost: the answer again."""
        standing = []
        for candidate in list(request.candidates):
            live = self.cluster.attempts.get(candidate.job_id)
            if live and (not live.state.ended or live.key[1] >= candidate.number):
                standing.append(placement_pb2.Placed(attempt=live.attempt))
                request.candidates.remove(candidate)
        return standing

    async def _commit_starts(self, decision: planner.Decision, begin: float, placed: float) -> None:
        groups = [[live.write(), *(Write(GUARDS + node_id, b"") for node_id in live.nodes)] for live in decision.starts]
        results = await asyncio.gather(*map(self.registry.commit, groups), return_exceptions=True)
        committed = time.time()
        for live, result in zip(decision.starts, results, strict=True):
            if isinstance(result, int):
                live.epoch = live.attempt.epoch = result
                self.feed.publish(result, [live.attempt])
                self.sessions.assign(live)
                self._trace(live, begin, placed, committed)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            planner.undo(self.cluster, [d for d, r in zip(decision.starts, results, strict=True) if r in failed])
            raise _told(failed[0])

    @staticmethod
    def _trace(live: Live, begin: float, placed: float, committed: float) -> None:
        parent, job = live.record.trace_parent, live.key[0]
        nodes = ",".join(live.nodes)
        telemetry.record("place", parent, begin, placed, job=job, nodes=nodes)
        telemetry.record("commit", parent, placed, committed, job=job, epoch=live.epoch)
        telemetry.record("assign", parent, committed, time.time(), job=job, nodes=nodes)

    async def StopAttempts(
        self, request: placement_pb2.StopAttemptsRequest, context: object
    ) -> placement_pb2.StopAttemptsResponse:
        """Stop attempts with their grace."""
        self._check_trust()
        found = [self.cluster.attempts.get(victim.job_id) for victim in request.attempts]
        lives = [
            live for live, victim in zip(found, request.attempts, strict=True) if live and live.key[1] == victim.number
        ]
        self.registry.order_stops(lives, translate.STOP_REASONS.from_wire(request.reason))
        return placement_pb2.StopAttemptsResponse(attempts=[live.attempt for live in lives])

    async def ForgetAttempts(
        self, request: placement_pb2.ForgetAttemptsRequest, context: object
    ) -> placement_pb2.ForgetAttemptsResponse:
        """Delete records of attempts whose end the queue has committed."""
        self._check_trust()
        gone = [
            victim.job_id
            for victim in request.attempts
            if (live := self.cluster.attempts.get(victim.job_id)) and live.key[1] == victim.number and live.state.ended
        ]
        for job_id in gone:
            self.cluster.forget(job_id)
        await asyncio.gather(*(self.registry.commit([Write(ATTEMPTS + job_id, None)]) for job_id in gone))
        return placement_pb2.ForgetAttemptsResponse()

    async def WatchAttempts(
        self, request: placement_pb2.WatchAttemptsRequest, context: object
    ) -> AsyncIterator[placement_pb2.WatchAttemptsResponse]:
        """Pass on every change."""
        await self._trusted.wait()
        async for event in self.feed.watch(request.after_revision):
            yield event

    async def GetCapacity(
        self, request: placement_pb2.GetCapacityRequest, context: object
    ) -> placement_pb2.GetCapacityResponse:
        """Sum up the cluster."""
        await self._trusted.wait()
        response = placement_pb2.GetCapacityResponse(
            capacity=planner.capacity(self.cluster), elastic=self.config.elastic
        )
        for shape in (*self.cluster.shapes(), *self.config.could_join):
            response.shapes.append(translate.shape_to_wire(shape))
        return response

    async def ReadAttemptLogs(
        self, request: placement_pb2.ReadAttemptLogsRequest, context: object
    ) -> AsyncIterator[placement_pb2.ReadAttemptLogsResponse]:
        """Pass on what the nodes' agents read."""
        live = self.cluster.attempts.get(request.job_id)
        node_ids = live.nodes if live and live.key[1] == request.number else list(request.node_ids)
        async for piece in self.outputs.read(request, node_ids):
            yield piece

    # Agents --------------------------------------------------------------------------------------------------

    async def Connect(
        self, requests: AsyncIterator[node_pb2.ConnectRequest], context: object
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        """Hold an agent's stream."""
        self._check_trust()
        async for message in self.registry.connect(requests):
            yield message

    async def UploadOutput(
        self, requests: AsyncIterator[node_pb2.UploadOutputRequest], context: object
    ) -> node_pb2.UploadOutputResponse:
        """Take output in for whoever reads it."""
        await self.outputs.upload(requests)
        return node_pb2.UploadOutputResponse()

    # Nodes ---------------------------------------------------------------------------------------------------

    def _node(self, node_id: str) -> Node:
        self._check_trust()
        if node := self.cluster.nodes.get(node_id):
            return node
        raise errors.not_found("node", node_id, near=self.cluster.nodes)

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: object) -> node_pb2.GetNodeResponse:
        """Tell of one node."""
        return node_pb2.GetNodeResponse(node=self.registry.describe(self._node(request.id)))

    async def ListNodes(self, request: node_pb2.ListNodesRequest, context: object) -> node_pb2.ListNodesResponse:
        """Tell of all nodes, page by page."""
        ids, token = page_of(sorted(self.cluster.nodes), request.page_size, request.page_token)
        return node_pb2.ListNodesResponse(
            nodes=[self.registry.describe(self.cluster.nodes[node_id]) for node_id in ids],
            next_page_token=token,
            total_size=len(self.cluster.nodes),
        )

    async def DrainNode(self, request: node_pb2.DrainNodeRequest, context: object) -> node_pb2.DrainNodeResponse:
        """Empty a node."""
        node = self._node(request.id)
        await self._mark(node, NodeState.NODE_STATE_DRAINING, request.reason)
        return node_pb2.DrainNodeResponse(node=self.registry.describe(node))

    async def CordonNode(self, request: node_pb2.CordonNodeRequest, context: object) -> node_pb2.CordonNodeResponse:
        """Give a node no new work."""
        node = self._node(request.id)
        await self._mark(node, NodeState.NODE_STATE_CORDONED, request.reason)
        return node_pb2.CordonNodeResponse(node=self.registry.describe(node))

    async def UncordonNode(
        self, request: node_pb2.UncordonNodeRequest, context: object
    ) -> node_pb2.UncordonNodeResponse:
        """Let a node take work again."""
        node = self._node(request.id)
        await self._mark(node, NodeState.NODE_STATE_READY, "")
        return node_pb2.UncordonNodeResponse(node=self.registry.describe(node))

    async def _mark(self, node: Node, state: NodeState.ValueType, reason: str) -> None:
        owner = OPERATOR if state != NodeState.NODE_STATE_READY else ""
        try:
            await self.registry.mark(node, state, reason, owner)
        except Fenced as error:
            raise _told(error) from error


def _told(error: BaseException) -> BaseException:
    """A failed commit in the caller's words."""
    if isinstance(error, Fenced):
        return errors.unavailable("another placement leads now; nothing was decided", 0.5, "NOT_LEADER")
    if isinstance(error, TooLarge):
        return errors.failed_precondition("TOO_MANY_NODES", f"the gang spans more nodes than one commit takes: {error}")
    if isinstance(error, Overcommitted):
        return errors.internal(str(error))
    return error


async def start(
    server: Server, store: Store, policies: PolicyServicer, config: PlacementConfig = PlacementConfig()
) -> Placement:
    """Read the state and add placement to a server that has not started yet.

    Raises:
        UnknownPolicy: a policy is not installed, or broken.
        BadOption: a policy does not take an option.
        StoreUnavailable: the state cannot be read.
    """
    placement = Placement(store, config)
    policies.use(PLACEMENTS, config.placement)
    policies.use(ALLOCATORS, config.allocator)
    placement.add_to(server)
    await placement.start()
    return placement
