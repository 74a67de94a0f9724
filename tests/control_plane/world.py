"""A small mesh in one thread: two replicas of queue and placement, some nodes, callers, and what befalls them."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import structlog
from tests.control_plane.clients import Clients
from tests.control_plane.nodes import FencedAgent
from tests.control_plane.stores import ProcessStore, RecordedStore
from tests.control_plane.virtual import BEGIN_UNIX_SECONDS, Process, current_process, virtual_time
from tests.control_plane.wire import SLOW_SECONDS_MAX, SLOW_SHARE, Network, SimulatedServer

from cotenant import fail_points, plugins
from cotenant.core.failing.retrying import RetryRules
from cotenant.core.lifecycle import Phase
from cotenant.core.policy import Sizing
from cotenant.core.sizing import resizing
from cotenant.history.checker import Broken, Checker
from cotenant.history.events import Event
from cotenant.history.stored import commit_of
from cotenant.policies.proportional import Proportional
from cotenant.replicas import forwarding, replica
from cotenant.replicas.election import Election
from cotenant.replicas.replica import Replica
from cotenant.replicas.tenure import Held, leader_of
from cotenant.rpc.server import Host
from cotenant.services.placement import server as placement
from cotenant.services.placement.committer import Fenced, Halted, Outdated
from cotenant.services.queue import arrays
from cotenant.services.queue import server as queue
from cotenant.services.queue.replicated import Replicated
from cotenant.store.port import Changes, Store, StoreUnavailable
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc

REPLICAS = {"placement": ("placement-0", "placement-1"), "queue": ("queue-0", "queue-1")}
PLACEMENT = placement.PlacementConfig(heartbeat_seconds=1.0, lost_after_seconds=6.0)
SOON = RetryRules(
    back_off_seconds=0.5, back_off_seconds_max=2.0, untold_back_off_seconds=0.5, untold_back_off_seconds_max=2.0
)
QUEUE = queue.QueueConfig(options={"fifo": {"mode": "backfill"}}, retrying=SOON)
CHUNK_MAX = 2  # jobs of an array in one transaction, so that each takes several
JOBS_MIN, JOBS_MAX, NODES_MAX = 6, 14, 4
TROUBLE_SECONDS, TROUBLE_PAUSE_SECONDS, LAST_SECONDS = 14.0, 1.0, 120.0
SUBMIT_SECONDS, SEEN_SECONDS = 10.0, 10.0
WATCHERS = 1
INSTALLED = cache(entry_points)  # each leader made anew would read them from the disk
EXAMINED, LOAD = plugins._examined, plugins.load
PASSING = (StoreUnavailable, Fenced, Halted, Outdated)  # what work that nobody waits for may end with


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    broken: list[Broken]
    failures: list[str]  # a part failed within, or it did not settle
    events: list[Event] = field(repr=False)
    faults: list[str] = field(repr=False)
    reached: Counter[str] = field(default_factory=Counter, repr=False)  # fail points, how often
    virtual_seconds: float = 0.0

    @property
    def digest(self) -> str:
        """Differs where histories do."""
        return hashlib.sha256("\n".join(map(repr, self.events)).encode()).hexdigest()[:16]

    @property
    def wrong(self) -> list[str]:
        """All that was wrong, in words."""
        return [*map(str, self.broken), *self.failures]


class World:
    """Everything; made anew for each seed."""

    def __init__(self, seed: int) -> None:
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

    def leader(self, service: str) -> str:
        """Who holds a service's leadership key now; "" where nobody does."""
        entry = self.store.now(f"{service}/leader")
        leader = leader_of(entry) if entry else None
        return leader.address if leader else ""

    async def reach(self, point: str) -> None:
        """Let happen what is armed for a fail point in the process that has come to it."""
        self.reached[point] += 1
        process = current_process()
        if process and (happens := self.armed.pop((process.name, point), None)):
            happens(process)
            await process.halt()

    def _committed(self, changes: Changes) -> None:
        self.events.append(commit_of(changes, self.loop.time(), began_unix_seconds=BEGIN_UNIX_SECONDS))

    # Processes -----------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a replica of a service, as a program anew, unless it has been started by another one already."""
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
            except StoreUnavailable:  # as whoever supervises processes would
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

    def _placement(self) -> Callable[[Host, Store, Held], Awaitable[placement.Placement]]:
        async def lead(host: Host, store: Store, held: Held) -> placement.Placement:
            made = placement.Placement(store, PLACEMENT, held)
            made.add_to(host)
            try:
                await made.start()
            except BaseException:
                await made.close()
                raise
            return made

        return lead

    def _queue(self, process: Process) -> Replicated:
        to_placement = self.network.channel(process, REPLICAS["placement"])
        to_predictor = self.network.channel(process, ["predictor"])  # nobody is there: nothing is predicted
        return Replicated(QUEUE, to_placement, to_predictor)

    def look_on(self) -> None:
        """Let some watch all jobs, and one of each replica of the queue ask what has ended."""
        process = self.processes["lookers"] = Process("lookers")
        for number in range(WATCHERS):
            process.start(self.clients.watch(f"watcher-{number}"))
        for name in REPLICAS["queue"]:
            process.start(self.clients.read(name))

    async def kill(self, name: str) -> None:
        """End a replica at once."""
        self.network.servers.pop(name, None)
        await self.processes[name].kill()

    def add_node(self, name: str) -> None:
        """Add a node, whose agent connects to whichever placement it reaches."""
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

    # Operators -----------------------------------------------------------------------------------------------

    async def close_node(self, name: str, seconds: float, *, drain: bool) -> None:
        """Drain or cordon a node for a while."""
        stub: Any = node_service_pb2_grpc.NodeServiceStub(
            self.network.channel(Process("operator"), REPLICAS["placement"])
        )
        if drain:
            await self.clients.insist(stub.DrainNode, node_pb2.DrainNodeRequest(id=name))
        else:
            await self.clients.insist(stub.CordonNode, node_pb2.CordonNodeRequest(id=name))
        await asyncio.sleep(seconds)
        await self.clients.insist(stub.UncordonNode, node_pb2.UncordonNodeRequest(id=name))

    # The end -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Let everybody reach everybody."""
        self.store.away = False
        self.armed.clear()
        self.network.cut.clear()
        self.network.slow_share, self.network.slow_seconds_max = SLOW_SHARE, SLOW_SECONDS_MAX
        for store in self.stores.values():
            store.losing, store.reached = 0.0, True
        for process in self.processes.values():
            process.resume()

    async def settle(self) -> None:
        """Wait until nothing is left to do."""
        checker, taken = Checker(PLACEMENT.lost_after_seconds), 0
        try:
            async with asyncio.timeout(LAST_SECONDS):
                while True:
                    for event in self.events[taken:]:
                        checker.take(event)
                    taken = len(self.events)
                    kept = (await self.store.list("placement/attempts/")).entries
                    ended = all(job.phase.ended for job in checker.kept())
                    if ended and not kept and not any(agent.attempts for agent in self.agents.values()):
                        break
                    await self._resume(checker)
                    await asyncio.sleep(0.25)
        except TimeoutError:
            left = sorted(job.job_id for job in checker.kept() if not job.phase.ended)
            on_nodes = {name: sorted(agent.attempts) for name, agent in self.agents.items() if agent.attempts}
            self.failures.append(f"it did not settle: jobs {left}, kept {[one.key for one in kept]}, nodes {on_nodes}")
            return
        with suppress(TimeoutError):  # then the checker says what is missing
            async with asyncio.timeout(SEEN_SECONDS):
                while not all(self._shows(seen, checker) for seen in self.clients.seen.values()):  # noqa: ASYNC110  # any of several may change
                    await asyncio.sleep(0.25)

    @staticmethod
    def _shows(seen: Mapping[str, Phase], checker: Checker) -> bool:
        return all(seen.get(job.job_id) is job.phase for job in checker.kept())

    async def _resume(self, checker: Checker) -> None:
        """Let go on what somebody had suspended."""
        stub = self.clients.stub("operator")
        for job_id in [job.job_id for job in checker.kept() if job.phase is Phase.SUSPENDED]:
            await self.clients.insist(stub.ResumeJob, pb.ResumeJobRequest(id=job_id))

    async def close(self) -> None:
        """End everything."""
        for name, process in list(self.processes.items()):
            self.network.servers.pop(name, None)
            await process.kill()
        self.network.close()
        await self.store.close()


