"""gRPC servicers of placement: PlacementService, NodeService and AgentService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from cotenant import plugins
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc as agent_grpc
from cotenant.codec import errors, specs
from cotenant.codec.errors import Violation
from cotenant.core.failures.launch_health import RULES, HoldRules
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc as placement_grpc
from cotenant.leadership.leadership_term import HeldTerm, LeadershipTerm
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.placement.agents.agent_sessions import Sessions
from cotenant.services.placement.api.output_relay import OutputRelay
from cotenant.services.placement.api.session_relay import SessionRelay
from cotenant.services.placement.attempts.attempt_events import AttemptEvents
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED, AttemptStore, leader_condition
from cotenant.services.placement.attempts.attempt_tracking import AttemptTracker
from cotenant.services.placement.attempts.cpu_hotplug import CpuHotplug
from cotenant.services.placement.attempts.cpu_rebalancer import CpuRebalancer
from cotenant.services.placement.attempts.job_classes import JobClasses
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.attempt_reports import MESSAGE_LENGTH_MAX
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Outdated
from cotenant.services.placement.cluster.gauges import Gauges
from cotenant.services.placement.cluster.live_records import Node, NodeState
from cotenant.services.placement.placement_leadership import LEADER, PlacementLeadership, committing
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, StopCosts
from cotenant.services.placement.planning.plan_runner import PlanRunner
from cotenant.services.placement.planning.start_forecast import StartForecaster
from cotenant.services.placement.registry.agent_registry import AgentRegistry
from cotenant.services.placement.registry.liveness import LivenessClock
from cotenant.store.guarded_store import trust_of
from cotenant.store.port import Store
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc as node_grpc

PLACEMENT = "cotenant.internal.v1.PlacementService"
NODE = "cotenant.v1.NodeService"
AGENT = "cotenant.agent.v1.AgentService"
SERVICES = (PLACEMENT, NODE, AGENT)
PLACEMENTS, ALLOCATORS = "cotenant.placement_policies", "cotenant.cpu_allocators"
OPERATOR, NOBODY = node_pb2.NODE_STATE_OWNER_OPERATOR, node_pb2.NODE_STATE_OWNER_UNSPECIFIED
Mark = node_pb2.DrainNodeRequest | node_pb2.CordonNodeRequest | node_pb2.UncordonNodeRequest
SAVE_SECONDS_MAX = 2.0  # on shutdown, when the store may be unavailable


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Configuration of placement. `could_join` lists node shapes that may join; with `elastic`, any number of each."""

    placement: str = "consolidate"
    allocator: str = "proportional"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by policy
    heartbeat_seconds: float = 5.0
    lost_after_seconds: float = 300.0
    could_join: tuple[NodeShape, ...] = ()
    elastic: bool = False
    stop_costs: StopCosts = STOP_COSTS
    holding: HoldRules = RULES


