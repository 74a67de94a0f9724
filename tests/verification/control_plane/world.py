"""A small mesh in one thread: two replicas of queue and placement, some nodes, clients, and their faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from tests.verification.control_plane.clients import INVALID_STATE, Clients
from tests.verification.control_plane.nodes import FencedAgent
from tests.verification.control_plane.simulated_rpc import (
    SLOW_SECONDS_MAX,
    SLOW_SHARE,
    MuteServer,
    Network,
    SimulatedServer,
)
from tests.verification.control_plane.stores import ProcessStore, RecordedStore
from tests.verification.control_plane.virtual_time import BEGIN_UNIX_SECONDS, Process, current_process

from cotenant.core.failures.retry import RetryRules
from cotenant.core.model.lifecycle import Phase
from cotenant.core.scheduling.admission import Rules
from cotenant.core.scheduling.fair_share import FairShare
from cotenant.history.checker import Checker
from cotenant.history.events import Event
from cotenant.history.stored import commit_of
from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import HeldTerm, leader_of
from cotenant.leadership.replica import Replica
from cotenant.rpc.server import Host
from cotenant.services.placement.api import server as placement
from cotenant.services.queue.api import server as queue
from cotenant.services.queue.queue_replica import QueueReplica
from cotenant.store.port import Changes, Entry, Store, StoreUnavailable
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc

REPLICAS = {"placement": ("placement-0", "placement-1"), "queue": ("queue-0", "queue-1")}
PLACEMENT = placement.PlacementConfig(heartbeat_seconds=1.0, lost_after_seconds=6.0)
REMEMBERING = Rules(fair_share=FairShare.TENANTS, usage_half_life_seconds=60.0)
RETRY_RULES = RetryRules(
    back_off_seconds=0.5, back_off_seconds_max=2.0, untold_back_off_seconds=0.5, untold_back_off_seconds_max=2.0
)
QUEUES = (
    queue.QueueConfig(
        allocator="restless", options={"fifo": {"mode": "backfill"}}, retrying=RETRY_RULES, rules=REMEMBERING
    ),
    queue.QueueConfig(
        allocator="restless", policy="las", options={"las": {"thresholds": "0.5,2"}}, retrying=RETRY_RULES
    ),  # preempts
)
SETTLE_SECONDS_MAX, WATCH_SECONDS_MAX = 120.0, 10.0
WATCHER_COUNT = 1


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a world, and how long faults last."""

    jobs_min: int  # an array counts as one
    jobs_max: int
    nodes_min: int
    nodes_max: int
    submit_seconds: float  # time in which all are submitted
    trouble_seconds: float
    pause_seconds: float  # average time between two faults


SMALL = Size(3, 6, 2, 3, submit_seconds=3.0, trouble_seconds=5.0, pause_seconds=0.5)
LONG = Size(6, 14, 2, 4, submit_seconds=10.0, trouble_seconds=14.0, pause_seconds=1.0)
LONG_EVERY = 8  # seeds


def size_of(seed: int) -> Size:
    """Return the size of a seed's world: many small worlds find more than few long ones, but not everything."""
    return SMALL if seed % LONG_EVERY else LONG


