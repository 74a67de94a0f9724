"""Placement's three services: gRPC in, effects out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from cotenant import plugins
from cotenant.codec import errors, specs
from cotenant.codec.errors import Violation
from cotenant.core.failures.launch_health import RULES, HoldRules
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.leadership.leadership_term import Held, Tenure
from cotenant.rpc.paging import page_of
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_group import Background
from cotenant.services.placement.agents.agent_sessions import Sessions
from cotenant.services.placement.api.output_relay import Outputs
from cotenant.services.placement.attempts.attempt_events import Feed
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED, Attempts, led_by
from cotenant.services.placement.attempts.attempt_tracking import Following
from cotenant.services.placement.attempts.cpu_hotplug import Fitting
from cotenant.services.placement.attempts.cpu_rebalancer import Dealing
from cotenant.services.placement.attempts.job_classes import Kinds
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.attempt_reports import MESSAGE_LENGTH_MAX
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Outdated
from cotenant.services.placement.cluster.gauges import Gauges
from cotenant.services.placement.cluster.live_records import Node, NodeState
from cotenant.services.placement.placement_leadership import LEADER, Leadership, committing
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, StopCosts
from cotenant.services.placement.planning.plan_runner import Planning
from cotenant.services.placement.planning.start_forecast import Forecasting
from cotenant.services.placement.registry.agent_registry import Registry
from cotenant.services.placement.registry.liveness import Attention
from cotenant.store.guarded_store import trust_of
from cotenant.store.port import Compare, Store
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc as node_grpc
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc as placement_grpc

PLACEMENT = "cotenant.v1.PlacementService"
NODE = "cotenant.v1.NodeService"
AGENT = "cotenant.v1.AgentService"
SERVICES = (PLACEMENT, NODE, AGENT)
PLACEMENTS, ALLOCATORS = "cotenant.placement_policies", "cotenant.cpu_allocators"
OPERATOR = "operator"
Mark = node_pb2.DrainNodeRequest | node_pb2.CordonNodeRequest | node_pb2.UncordonNodeRequest
SAVE_SECONDS_MAX = 2.0  # at the end, where the store may be away


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
    stop_costs: StopCosts = STOP_COSTS
    holding: HoldRules = RULES


class Placement(placement_grpc.PlacementServiceServicer, node_grpc.NodeServiceServicer, node_grpc.AgentServiceServicer):
    """Serves planning, nodes and agents from one picture of the cluster."""

    def __init__(self, store: Store, config: PlacementConfig, tenure: Tenure | None = None) -> None:
        self.config = config
        policy, allocator = self._policies()
        self.background = Background(Fenced, Halted, Outdated)
        self.cluster = Cluster()
        self.attention = Attention(config.heartbeat_seconds)
        self.committer = Committer(store, self._distrust, self._renew, self._doubt)
        self.sessions = Sessions()
        self.feed = Feed()
        self.outputs = Outputs(self.sessions)
        self.attempts = Attempts(self.cluster, self.committer, self.sessions, self.feed, self.background)
        self.resizes = Resizes(self.cluster, self.committer, self.sessions, self.attempts, self.background)
        self.kinds = Kinds(self.cluster, self.committer, allocator)
        self.following = Following(self.cluster, self.attempts, self.sessions, self.kinds, allocator)
        self.dealing = Dealing(self.cluster, self.following, self.resizes, self.kinds, allocator)
        self.registry = Registry(
            self.cluster,
            self.committer,
            self.sessions,
            self.attempts,
            self.resizes,
            self.following,
            Fitting(self.cluster, self.attempts, self.resizes),
            self.attention,
            self._leads_for_sure,
            self.background,
            holding=config.holding,
            heartbeat_seconds=config.heartbeat_seconds,
            lost_after_seconds=config.lost_after_seconds,
            on_gone=self.outputs.give_up,
            trust=trust_of(store),
        )
        self.leadership = Leadership(
            store,
            tenure or Held(store, LEADER),
            self.cluster,
            self.committer,
            self.sessions,
            self.feed,
            self.registry,
            self.kinds,
            self.attention,
            self._set_serving,
        )
        self.planning = Planning(
            self.cluster,
            self.attempts,
            self.resizes,
            self.kinds,
            policy,
            allocator,
            config.stop_costs,
            self.background,
            self.leadership.check,
            self.registry.suspects,
        )
        self.forecasting = Forecasting(self.cluster, self._policies, self.leadership.check)
        self._host: Host | None = None

    def _policies(self) -> tuple[PlacementPolicy, CpuAllocator]:
        """Make the policies in use anew."""
        config = self.config
        return (
            plugins.load(PLACEMENTS, config.placement, config.options.get(config.placement, {})),
            plugins.load(ALLOCATORS, config.allocator, config.options.get(config.allocator, {})),
        )

    # Life ----------------------------------------------------------------------------------------------------

    def add_to(self, host: Host) -> None:
        """Serve this on a server that has not started yet, or on what stands in for one."""
        self._host = host
        host.add(placement_grpc.add_PlacementServiceServicer_to_server, self, PLACEMENT)
        host.add(node_grpc.add_NodeServiceServicer_to_server, self, NODE)
        host.add(node_grpc.add_AgentServiceServicer_to_server, self, AGENT)

    async def start(self) -> None:
        """Read the state and begin to keep it."""
        await self.leadership.load()
        self.background.forever("placement-nodes", self._watch_nodes)
        self.background.forever("placement-probe", self._probe)
        self.background.forever("placement-dealing", self.dealing.run)
        self.background.forever("placement-kinds", self.kinds.keep)
        self.background.forever("placement-trust", self.leadership.regain)
        self.background.forever("placement-gauges", Gauges(self.cluster).run)
        self.background.forever("placement-suspects", self.registry.suspects.run)

    async def close(self) -> None:
        """End all streams and stop committing."""
        self.sessions.close_all()
        self.feed.close()
        await self.background.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVE_SECONDS_MAX):
                await self.kinds.save()
        await self.committer.close()

    def _distrust(self, error: Exception) -> None:
        self.leadership.distrust(error)

    async def _renew(self) -> Compare:
        return await self.leadership.renew()

    def _doubt(self, error: Exception | None) -> None:
        self.leadership.doubt(error)

    def _leads_for_sure(self) -> bool:
        return self.leadership.leads_for_sure()

    def _set_serving(self, serving: bool) -> None:
        if self._host:
            for service in SERVICES:
                self._host.set_serving(service, serving)

    async def _watch_nodes(self) -> None:
        interval_seconds = min(self.config.heartbeat_seconds, self.config.lost_after_seconds / 4)
        looks = max(1, round(interval_seconds / self.attention.look_seconds))
        while True:
            for _ in range(looks):
                await asyncio.sleep(interval_seconds / looks)
                self.attention.look()
            self.registry.give_up_silent_nodes()
            self.leadership.let_go()
            with suppress(*NOT_COMMITTED):
                await self.registry.forgetting.remove()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_seconds)
            await self.leadership.probe()

    # Planning ------------------------------------------------------------------------------------------------

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: object
    ) -> placement_pb2.PlanPlacementResponse:
        """Decide, hold, commit, tell."""
        self.leadership.check()
        answer = await self.leadership.committed(self.planning.plan(request))
        if answer.refused and not answer.placed:  # nothing was committed; and a refusal may hold until nodes change
            await self.leadership.be_sure()
        return answer

    async def ForecastStarts(
        self, request: placement_pb2.ForecastStartsRequest, context: object
    ) -> placement_pb2.ForecastStartsResponse:
        """Say when waiting jobs will probably start; nothing is decided."""
        return await self.forecasting.forecast(request)

    async def AdviseAttempts(
        self, request: placement_pb2.AdviseAttemptsRequest, context: object
    ) -> placement_pb2.AdviseAttemptsResponse:
        """Take in estimates, and have profiles made."""
        self.leadership.check()
        return placement_pb2.AdviseAttemptsResponse(refused=self.following.advise(request.advice))

    async def StopAttempts(
        self, request: placement_pb2.StopAttemptsRequest, context: object
    ) -> placement_pb2.StopAttemptsResponse:
        """Stop attempts with their grace."""
        self.leadership.check()
        if request.reason not in specs.STOP_REASONS.names:
            raise errors.invalid([Violation("reason", f"is {request.reason}, which is no reason to stop")])
        await self.leadership.committed(self.attempts.confirm(led_by(request.term)))
        found = [self.cluster.attempts.get(victim.job_id) for victim in request.attempts]
        lives = [
            live for live, victim in zip(found, request.attempts, strict=True) if live and live.key[1] == victim.number
        ]
        for live in lives:
            if request.detail and self.cluster.can_stop(live):
                live.attempt.stop_detail = request.detail[:MESSAGE_LENGTH_MAX]
        self.attempts.order_stops(lives, specs.STOP_REASONS.from_wire(request.reason))
        return placement_pb2.StopAttemptsResponse(attempts=[live.attempt for live in lives])

    async def ForgetAttempts(
        self, request: placement_pb2.ForgetAttemptsRequest, context: object
    ) -> placement_pb2.ForgetAttemptsResponse:
        """Delete records of attempts whose end the queue has committed."""
        self.leadership.check()
        keys = [(victim.job_id, victim.number) for victim in request.attempts]
        await self.leadership.committed(self.background.finish(self.attempts.forget(keys, led_by(request.term))))
        return placement_pb2.ForgetAttemptsResponse()

    async def WatchAttempts(
        self, request: placement_pb2.WatchAttemptsRequest, context: object
    ) -> AsyncIterator[placement_pb2.WatchAttemptsResponse]:
        """Pass on every change."""
        self.leadership.check()
        async for event in self.feed.watch(request.after_revision):
            yield event

    async def GetCapacity(
        self, request: placement_pb2.GetCapacityRequest, context: object
    ) -> placement_pb2.GetCapacityResponse:
        """Sum up the cluster."""
        self.leadership.check()
        response = placement_pb2.GetCapacityResponse(
            capacity=planner.capacity(self.cluster), elastic=self.config.elastic
        )
        for shape in (*self.cluster.shapes(), *self.config.could_join):
            response.shapes.append(specs.shape_to_wire(shape))
        await self.leadership.be_sure()  # for whoever asks asks again only when it changes
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
        self.leadership.check()
        with committing():
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
        self.leadership.check()
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
        return node_pb2.DrainNodeResponse(node=await self._mark(request, NodeState.NODE_STATE_DRAINING, request.reason))

    async def CordonNode(self, request: node_pb2.CordonNodeRequest, context: object) -> node_pb2.CordonNodeResponse:
        """Give a node no new work."""
        return node_pb2.CordonNodeResponse(
            node=await self._mark(request, NodeState.NODE_STATE_CORDONED, request.reason)
        )

    async def UncordonNode(
        self, request: node_pb2.UncordonNodeRequest, context: object
    ) -> node_pb2.UncordonNodeResponse:
        """Let a node take work again."""
        return node_pb2.UncordonNodeResponse(node=await self._mark(request, NodeState.NODE_STATE_READY, ""))

    async def ReleaseGpu(self, request: node_pb2.ReleaseGpuRequest, context: object) -> node_pb2.ReleaseGpuResponse:
        """Have a GPU looked at anew."""
        node = self._node(request.id)
        uuids = [gpu.uuid for gpu in node.inventory.gpus]
        if request.gpu_uuid not in uuids:
            raise errors.not_found("GPU", request.gpu_uuid, near=uuids)
        self.registry.release_gpu(node, request.gpu_uuid)
        return node_pb2.ReleaseGpuResponse(node=self.registry.describe(node))

    async def ForgetNode(self, request: node_pb2.ForgetNodeRequest, context: object) -> node_pb2.ForgetNodeResponse:
        """Give up what a node has that will not come back."""
        self.leadership.check()
        if self.registry.forgetting.was_asked(request.id, request.request_id):
            return node_pb2.ForgetNodeResponse(node=node_pb2.Node(id=request.id))
        return await self.leadership.committed(self.background.finish(self._forget(request)))

    async def _forget(self, request: node_pb2.ForgetNodeRequest) -> node_pb2.ForgetNodeResponse:
        forgetting = self.registry.forgetting
        node = await forgetting.forget(request.id, request.reason, request.request_id, powered_off=request.powered_off)
        told = self.registry.describe(node)
        await forgetting.remove_if_empty(node)
        return node_pb2.ForgetNodeResponse(node=told)

    async def _mark(self, request: Mark, state: NodeState.ValueType, reason: str) -> node_pb2.Node:
        self._node(request.id)
        owner = OPERATOR if state != NodeState.NODE_STATE_READY else ""
        marking = self.registry.mark(request.id, state, reason, owner, request.request_id)
        return self.registry.describe(await self.leadership.committed(self.background.finish(marking)))


def use_policies(policies: PolicyServicer, config: PlacementConfig) -> None:
    """Tell which policies placement uses."""
    policies.use(PLACEMENTS, config.placement, options=config.options)
    policies.use(ALLOCATORS, config.allocator, options=config.options)


async def start(
    server: Server,
    store: Store,
    policies: PolicyServicer,
    config: PlacementConfig = PlacementConfig(),
    tenure: Tenure | None = None,
) -> Placement:
    """Read the state and add placement to a server that has not started yet; it leads by `tenure` where it is given.

    Raises:
        UnknownPolicy: a policy is not installed, or broken.
        BadOption: a policy does not take an option.
        StoreUnavailable: the state cannot be read.
    """
    placement = Placement(store, config, tenure)
    use_policies(policies, config)
    placement.add_to(server)
    await placement.start()
    return placement
