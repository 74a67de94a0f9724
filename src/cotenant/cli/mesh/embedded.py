"""The whole control plane in one process: all services on one loopback port with one store. Agents are processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cotenant import telemetry
from cotenant.cli.mesh.agent_processes import AgentProcesses
from cotenant.cli.mesh.security_options import SecuritySettings, make_security
from cotenant.cli.pages import pages
from cotenant.core.failures.launch_health import RULES as HOLDING
from cotenant.core.failures.launch_health import HoldRules
from cotenant.core.failures.retry import RetryRules
from cotenant.core.policy.options import options_by_policy
from cotenant.core.scheduling.admission import SHARING, Rules
from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leadership_set import LeadershipSet
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.leadership.process_service import serve_process_service
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.rpc import access, gc_tuning
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.secret_keys import KEYS_FILE
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
from cotenant.services.queue.folders.folder_store import FolderRules
from cotenant.services.queue.jobs.transitions import RETRY_RULES_DEFAULT
from cotenant.services.queue.notifications.rules import OFF, NotificationRules
from cotenant.services.queue.queue_replica import LEADER as QUEUE_LEADER
from cotenant.store.capacity import NO_LIMITS, StoreLimits
from cotenant.store.compaction import HISTORY_SECONDS, Compactor
from cotenant.store.guarded_store import trust_of
from cotenant.store.identity_check import Trust
from cotenant.store.open import open_store
from cotenant.store.port import Store
from cotenant.store.revision_offset import is_of_one_process
from cotenant.store.witness_file import path_of
from cotenant.v1 import node_service_pb2, node_service_pb2_grpc

if TYPE_CHECKING:
    from cotenant.v1.node_service_pb2_grpc import NodeServiceAsyncStub

log = telemetry.logger()

STORE_FILE = "cotenant.sqlite"
NODES_READY_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """The configuration of the mesh. Policies are given by name, their options by group, for example `queue.mode`."""

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
    window_seconds: float = WINDOW_SECONDS  # over which rates of running jobs are measured
    failure_rules: str = ""  # the operator's file
    retrying: RetryRules = RETRY_RULES_DEFAULT
    holding: HoldRules = HOLDING
    checkpoint_seconds: float = 300.0  # assumed interval of jobs' checkpoints
    ended_jobs: int = 20_000  # kept at most
    ended_days: float = 30.0  # kept at most this long
    history_seconds: float = HISTORY_SECONDS  # of store revisions
    folders: FolderRules | None = None  # None: in the state directory
    archive: Path | None = None  # where ended jobs are written before they are deleted
    notifications: NotificationRules = OFF
    profile_seconds: float = 300.0  # time limit of profiling a running job; 0: no profiling
    security_settings: SecuritySettings | None = None  # None: only the mesh's own token


@dataclass(frozen=True, slots=True)
class Closer:
    """A started part and how to close it."""

    name: str
    close: Callable[[], Awaitable[None] | None]


class EmbeddedMesh:
    """A mesh that runs: the services and agents of `start_mesh`."""

    def __init__(
        self,
        config: MeshConfig,
        address: str,
        channel: Channel,
        agents: AgentProcesses,
        trust: Trust | None,
        leadership: LeadershipSet | None,
        closing: list[Closer],
    ) -> None:
        self.config, self.address, self.channel = config, address, channel
        self._agents, self._trust, self._leadership, self._closing = agents, trust, leadership, closing

    async def lost(self) -> str:
        """Wait until this mesh loses its leadership and return the reason; never with a store of its own."""
        if self._leadership:
            return await self._leadership.lost()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def nodes_ready(self) -> Sequence[node_service_pb2.Node]:
        """Return the nodes of this mesh's agents once all of them are connected.

        Raises:
            AgentFailed: an agent cannot run.
            StoreRegressed, StoreReplaced: an agent remembers a different state of the store.
        """
        stub = cast("NodeServiceAsyncStub", node_service_pb2_grpc.NodeServiceStub(self.channel))
        wanted = {config.node_id for config in self.config.agents}
        while True:
            if self._trust:
                self._trust.check()
            ready = [
                node
                async for page in pages(stub.ListNodes, node_service_pb2.ListNodesRequest())
                for node in page.nodes
                if node.id in wanted and node.state != node_service_pb2.NODE_STATE_AWAY
            ]
            if len(ready) == len(wanted):
                return ready
            await self._agents.failed(NODES_READY_POLL_SECONDS)

    async def close(self) -> None:
        """Close the agents first, so that services receive their last reports; jobs keep running."""
        await _close(self._closing)


async def start_mesh(config: MeshConfig, agents: AgentProcesses | None = None) -> EmbeddedMesh:
    """Start the services and agents of a mesh, or nothing; jobs on nodes survive its end.

    `agents` are processes that are already started and wait for their settings.

    Raises:
        UnknownPolicy, BadOption: a policy or its options are invalid.
        ValueError: the store URL is invalid.
        StoreInUse, StoreUnavailable: the state cannot be read.
        LedByAnotherProcess: another process leads on the same store.
        CannotListen: the address cannot be bound.
        NoAccess: the state directory is not writable.
    """
    closing: list[Closer] = []
    agents = agents or AgentProcesses()
    try:
        return await _compose(config, agents, closing)
    except BaseException:
        await agents.close()
        await _close(closing)
        raise


async def _compose(config: MeshConfig, agents: AgentProcesses, closing: list[Closer]) -> EmbeddedMesh:
    """Start all parts in order; `closing` gets how to close those that have started."""
    token = access.ensure_token(config.state_dir)
    url = config.store_url or f"sqlite:{config.state_dir / STORE_FILE}"
    store = await open_store(url, path_of(config.state_dir, "cotenant"), config.store_limits)
    closing.append(Closer("store", store.close))
    upkeep = BackgroundTasks()
    upkeep.forever("store-upkeep", Compactor(store, kept_seconds=config.history_seconds).run)
    closing.append(Closer("upkeep", upkeep.close))
    secure = config.security_settings
    security = make_security(secure, config.state_dir, "cotenant", token) if secure else PLAIN
    server = Server(config.listen, token, security=security)
    address = f"{config.listen.rpartition(':')[0]}:{server.bind()}"
    reached = _reachable(address)
    channel = connect(reached, token)
    closing.append(Closer("channel", channel.close))
    leadership = None if is_of_one_process(store) else LeadershipSet(store, address)
    predicts: HeldTerm | None = None
    places_by: HeldTerm | None = None
    queues: HeldTerm | None = None
    if leadership:
        closing.append(Closer("leadership", leadership.close))
        predicts, places_by, queues = await leadership.take((PREDICTOR_LEADER, PLACEMENT_LEADER, QUEUE_LEADER))
    policies = serve_policies(server)
    serve_process_service(server, store=store)
    predicting = await predictor.start(server, _fenced(store, predicts), policies, _predictor(config))
    closing.append(Closer("predictor", predicting.close))
    closing.append(Closer("server", lambda: server.stop(grace_seconds=1.0)))
    watching = await contention.start(server, policies, _contention(config), queue=channel)
    closing.append(Closer("contention", watching.close))
    places = await placement.start(server, store, policies, _placement(config), places_by)
    closing.append(Closer("placement", places.close))
    term = queues.term if queues else 0
    jobs = await queue.start(server, _fenced(store, queues), policies, _queue(config), channel, channel, term)
    closing.append(Closer("queue", jobs.close))
    gc_tuning.freeze_young()  # what was loaded stays until the mesh ends
    await server.start()
    jobs.run()
    agents.start(_reaching(config, reached, token), secure.tls_files if secure else None)
    closing.append(Closer("agents", agents.close))
    access.publish(config.state_dir, Endpoints.one(reached))
    closing.append(Closer("address", lambda: access.withdraw(config.state_dir)))
    return EmbeddedMesh(config, address, channel, agents, trust_of(store), leadership, closing)


async def _close(closing: list[Closer]) -> None:
    """Close parts, the last one first; closing twice is no error."""
    while closing:
        step = closing.pop()
        try:
            if (ending := step.close()) is not None:
                await ending
        except Exception:  # the other parts must be closed anyway
            log.exception("close_failed", part=step.name)


def _reaching(config: MeshConfig, reached: str, token: str) -> Sequence[AgentConfig]:
    """Return the configurations of the agents, with the address of the services."""
    return [
        replace(agent, placement_endpoint=reached, contention_endpoint=reached, token=token) for agent in config.agents
    ]


def _predictor(config: MeshConfig) -> predictor.Config:
    names = config.predictors
    return predictor.Config(
        predictors=names,
        options=options_by_policy(names, config.options.get("predictor", {})),
        profiles=ProfileRules(seconds=config.profile_seconds),
    )


def _contention(config: MeshConfig) -> contention.Config:
    return contention.Config(policy=config.contention, options=config.options.get("contention", {}))


def _placement(config: MeshConfig) -> placement.PlacementConfig:
    return placement.PlacementConfig(
        placement=config.placement,
        allocator=config.allocator,
        options={
            config.placement: config.options.get("placement", {}),
            config.allocator: config.options.get("allocator", {}),
        },
        heartbeat_seconds=config.heartbeat_seconds,
        lost_after_seconds=config.lost_after_seconds,
        stop_costs=StopCosts(config.checkpoint_seconds),
        holding=config.holding,
    )


def _queue(config: MeshConfig) -> queue.QueueConfig:
    limits = config.security_settings.limits if config.security_settings else None
    return queue.QueueConfig(
        policy=config.queue,
        options={config.queue: config.options.get("queue", {})},
        allocator=config.allocator,
        allocator_options=config.options.get("allocator", {}),
        rules=config.rules,
        window_seconds=config.window_seconds,
        failure_rules=config.failure_rules,
        retrying=config.retrying,
        tenant_jobs_max=limits.jobs_per_tenant if limits else 0,
        tenant_bytes_max=limits.bytes_per_tenant if limits else 0,
        ended_kept_max=config.ended_jobs,
        ended_kept_seconds=config.ended_days * 86_400,
        archive=config.archive,
        folders=config.folders or FolderRules(config.state_dir / "uploads"),
        secret_keys=config.state_dir / KEYS_FILE,
        notifications=config.notifications,
    )


def _fenced(store: Store, held: HeldTerm | None) -> Store:
    """Return the store fenced by a leadership term, so that a deposed leader cannot write."""
    return FencedStore(store, held) if held else store


def _reachable(address: str) -> str:
    """Return the address at which local processes reach a listener; for 0.0.0.0 the loopback address."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else address