class World:
    """The whole simulated mesh of one seed."""

    def __init__(self, seed: int, size: Size) -> None:
        self.seed, self.size = seed, size
        self._config = Random(f"queue {seed}").choice(QUEUES)
        self.rng = Random(f"world {seed}")
        self.loop = asyncio.get_running_loop()
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.failures: list[str] = []
        self.store = RecordedStore(self.loop.time, self._committed)
        self.network = Network(self.rng)
        self.processes: dict[str, Process] = {}
        self.stores: dict[str, ProcessStore] = {}
        self.agents: dict[str, FencedAgent] = {}
        self.clients = Clients(self.network, self.rng, self.events, self.failures)
        self.armed: dict[tuple[str, str], Callable[[Process], None]] = {}  # by process and fail point
        self.reached: Counter[str] = Counter()
        self.clocks_jump = False  # then timestamps in records are unreliable
        self._checker, self._checked = Checker(PLACEMENT.lost_after_seconds), 0

    def leader(self, service: str) -> str:
        """Return the current holder of a service's leadership key; "" if there is none."""
        entry = self.store.now(f"{service}/leader")
        leader = leader_of(entry) if entry else None
        return leader.address if leader else ""

    async def reach(self, point: str) -> None:
        """Execute the armed action when a process reaches a fail point."""
        self.reached[point] += 1
        process = current_process()
        if process and (action := self.armed.pop((process.name, point), None)):
            action(process)
            await process.halt()

    def _committed(self, changes: Changes) -> None:
        began = None if self.clocks_jump else BEGIN_UNIX_SECONDS
        self.events.append(commit_of(changes, self.loop.time(), began_unix_seconds=began))

    # Processes -----------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a replica of a service as a new process, unless another fault has restarted it already."""
        if name in self.processes and not self.processes[name].dead:
            return
        process = self.processes[name] = Process(name)
        store = self.stores[name] = ProcessStore(self.store, process, self.rng, self.events.append)
        process.start(self._serve(name, process, store))

    async def _serve(self, name: str, process: Process, store: ProcessStore) -> None:
        service = name.partition("-")[0]
        server = SimulatedServer(process)
        election = Election(store, f"{service}/leader", name, alone=False)
        while True:
            led = self._replica(service, process, server, store, election)
            self.network.servers[name] = server
            try:
                await led.start()
                await led.run()
            except StoreUnavailable:  # as a process manager would
                await led.close()
                await asyncio.sleep(0.3)
            except Exception as error:
                if not process.dead:
                    self.failures.append(f"{name} ended by itself: {error!r}")
                return
            server = SimulatedServer(process)
            election = Election(store, f"{service}/leader", name, alone=False)

    def _replica(
        self, service: str, process: Process, server: SimulatedServer, store: ProcessStore, election: Election
    ) -> Replica:
        stand_in: Any = server
        if service == "queue":
            made = self._queue(process)
            return Replica(stand_in, store, election, queue.SERVICES, "queue/", made.lead, read=made.read)
        return Replica(stand_in, store, election, placement.SERVICES, "placement/", self._placement())

    def _placement(self) -> Callable[[Host, Store, HeldTerm], Awaitable[placement.Placement]]:
        async def lead(host: Host, store: Store, held: HeldTerm) -> placement.Placement:
            made = placement.Placement(host, store, PLACEMENT, held)
            try:
                await made.start()
            except BaseException:
                await made.close()
                raise
            return made

        return lead

    def _queue(self, process: Process) -> QueueReplica:
        to_placement = self.network.channel(process, REPLICAS["placement"])
        to_predictor = self.network.channel(process, ["predictor"])  # no server: there are no predictions
        return QueueReplica(self._config, to_placement, to_predictor)

    def start_watchers(self) -> None:
        """Start watchers of all jobs, and a reader of ended jobs for each replica of the queue."""
        process = self.processes["lookers"] = Process("lookers")
        for number in range(WATCHER_COUNT):
            process.start(self.clients.watch(f"watcher-{number}"))
        for name in REPLICAS["queue"]:
            process.start(self.clients.read(name))

    async def kill(self, name: str) -> None:
        """Kill a replica."""
        self.network.servers.pop(name, None)
        await self.processes[name].kill()

    def add_node(self, name: str) -> None:
        """Add a node; its agent connects to any reachable placement."""
        process = self.processes[name] = Process(name)
        channel = self.network.channel(process, REPLICAS["placement"])
        agent = FencedAgent(
            process,
            channel,
            self.events.append,
            self.rng,
            gpus=self.rng.choice([2, 4]),
            cores=8,
            run_seconds=0.3 + 3 * self.rng.random(),
        )
        self.agents[name] = agent
        agent.start()

    def mute(self, name: str) -> None:
        """Put a server that never answers in the place of a killed replica."""
        self.network.servers[name] = MuteServer(Process(name))

    # Operators -----------------------------------------------------------------------------------------------

    async def close_node(self, name: str, seconds: float, *, drain: bool) -> None:
        """Drain or cordon a node for a while."""
        stub: Any = node_service_pb2_grpc.NodeServiceStub(
            self.network.channel(Process("operator"), REPLICAS["placement"])
        )
        gone = (*INVALID_STATE, grpc.StatusCode.NOT_FOUND)  # it was forgotten
        if drain:
            await self.clients.call_until_answered(stub.DrainNode, node_pb2.DrainNodeRequest(id=name), refused=gone)
        else:
            await self.clients.call_until_answered(stub.CordonNode, node_pb2.CordonNodeRequest(id=name), refused=gone)
        await asyncio.sleep(seconds)
        await self.clients.call_until_answered(stub.UncordonNode, node_pb2.UncordonNodeRequest(id=name), refused=gone)

    async def forget_node(self, name: str) -> None:
        """Forget a switched-off node; a retry may hear that it does not exist."""
        stub: Any = node_service_pb2_grpc.NodeServiceStub(
            self.network.channel(Process("operator"), REPLICAS["placement"])
        )
        request = node_pb2.ForgetNodeRequest(id=name, reason="it is switched off", powered_off=True)
        await self.clients.call_until_answered(stub.ForgetNode, request, refused=[grpc.StatusCode.NOT_FOUND])

    # Checks --------------------------------------------------------------------------------------------------

    def checked(self) -> Checker:
        """Return the checker, up to date with all events."""
        for event in self.events[self._checked :]:
            self._checker.take(event)
        self._checked = len(self.events)
        return self._checker

    # The end -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults."""
        self.store.away = self.store.full = False
        self.store.lag_seconds = 0.0
        self.network.lags.clear()
        self.armed.clear()
        self.network.cut.clear()
        self.network.slow_share, self.network.slow_seconds_max = SLOW_SHARE, SLOW_SECONDS_MAX
        for store in self.stores.values():
            store.losing, store.reached = 0.0, True
        for process in self.processes.values():
            process.resume()
        for agent in self.agents.values():
            agent.refusing = ""

    async def settle(self) -> None:
        """Wait until all work has ended."""
        kept: Sequence[Entry] = ()
        try:
            async with asyncio.timeout(SETTLE_SECONDS_MAX):
                while True:
                    checker = self.checked()
                    kept = (await self.store.list("placement/attempts/")).entries
                    ended = all(job.phase.ended for job in checker.kept())
                    if ended and not kept and not any(agent.attempts for agent in self.agents.values()):
                        break
                    await self._resume(checker)
                    await asyncio.sleep(0.25)
        except TimeoutError:
            left = sorted(job.job_id for job in self.checked().kept() if not job.phase.ended)
            on_nodes = {name: sorted(agent.attempts) for name, agent in self.agents.items() if agent.attempts}
            self.failures.append(f"not settled: jobs {left}, records {[one.key for one in kept]}, nodes {on_nodes}")
            return
        with suppress(TimeoutError):  # then the checker reports what is missing
            async with asyncio.timeout(WATCH_SECONDS_MAX):
                while not all(self._shows(seen, checker) for seen in self.clients.seen.values()):  # noqa: ASYNC110  # any of several may change
                    await asyncio.sleep(0.25)

    @staticmethod
    def _shows(seen: Mapping[str, Phase], checker: Checker) -> bool:
        return all(seen.get(job.job_id) is job.phase for job in checker.kept())

    async def _resume(self, checker: Checker) -> None:
        """Resume all suspended jobs."""
        suspended = [job.job_id for job in checker.kept() if job.phase is Phase.SUSPENDED]
        if not suspended:
            return
        stub = self.clients.stub("operator")
        for job_id in suspended:
            await self.clients.call_until_answered(stub.ResumeJob, pb.ResumeJobRequest(id=job_id))

    async def close(self) -> None:
        """Kill all processes."""
        for name, process in list(self.processes.items()):
            self.network.servers.pop(name, None)
            await process.kill()
        self.network.close()
        await self.store.close()