def run_seed(seed: int, befall: Callable[[World], Awaitable[None]]) -> Outcome:
    """Play one seed; `befall` is what happens to the world while jobs are submitted."""
    failed: list[str] = []

    def note(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        error, process = event.get("exc_info"), current_process()
        if error and not isinstance(error if isinstance(error, BaseException) else sys.exc_info()[1], PASSING):
            where = f"{time.monotonic():.3f} {process.name if process else 'nobody'}"
            failed.append(f"{where}: {event['event']}: {_told(error)}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    gc.disable()  # what it ends, it ends at any time
    try:
        with virtual_time(seed) as loop:
            outcome = loop.run_until_complete(_play(seed, befall, failed))
            outcome.virtual_seconds = loop.time()
            return outcome
    finally:
        gc.enable()
        structlog.configure(**before)


async def _play(seed: int, befall: Callable[[World], Awaitable[None]], failed: list[str]) -> Outcome:
    world = World(seed)
    with (
        fail_points.armed(world.reach),
        mock.patch.object(forwarding, "passage", lambda address: _passage(world, address)),
        mock.patch.object(plugins, "entry_points", INSTALLED),
        mock.patch.object(replica, "gc"),  # a leader that steps down looks for garbage, which is what costs most
        mock.patch.object(plugins, "_examined", _examined),
        mock.patch.object(plugins, "load", partial(_loaded, Restless(Random(f"cores {seed}")))),
        mock.patch.object(resizing, "PATIENCE_SECONDS", Restless.interval_seconds),
        mock.patch.object(arrays, "CHUNK_MAX", CHUNK_MAX),
    ):
        for names in REPLICAS.values():
            for name in names:
                world.start(name)
        for number in range(world.rng.randint(2, NODES_MAX)):
            world.add_node(f"n{number}")
        await asyncio.sleep(0.5 + world.rng.random())
        jobs = range(world.rng.randint(JOBS_MIN, JOBS_MAX))
        callers = asyncio.gather(*(world.clients.submit(number, SUBMIT_SECONDS) for number in jobs))
        world.look_on()
        await befall(world)
        world.heal()
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await callers
            await world.settle()
        except TimeoutError:
            world.failures.append(f"a caller was never answered: {world.clients.unanswered}")
        await world.close()
    checker = Checker(PLACEMENT.lost_after_seconds)
    for event in world.events:
        checker.take(event)
    broken = checker.finish(settled=not world.failures)
    return Outcome(seed, broken, [*world.failures, *failed], world.events, world.faults, world.reached)


class Restless(Proportional):
    """Sizes as `proportional` does, and resizes what runs as chance has it."""

    name = "restless"
    interval_seconds = 1.0
    warm_up_seconds = measure_seconds = 0.0

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def resize(self, running: resizing.Running, now: float) -> Sizing | None:
        """Wish for other cores, now and then."""
        if self._rng.random() < 0.5:
            return None
        cores = self._rng.randint(1, 4)
        return Sizing((cores,), f"{cores} cores were wished for")

    def weight(self, running: resizing.Running) -> float:
        """A gain is a gain."""
        return 1.0


def _loaded(allocator: Restless, group: str, name: str, options: Mapping[str, str]) -> Any:
    return allocator if group == placement.ALLOCATORS else LOAD(group, name, options)


@cache
def _examined_once(group: str, points: tuple[Any, ...]) -> list[plugins.Plugin]:
    return EXAMINED(group, list(points))


def _examined(group: str, points: list[Any]) -> list[plugins.Plugin]:
    return _examined_once(group, tuple(points))


def _passage(world: World, address: str) -> Any:
    source = current_process()
    assert source
    return world.network.passage(source, address)


def _told(exc_info: Any) -> str:
    """Name what was raised, and where."""
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
    where = traceback.extract_tb(error.__traceback__)[-9:] if error else []
    return f"{error!r} at {' < '.join(f'{Path(one.filename).name}:{one.lineno}' for one in reversed(where))}"
