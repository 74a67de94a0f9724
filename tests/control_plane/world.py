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
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import grpc
import structlog
from google.protobuf.field_mask_pb2 import FieldMask
from tests.control_plane.nodes import FencedAgent
from tests.control_plane.stores import ProcessStore, RecordedStore
from tests.control_plane.virtual import Process, current_process, virtual_time
from tests.control_plane.wire import SLOW_SECONDS_MAX, SLOW_SHARE, Network, SimulatedServer
from tests.services.mesh import spec

from cotenant import fail_points, plugins
from cotenant.core.lifecycle import Phase
from cotenant.history.checker import Broken, Checker
from cotenant.history.events import Acknowledged, Event
from cotenant.history.stored import commit_of
from cotenant.replicas import forwarding
from cotenant.replicas.election import Election
from cotenant.replicas.replica import Replica
from cotenant.replicas.tenure import Held, leader_of
from cotenant.rpc.server import Host
from cotenant.services.placement import server as placement
from cotenant.services.placement.committer import Fenced, Halted, Outdated
from cotenant.services.queue import server as queue
from cotenant.services.queue.replicated import Replicated
from cotenant.store.port import Changes, Store, StoreUnavailable
from cotenant.v1 import job_pb2, job_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb

REPLICAS = {"placement": ("placement-0", "placement-1"), "queue": ("queue-0", "queue-1")}
PLACEMENT = placement.PlacementConfig(heartbeat_seconds=1.0, lost_after_seconds=6.0)
QUEUE = queue.QueueConfig(options={"fifo": {"mode": "backfill"}})
JOBS_MIN, JOBS_MAX, NODES_MAX = 6, 14, 4
TROUBLE_SECONDS, TROUBLE_PAUSE_SECONDS, LAST_SECONDS = 14.0, 1.0, 120.0
CALL_SECONDS = 3.0
INSTALLED = cache(entry_points)  # each leader made anew would read them from the disk
EXAMINED = plugins._examined
PASSING = (StoreUnavailable, Fenced, Halted, Outdated)  # what work that nobody waits for may end with
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


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
        self.acknowledged: dict[str, str] = {}
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
        self.events.append(commit_of(changes, self.loop.time()))

    # Processes -----------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a replica of a service, as a program anew."""
        process = self.processes[name] = Process(name)
        store = self.stores[name] = ProcessStore(self.store, process, self.rng, self.events.append)
        process.start(self._serve(name, process, store))

    async def _serve(self, name: str, process: Process, store: ProcessStore) -> None:
        service = name.partition("-")[0]
        server = SimulatedServer(process)
        election = Election(store, f"{service}/leader", name, alone=False)
        while True:
            replica = self._replica(service, process, server, store, election)
            self.network.servers[name] = server
            try:
                await replica.start()
                await replica.run()
            except StoreUnavailable:  # as whoever supervises processes would
                await replica.close()
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

    # Callers -------------------------------------------------------------------------------------------------

    async def submit(self, number: int) -> None:
        """Submit a job as a client does, until it is acknowledged; some send the same twice at once."""
        client = Process(f"client-{number}")
        stub: Any = job_service_pb2_grpc.JobServiceStub(self.network.channel(client, REPLICAS["queue"]))
        request = pb.CreateJobRequest(spec=self._story(number), request_id=f"request-{number}")
        await asyncio.sleep(self.rng.random() * TROUBLE_SECONDS * 0.7)
        await asyncio.gather(*(self._insist(stub, request) for _ in range(self.rng.choice([1, 1, 2]))))
        if job_id := self.acknowledged.get(request.request_id):
            await self._change(stub, job_id)

    async def _change(self, stub: Any, job_id: str) -> None:
        """Change one's mind about a job, as often as chance has it; whether it is heard does not matter."""
        while self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.random() * 3)
            priority = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(priority=self.rng.randint(-5, 5)))
            calls: list[tuple[Any, Any]] = [
                (stub.CancelJob, pb.CancelJobRequest(id=job_id)),
                (stub.SuspendJob, pb.SuspendJobRequest(id=job_id)),
                (stub.ResumeJob, pb.ResumeJobRequest(id=job_id)),
                (stub.UpdateJob, pb.UpdateJobRequest(job=priority, update_mask=FieldMask(paths=["spec.priority"]))),
            ]
            (call, request), *_ = self.rng.choices(calls, [2, 1, 1, 4])
            with suppress(grpc.aio.AioRpcError):
                await call(request, timeout=CALL_SECONDS)

    def _story(self, number: int) -> job_pb2.JobSpec:
        gpus, replicas = self.rng.choice([(1, 1)] * 4 + [(2, 1), (1, 2), (1, 3), (0, 1)])
        return spec(gpus=gpus, cores=self.rng.choice([1, 2]), replicas=replicas, name=f"job {number}", retries_max=3)

    async def _insist(self, stub: Any, request: pb.CreateJobRequest) -> None:
        while True:
            try:
                response = await stub.CreateJob(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() not in TRANSIENT:
                    self.failures.append(f"{request.request_id}: {error.code()} {error.details()}")
                    return
                await asyncio.sleep(0.1 + 0.2 * self.rng.random())
            else:
                self.acknowledged[request.request_id] = response.job.id
                self.events.append(Acknowledged(request.request_id, response.job.id))
                return

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
                    ended = all(job.phase.ended for job in checker.jobs.values())
                    if ended and not kept and not any(agent.attempts for agent in self.agents.values()):
                        return
                    await self._resume(checker)
                    await asyncio.sleep(0.25)
        except TimeoutError:
            left = sorted(job.job_id for job in checker.jobs.values() if not job.phase.ended)
            on_nodes = {name: sorted(agent.attempts) for name, agent in self.agents.items() if agent.attempts}
            self.failures.append(f"it did not settle: jobs {left}, kept {[one.key for one in kept]}, nodes {on_nodes}")

    async def _resume(self, checker: Checker) -> None:
        """Let go on what somebody had suspended."""
        channel = self.network.channel(Process("operator"), REPLICAS["queue"])
        stub: Any = job_service_pb2_grpc.JobServiceStub(channel)
        for job_id in [job.job_id for job in checker.jobs.values() if job.phase is Phase.SUSPENDED]:
            with suppress(grpc.aio.AioRpcError):
                await stub.ResumeJob(pb.ResumeJobRequest(id=job_id), timeout=CALL_SECONDS)

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
        mock.patch.object(plugins, "_examined", _examined),
    ):
        for names in REPLICAS.values():
            for name in names:
                world.start(name)
        for number in range(world.rng.randint(2, NODES_MAX)):
            world.add_node(f"n{number}")
        await asyncio.sleep(0.5 + world.rng.random())
        jobs = range(world.rng.randint(JOBS_MIN, JOBS_MAX))
        callers = asyncio.gather(*(world.submit(number) for number in jobs))
        await befall(world)
        world.heal()
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await callers
            await world.settle()
        except TimeoutError:
            world.failures.append("a caller was never answered")
        await world.close()
    checker = Checker(PLACEMENT.lost_after_seconds)
    for event in world.events:
        checker.take(event)
    broken = checker.finish(settled=not world.failures)
    return Outcome(seed, broken, [*world.failures, *failed], world.events, world.faults, world.reached)


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