class Placement(
    placement_grpc.PlacementServiceServicer, node_grpc.NodeServiceServicer, agent_grpc.AgentServiceServicer
):
    """Serves planning, nodes and agents from one cluster state."""

    def __init__(
        self, host: Host, store: Store, config: PlacementConfig, leadership_term: LeadershipTerm | None = None
    ) -> None:
        """Compose placement, and add its services to a server that has not started, or to its stand-in."""
        self.config, leadership_term = config, leadership_term or HeldTerm(store, LEADER)
        policy, allocator = self._policies()
        self.background = BackgroundTasks(Fenced, Halted, Outdated)
        self.cluster = Cluster()
        self.liveness_clock = LivenessClock(config.heartbeat_seconds)
        self.committer = Committer(store, leadership_term)
        self.sessions = Sessions(self.cluster.address_of)
        self.events = AttemptEvents()
        self.output_relay = OutputRelay(self.sessions)
        self.session_relay = SessionRelay(self.sessions)
        self.attempts = AttemptStore(self.cluster, self.committer, self.sessions, self.events, self.background)
        self.resizes = Resizes(self.cluster, self.committer, self.sessions, self.attempts, self.background)
        self.job_classes = JobClasses(self.cluster, self.committer, allocator)
        self.tracker = AttemptTracker(self.cluster, self.attempts, self.sessions, self.job_classes, allocator)
        self.rebalancer = CpuRebalancer(self.cluster, self.tracker, self.resizes, self.job_classes, allocator)
        self.registry = AgentRegistry(
            self.cluster,
            self.committer,
            self.sessions,
            self.attempts,
            self.resizes,
            self.tracker,
            CpuHotplug(self.cluster, self.attempts, self.resizes),
            self.liveness_clock,
            leadership_term,
            self.background,
            holding=config.holding,
            heartbeat_seconds=config.heartbeat_seconds,
            lost_after_seconds=config.lost_after_seconds,
            on_disconnect=self.output_relay.node_disconnected,
            trust=trust_of(store),
        )
        self.leadership = PlacementLeadership(
            store,
            leadership_term,
            self.cluster,
            self.committer,
            self.sessions,
            self.events,
            self.registry,
            self.job_classes,
            self.liveness_clock,
            partial(_set_serving, host),
        )
        self.plan_runner = PlanRunner(
            self.cluster,
            self.attempts,
            self.resizes,
            self.job_classes,
            policy,
            allocator,
            config.stop_costs,
            self.background,
            self.leadership.check,
            self.registry.suspects,
        )
        self.start_forecaster = StartForecaster(self.cluster, self._policies, self.leadership.check)
        host.add(placement_grpc.add_PlacementServiceServicer_to_server, self, PLACEMENT)
        host.add(node_grpc.add_NodeServiceServicer_to_server, self, NODE)
        host.add(agent_grpc.add_AgentServiceServicer_to_server, self, AGENT)

    def _policies(self) -> tuple[PlacementPolicy, CpuAllocator]:
        """Return new instances of the configured policies."""
        config = self.config
        return (
            plugins.load(PLACEMENTS, config.placement, config.options.get(config.placement, {})),
            plugins.load(ALLOCATORS, config.allocator, config.options.get(config.allocator, {})),
        )

    # Life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the state and start the background tasks."""
        await self.leadership.load()
        self.background.forever("placement-nodes", self._watch_nodes)
        self.background.forever("placement-probe", self._probe)
        self.background.forever("placement-dealing", self.rebalancer.run)
        self.background.forever("placement-kinds", self.job_classes.run)
        self.background.forever("placement-trust", self.leadership.reload_when_invalid)
        self.background.forever("placement-gauges", Gauges(self.cluster).run)
        self.background.forever("placement-suspects", self.registry.suspects.run)

    async def close(self) -> None:
        """End all streams and stop committing."""
        self.sessions.close_all()
        self.events.close()
        await self.background.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVE_SECONDS_MAX):
                await self.job_classes.save()
        await self.committer.close()

    async def _watch_nodes(self) -> None:
        interval_seconds = min(self.config.heartbeat_seconds, self.config.lost_after_seconds / 4)
        looks = max(1, round(interval_seconds / self.liveness_clock.tick_seconds))
        while True:
            for _ in range(looks):
                await asyncio.sleep(interval_seconds / looks)
                self.liveness_clock.tick()
            self.registry.expire_silent_nodes()
            self.leadership.disconnect_agents_if_uncertain()
            with suppress(*NOT_COMMITTED):
                await self.registry.node_removal.remove()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_seconds)
            await self.leadership.probe()

    # Planning ------------------------------------------------------------------------------------------------

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: object
    ) -> placement_pb2.PlanPlacementResponse:
        """Decide a plan, hold its allocations, commit them and inform the agents."""
        self.leadership.check()
        answer = await self.leadership.committed(self.plan_runner.plan(request))
        if answer.refused and not answer.placed:  # nothing was committed, and a refusal may be valid until nodes change
            await self.leadership.confirm_leadership()
        return answer

    async def ResizeReplicas(
        self, request: placement_pb2.ResizeReplicasRequest, context: object
    ) -> placement_pb2.ResizeReplicasResponse:
        """Give elastic jobs that run another number of replicas."""
        self.leadership.check()
        return await self.leadership.committed(self.plan_runner.resize(request))

    async def ForecastStarts(
        self, request: placement_pb2.ForecastStartsRequest, context: object
    ) -> placement_pb2.ForecastStartsResponse:
        """Return when waiting jobs will probably start; decides nothing."""
        return await self.start_forecaster.forecast(request)

    async def AdviseAttempts(
        self, request: placement_pb2.AdviseAttemptsRequest, context: object
    ) -> placement_pb2.AdviseAttemptsResponse:
        """Record new estimates and start profiles of running attempts."""
        self.leadership.check()
        return placement_pb2.AdviseAttemptsResponse(refused=self.tracker.advise(request.advice))

    async def StopAttempts(
        self, request: placement_pb2.StopAttemptsRequest, context: object
    ) -> placement_pb2.StopAttemptsResponse:
        """Stop attempts with their grace."""
        self.leadership.check()
        if request.reason not in specs.STOP_REASONS.names:
            raise errors.invalid([Violation("reason", f"is {request.reason}, which is not a stop reason")])
        await self.leadership.committed(self.attempts.confirm(leader_condition(request.term)))
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
        """Delete the records of attempts whose end the queue has committed."""
        self.leadership.check()
        keys = [(victim.job_id, victim.number) for victim in request.attempts]
        await self.leadership.committed(
            self.background.finish(self.attempts.forget(keys, leader_condition(request.term)))
        )
        return placement_pb2.ForgetAttemptsResponse()

    async def WatchAttempts(
        self, request: placement_pb2.WatchAttemptsRequest, context: object
    ) -> AsyncIterator[placement_pb2.WatchAttemptsResponse]:
        """Stream every change of attempts and capacity."""
        self.leadership.check()
        async for event in self.events.watch(request.after_revision):
            yield event

    async def GetCapacity(
        self, request: placement_pb2.GetCapacityRequest, context: object
    ) -> placement_pb2.GetCapacityResponse:
        """Return the cluster's total and free capacity and its node shapes."""
        self.leadership.check()
        response = placement_pb2.GetCapacityResponse(
            capacity=planner.capacity(self.cluster), elastic=self.config.elastic
        )
        for shape in (*self.cluster.shapes(), *self.config.could_join):
            response.shapes.append(specs.shape_to_wire(shape))
        await self.leadership.confirm_leadership()  # the caller asks again only after a change
        return response

    async def ReadAttemptLogs(
        self, request: placement_pb2.ReadAttemptLogsRequest, context: object
    ) -> AsyncIterator[placement_pb2.ReadAttemptLogsResponse]:
        """Stream the output or the files that the nodes' agents read."""
        live = self.cluster.attempts.get(request.job_id)
        named = list(request.node_ids)
        if request.HasField("files"):
            node_ids = named[:1]  # each node has a working directory of its own
        else:
            node_ids = live.nodes if live and live.key[1] == request.number else named
        async for piece in self.output_relay.read(request, node_ids):
            yield piece

    async def OpenAttemptSession(
        self, requests: AsyncIterator[placement_pb2.OpenAttemptSessionRequest], context: object
    ) -> AsyncIterator[placement_pb2.OpenAttemptSessionResponse]:
        """Relay a session to the agent of a node."""
        self.leadership.check()
        async with aclosing(self.session_relay.open(requests)) as responses:
            async for response in responses:
                yield response

    # Agents --------------------------------------------------------------------------------------------------

    async def Connect(
        self, requests: AsyncIterator[agent_pb2.ConnectRequest], context: object
    ) -> AsyncIterator[agent_pb2.ConnectResponse]:
        """Serve one agent's stream."""
        self.leadership.check()
        with committing():
            async for message in self.registry.connect(requests):
                yield message

    async def UploadOutput(
        self, requests: AsyncIterator[agent_pb2.UploadOutputRequest], context: object
    ) -> agent_pb2.UploadOutputResponse:
        """Relay an agent's output upload to its reader."""
        await self.output_relay.upload(requests)
        return agent_pb2.UploadOutputResponse()

    async def ServeSession(
        self, requests: AsyncIterator[agent_pb2.ServeSessionRequest], context: object
    ) -> AsyncIterator[agent_pb2.ServeSessionResponse]:
        """Relay a session that an agent carries to its caller."""
        async with aclosing(self.session_relay.serve(requests)) as responses:
            async for response in responses:
                yield response

    # Nodes ---------------------------------------------------------------------------------------------------

    def _node(self, node_id: str) -> Node:
        self.leadership.check()
        if node := self.cluster.nodes.get(node_id):
            return node
        raise errors.not_found("node", node_id, near=self.cluster.nodes)

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: object) -> node_pb2.GetNodeResponse:
        """Return one node."""
        return node_pb2.GetNodeResponse(node=self.registry.describe(self._node(request.id)))

    async def ListNodes(self, request: node_pb2.ListNodesRequest, context: object) -> node_pb2.ListNodesResponse:
        """Return a page of all nodes."""
        nodes = self.cluster.nodes

        def message(node_id: str) -> node_pb2.Node | None:
            node = nodes.get(node_id)
            return self.registry.describe(node) if node else None

        asked = PageRequest.read(request.page_size, request.page_token, "nodes")
        page = await page_of_messages(sorted(nodes), message, asked)
        return node_pb2.ListNodesResponse(nodes=page.items, next_page_token=page.next_token, total_size=len(nodes))

    async def DrainNode(self, request: node_pb2.DrainNodeRequest, context: object) -> node_pb2.DrainNodeResponse:
        """Cordon a node and stop its attempts with their grace."""
        return node_pb2.DrainNodeResponse(node=await self._mark(request, NodeState.NODE_STATE_DRAINING, request.reason))

    async def CordonNode(self, request: node_pb2.CordonNodeRequest, context: object) -> node_pb2.CordonNodeResponse:
        """Cordon a node: it gets no new work."""
        return node_pb2.CordonNodeResponse(
            node=await self._mark(request, NodeState.NODE_STATE_CORDONED, request.reason)
        )

    async def UncordonNode(
        self, request: node_pb2.UncordonNodeRequest, context: object
    ) -> node_pb2.UncordonNodeResponse:
        """Uncordon a node: it takes work again."""
        return node_pb2.UncordonNodeResponse(node=await self._mark(request, NodeState.NODE_STATE_READY, ""))

    async def ReleaseGpu(self, request: node_pb2.ReleaseGpuRequest, context: object) -> node_pb2.ReleaseGpuResponse:
        """Clear a GPU's health hold; its agent checks the GPU again."""
        node = self._node(request.id)
        uuids = [gpu.uuid for gpu in node.inventory.gpus]
        if request.gpu_uuid not in uuids:
            raise errors.not_found("GPU", request.gpu_uuid, near=uuids)
        self.registry.release_gpu(node, request.gpu_uuid)
        return node_pb2.ReleaseGpuResponse(node=self.registry.describe(node))

    async def ForgetNode(self, request: node_pb2.ForgetNodeRequest, context: object) -> node_pb2.ForgetNodeResponse:
        """Remove a node that is permanently lost, and give up its attempts."""
        self.leadership.check()
        if self.registry.node_removal.was_removed_by(request.id, request.request_id):
            return node_pb2.ForgetNodeResponse(node=node_pb2.Node(id=request.id))
        return await self.leadership.committed(self.background.finish(self._forget(request)))

    async def _forget(self, request: node_pb2.ForgetNodeRequest) -> node_pb2.ForgetNodeResponse:
        node_removal = self.registry.node_removal
        node = await node_removal.forget(
            request.id, request.reason, request.request_id, powered_off=request.powered_off
        )
        described = self.registry.describe(node)
        await node_removal.remove_if_empty(node)
        return node_pb2.ForgetNodeResponse(node=described)

    async def _mark(self, request: Mark, state: NodeState.ValueType, reason: str) -> node_pb2.Node:
        self._node(request.id)
        owner = OPERATOR if state != NodeState.NODE_STATE_READY else NOBODY
        marking = self.registry.mark(request.id, state, reason, owner, request.request_id)
        return self.registry.describe(await self.leadership.committed(self.background.finish(marking)))


def use_policies(policies: PolicyServicer, config: PlacementConfig) -> None:
    """Register the policies that placement uses with the policy service."""
    policies.use(PLACEMENTS, config.placement, options=config.options)
    policies.use(ALLOCATORS, config.allocator, options=config.options)


async def start(
    server: Server,
    store: Store,
    policies: PolicyServicer,
    config: PlacementConfig = PlacementConfig(),
    leadership_term: LeadershipTerm | None = None,
) -> Placement:
    """Load the state and add placement to a server that has not started yet.

    `leadership_term` is its leadership, if held.

    Raises:
        UnknownPolicy: a policy is not installed, or broken.
        BadOption: a policy does not take an option.
        StoreUnavailable: the state cannot be read.
    """
    placement = Placement(server, store, config, leadership_term)
    use_policies(policies, config)
    await placement.start()
    return placement


def _set_serving(host: Host, serving: bool) -> None:
    for service in SERVICES:
        host.set_serving(service, serving)
