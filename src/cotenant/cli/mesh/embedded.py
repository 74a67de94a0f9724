"""The whole control plane in one process: every service on one loopback port, one store; agents are processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import structlog

from cotenant.cli.mesh.agent_processes import AgentProcesses
from cotenant.cli.mesh.security_options import Guarding, security_of
from cotenant.core.failures.launch_health import RULES as HOLDING
from cotenant.core.failures.launch_health import HoldRules
from cotenant.core.failures.retry import RetryRules
from cotenant.core.policy.options import by_owner
from cotenant.core.scheduling.admission import SHARING, Rules
from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leadership_set import Offices
from cotenant.leadership.leadership_term import Held
from cotenant.leadership.replica_service import serve_description
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.rpc import access
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.rpc.task_group import Background
from cotenant.security.server_security import PLAIN
from cotenant.services.contention.api import server as contention
from cotenant.services.placement.api import server as placement
from cotenant.services.placement.placement_leadership import LEADER as PLACEMENT_LEADER
from cotenant.services.placement.planning.cluster_view import StopCosts
from cotenant.services.predictor.api import server as predictor
from cotenant.services.predictor.predictor_replica import LEADER as PREDICTOR_LEADER
from cotenant.services.predictor.profiling.profile_planner import ProfileRules
from cotenant.services.queue.api import server as queue
from cotenant.services.queue.estimates.observation_sink import WINDOW_SECONDS
from cotenant.services.queue.jobs.transitions import RETRYING
from cotenant.services.queue.queue_replica import LEADER as QUEUE_LEADER
from cotenant.store.capacity import NO_LIMITS, StoreLimits
from cotenant.store.compaction import KEPT_SECONDS, Upkeep
from cotenant.store.guarded_store import trust_of
from cotenant.store.identity_check import Trust
from cotenant.store.open import open_store
from cotenant.store.port import Store
from cotenant.store.revision_offset import is_of_one_process
from cotenant.store.witness_file import path_of
from cotenant.v1 import node_service_pb2, node_service_pb2_grpc

if TYPE_CHECKING:
    from cotenant.v1.node_service_pb2_grpc import NodeServiceAsyncStub

log = structlog.get_logger()

STORE_FILE = "cotenant.sqlite"
NODES_READY_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """What the mesh is made of. Policies go by name; their options by group, for example `queue.mode`."""

    state_dir: Path
    listen: str = "127.0.0.1:0"
    store_url: str = ""  # empty: an SQLite file in the state directory
    store_limits: StoreLimits = NO_LIMITS
    agents: Sequence[AgentConfig] = ()
    queue: str = "fifo"
    placement: str = "consolidate"
    allocator: str = "proportional"
    predictors: Sequence[str] = ("history",)
    contention: str = "coda-eliminator"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by group
    heartbeat_seconds: float = 5.0
    lost_after_seconds: float = 300.0
    rules: Rules = SHARING
    window_seconds: float = WINDOW_SECONDS  # over which the rates of running jobs are seen
    failure_rules: str = ""  # a file of the operator's
    retrying: RetryRules = RETRYING
    holding: HoldRules = HOLDING
    checkpoint_seconds: float = 300.0  # jobs are taken to save their work about that often
    ended_jobs: int = 20_000  # so many are kept
    ended_days: float = 30.0  # for so long at most
    history_seconds: float = KEPT_SECONDS  # of what the store was
    archive: Path | None = None  # where they are written before they are forgotten
    profile_seconds: float = 300.0  # what a profile of a running job may take; 0: none is made
    guarding: Guarding | None = None  # None: the mesh's own token alone


@dataclass(frozen=True, slots=True)
class Closing:
    """A part that was started, and how it is ended."""

    name: str
    close: Callable[[], Awaitable[None] | None]


class EmbeddedMesh:
    """Everything that was started, to be closed; what runs on nodes runs on then.

    `agents` are processes that were started already, and wait for their settings.
    """

    def __init__(self, config: MeshConfig, agents: AgentProcesses | None = None) -> None:
        self.config = config
        self.token = ""
        self.address = ""
        self.channel: Channel | None = None
        self._closing: list[Closing] = []
        self._offices: Offices | None = None
        self._trust: Trust | None = None
        self._published = False
        self._agents = agents or AgentProcesses()

    async def start(self) -> None:
        """Start everything, or nothing.

        Raises:
            UnknownPolicy, BadOption: a policy cannot be used as told.
            ValueError: the store's URL names none.
            StoreInUse, StoreUnavailable: the state cannot be read.
            AnotherLeads: another process serves on the same store.
            CannotListen: the address cannot be taken.
            NoAccess: the state directory is not ours to write.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config = self.config
        self.token = access.ensure_token(config.state_dir)
        url = config.store_url or f"sqlite:{config.state_dir / STORE_FILE}"
        store = await open_store(url, path_of(config.state_dir, "cotenant"), config.store_limits)
        self._trust = trust_of(store)
        self._closing.append(Closing("store", store.close))
        upkeep = Background()
        upkeep.forever("store-upkeep", Upkeep(store, kept_seconds=self.config.history_seconds).run)
        self._closing.append(Closing("upkeep", upkeep.close))
        guarding = config.guarding
        security = security_of(guarding, config.state_dir, "cotenant", self.token) if guarding else PLAIN
        server = Server(config.listen, self.token, security=security)
        port = server.bind()
        self.address = f"{config.listen.rpartition(':')[0]}:{port}"
        channel = self.channel = connect(_reachable(self.address), self.token)
        self._closing.append(Closing("channel", channel.close))
        predicts, places_by, queues = await self._elected(store)
        policies = serve_policies(server)
        serve_description(server, store=store)
        predicting = await predictor.start(server, _fenced(store, predicts), policies, self._predictor())
        self._closing.append(Closing("predictor", predicting.close))
        self._closing.append(Closing("server", lambda: server.stop(grace_seconds=1.0)))
        watching = await contention.start(server, policies, self._contention(), queue=channel)
        self._closing.append(Closing("contention", watching.close))
        places = await placement.start(server, store, policies, self._placement(), places_by)
        self._closing.append(Closing("placement", places.close))
        term = queues.term if queues else 0
        jobs = await queue.start(server, _fenced(store, queues), policies, self._queue(), channel, channel, term)
        self._closing.append(Closing("queue", jobs.close))
        await server.start()
        jobs.run()
        self._start_agents()
        access.publish(config.state_dir, Endpoints.one(_reachable(self.address)))
        self._published = True

    async def _elected(self, store: Store) -> Sequence[Held | None]:
        """Be elected to lead predictor, placement and queue, where others could; else nobody has to be."""
        if is_of_one_process(store):
            return None, None, None
        self._offices = Offices(store, self.address)
        self._closing.append(Closing("offices", self._offices.close))
        return await self._offices.take((PREDICTOR_LEADER, PLACEMENT_LEADER, QUEUE_LEADER))

    async def lost(self) -> str:
        """Wait until this mesh may lead no more, which one that has its store alone always may; tells why."""
        if self._offices:
            return await self._offices.lost()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def _options(self, group: str) -> Mapping[str, str]:
        return self.config.options.get(group, {})

    def _predictor(self) -> predictor.Config:
        names = self.config.predictors
        return predictor.Config(
            predictors=names,
            options=by_owner(names, self._options("predictor")),
            profiles=ProfileRules(seconds=self.config.profile_seconds),
        )

    def _contention(self) -> contention.Config:
        return contention.Config(policy=self.config.contention, options=self._options("contention"))

    def _placement(self) -> placement.PlacementConfig:
        config = self.config
        return placement.PlacementConfig(
            placement=config.placement,
            allocator=config.allocator,
            options={
                config.placement: self._options("placement"),
                config.allocator: self._options("allocator"),
            },
            heartbeat_seconds=config.heartbeat_seconds,
            lost_after_seconds=config.lost_after_seconds,
            stop_costs=StopCosts(config.checkpoint_seconds),
            holding=config.holding,
        )

    def _queue(self) -> queue.QueueConfig:
        config = self.config
        return queue.QueueConfig(
            policy=config.queue,
            options={config.queue: self._options("queue")},
            rules=config.rules,
            window_seconds=config.window_seconds,
            failure_rules=config.failure_rules,
            retrying=config.retrying,
            tenant_jobs_max=config.guarding.limits.jobs_per_tenant if config.guarding else 0,
            tenant_bytes_max=config.guarding.limits.bytes_per_tenant if config.guarding else 0,
            ended_kept_max=config.ended_jobs,
            ended_kept_seconds=config.ended_days * 86_400,
            archive=config.archive,
        )

    def _start_agents(self) -> None:
        reached, guarding = _reachable(self.address), self.config.guarding
        complete = [
            replace(config, placement_endpoint=reached, contention_endpoint=reached, token=self.token)
            for config in self.config.agents
        ]
        self._agents.start(complete, guarding.tls_files if guarding else None)

    async def nodes_ready(self) -> Sequence[node_service_pb2.Node]:
        """Return the nodes of this mesh's agents, once all of them are connected.

        Raises:
            AgentFailed: an agent cannot run.
            StoreRegressed, StoreReplaced: an agent knows that the store is not what it was.
        """
        stub = cast("NodeServiceAsyncStub", node_service_pb2_grpc.NodeServiceStub(self.channel))
        wanted = {config.node_id for config in self.config.agents}
        while True:
            if self._trust:
                self._trust.check()
            response = await stub.ListNodes(node_service_pb2.ListNodesRequest(page_size=1000))
            ready = [
                node for node in response.nodes if node.id in wanted and node.state != node_service_pb2.NODE_STATE_AWAY
            ]
            if len(ready) == len(wanted):
                return ready
            await self._agents.failed(NODES_READY_POLL_SECONDS)

    async def close(self) -> None:
        """End agents first, so that the services hear from them to the last; jobs run on."""
        if self._published:  # else what stands there is another mesh's
            access.withdraw(self.config.state_dir)
            self._published = False
        await self._agents.close()
        for step in reversed(self._closing):
            try:
                if (ending := step.close()) is not None:
                    await ending
            except Exception:  # the other parts must be closed all the same
                log.exception("close_failed", part=step.name)
        self._closing.clear()


def _fenced(store: Store, held: Held | None) -> Store:
    """The store of who was elected: nothing is written any more once another leads."""
    return FencedStore(store, held) if held else store


def _reachable(address: str) -> str:
    """The address under which a process of this machine reaches a listener; 0.0.0.0 is reached at the loopback."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else address
