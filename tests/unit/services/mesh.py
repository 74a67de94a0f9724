"""A mesh for tests: services on their own servers, which may be killed, one store, agents without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

import grpc
from benchmarks.agents import SimulatedAgent

from cotenant.codec.errors import from_error
from cotenant.codec.specs import duration
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import CannotListen, Server
from cotenant.security.identity import Authenticator
from cotenant.services.placement.api import server as placement
from cotenant.services.predictor.api import server as predictor
from cotenant.services.queue.api import server as queue
from cotenant.store.capacity import Capacity, capacity_of
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    Listing,
    Operation,
    Relisted,
    Store,
    StoreUnavailable,
)
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import (
    array_service_pb2_grpc,
    job_pb2,
    job_service_pb2_grpc,
    node_service_pb2_grpc,
    resources_pb2,
    tenant_service_pb2_grpc,
)
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

WAIT_SECONDS = 60.0
QUICK = placement.PlacementConfig(heartbeat_seconds=0.5, lost_after_seconds=30.0)
BACKFILL = queue.QueueConfig(options={"fifo": {"mode": "backfill"}})
LAS = queue.QueueConfig(policy="las", options={"las": {"thresholds": "0.05,7200"}})


class CuttableStore:
    """One process's access to the store. Cut it, and nothing of the process reaches the store.

    With `rng`, a share of the transactions fails: half of them before the commit, half of them after.
    """

    def __init__(self, store: Store, rng: Random | None = None, failing: float = 0.0) -> None:
        self._store, self._rng, self.failing = store, rng, failing
        self.cut = False
        self.away = False
        self.failures = 0
        self.held_back: asyncio.Event | None = None  # transactions wait for it
        self.lose_answer = self.lose_request = False  # of the next transaction
        self.lose_answer_after: int | None = None  # this many transactions
        self.cut_after: int | None = None  # this many transactions

    async def _present(self) -> None:
        if self.cut:
            await asyncio.get_running_loop().create_future()
        if self.away:
            raise StoreUnavailable("the store is away")

    async def get(self, key: str) -> Entry | None:
        await self._present()
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        await self._present()
        return await self._store.list(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        if self.cut_after == 0:
            self.cut = True
        await self._present()
        self.lose_answer = self.lose_answer or self.lose_answer_after == 0
        self.lose_answer_after = None if self.lose_answer_after is None else self.lose_answer_after - 1
        self.cut_after = None if self.cut_after is None else self.cut_after - 1
        if self.held_back:
            await self.held_back.wait()
        fails = self._rng is not None and self._rng.random() < self.failing
        after = fails and self._rng is not None and self._rng.random() < 0.5
        if (fails and not after) or self.lose_request:
            self.failures += 1
            self.lose_request = False
            raise StoreUnavailable("the request was lost")
        result = await self._store.transact(compares, operations)
        await self._present()
        if after or self.lose_answer:
            self.failures += 1
            self.lose_answer = False
            raise StoreUnavailable("the answer was lost")
        return result

    def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        return self._store.watch(prefix, after_revision=after_revision)

    async def capacity(self) -> Capacity | None:
        await self._present()
        return await capacity_of(self._store)

    async def grant(self, ttl_seconds: float) -> Lease:
        return await self._store.grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        await self._store.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        await self._store.revoke(lease)

    async def compact(self, revision: int) -> None:
        await self._store.compact(revision)

    async def close(self) -> None:
        """Do nothing: the store belongs to the test."""


@dataclass
class Part:
    """A running service, as far as the test can reach it."""

    store: CuttableStore
    server: Server
    service: Any
    port: int


@dataclass
class Mesh:
    """The whole mesh; `restart` and `kill` take the names placement, queue and predictor."""

    store: Store
    queue_config: queue.QueueConfig = BACKFILL
    placement_config: placement.PlacementConfig = QUICK
    predictor_config: predictor.Config = field(default_factory=predictor.Config)
    rng: Random | None = None
    failing: float = 0.0
    authenticator: Authenticator | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    agents: dict[str, SimulatedAgent] = field(default_factory=dict)

    # Life ----------------------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        """Start a service, on its previous port."""
        store = CuttableStore(self.store, self.rng, 0.0)
        server = Server(f"127.0.0.1:{self.ports.get(name, 0)}", authenticator=self.authenticator)
        self.ports[name] = port = await _bound(server)
        policies = serve_policies(server)
        service: Any
        if name == "predictor":
            service = await predictor.start(server, store, policies, self.predictor_config)
        elif name == "placement":
            service = await placement.start(server, store, policies, self.placement_config)
        else:
            service = await queue.start(
                server, store, policies, self.queue_config, self.channel("placement"), self.channel("predictor")
            )
        await server.start()
        if name == "queue":
            service.run()
        self.parts[name] = Part(store, server, service, port)
        store.failing = self.failing if name != "predictor" else 0.0

    def channel(self, name: str) -> Channel:
        """Return a channel to a service, created once."""
        if name not in self.channels:
            self.channels[name] = connect(f"127.0.0.1:{self.ports[name]}")
        return self.channels[name]

    async def kill(self, *names: str) -> None:
        """Kill services: from this moment on nothing of them reaches the store or other processes."""
        parts = [self.parts.pop(name) for name in names]
        for part in parts:
            part.store.cut = True
        for part in parts:
            await part.server.stop(0)
            await part.service.close()

    async def restart(self, *names: str) -> None:
        """Kill services and start them again on the same store."""
        await self.kill(*names)
        for name in names:
            await self.start(name)

    async def close(self) -> None:
        """Stop everything."""
        for agent in self.agents.values():
            await agent.stop()
        for part in self.parts.values():
            part.store.failing = 0.0
            await part.server.stop(0)
        for part in self.parts.values():
            await part.service.close()
        for channel in self.channels.values():
            await channel.close()

    async def agent(self, node_id: str, **fields: Any) -> SimulatedAgent:
        """Add a node and wait until its agent is registered and the queue knows its capacity."""
        agent = self.agents[node_id] = SimulatedAgent(node_id, self.channel("placement"), **fields)
        agent.start()
        await until(lambda: bool(agent.welcomes))
        await until(self.queue_knows_all)
        return agent

    def queue_knows_all(self) -> bool:
        """Return whether the queue, if there is one, knows the capacity of all nodes."""
        queue_part, nodes = self.parts.get("queue"), self.parts["placement"].service.cluster.nodes
        return queue_part is None or sum(shape.count for shape in queue_part.service.state.shapes) == len(nodes)

    # Callers -------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> job_service_pb2_grpc.JobServiceAsyncStub:
        return cast(
            "job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(self.channel("queue"))
        )

    @property
    def arrays(self) -> array_service_pb2_grpc.ArrayServiceAsyncStub:
        stub = array_service_pb2_grpc.ArrayServiceStub(self.channel("queue"))
        return cast("array_service_pb2_grpc.ArrayServiceAsyncStub", stub)

    @property
    def tenants(self) -> tenant_service_pb2_grpc.TenantServiceAsyncStub:
        stub = tenant_service_pb2_grpc.TenantServiceStub(self.channel("queue"))
        return cast("tenant_service_pb2_grpc.TenantServiceAsyncStub", stub)

    @property
    def nodes(self) -> node_service_pb2_grpc.NodeServiceAsyncStub:
        stub = node_service_pb2_grpc.NodeServiceStub(self.channel("placement"))
        return cast("node_service_pb2_grpc.NodeServiceAsyncStub", stub)

    @property
    def plans(self) -> placement_service_pb2_grpc.PlacementServiceAsyncStub:
        stub = placement_service_pb2_grpc.PlacementServiceStub(self.channel("placement"))
        return cast("placement_service_pb2_grpc.PlacementServiceAsyncStub", stub)

    async def submit(self, **fields: Any) -> str:
        """Submit a job and return its id."""
        response: pb.CreateJobResponse = await self.jobs.CreateJob(pb.CreateJobRequest(spec=spec(**fields)))
        return response.job.id

    async def submit_array(self, **fields: Any) -> str:
        """Submit an array and return its id."""
        request = array_pb.CreateArrayRequest(spec=spec(**fields))
        response: array_pb.CreateArrayResponse = await self.arrays.CreateArray(request)
        return response.array.id

    async def job(self, job_id: str) -> job_pb2.Job:
        response: pb.GetJobResponse = await self.jobs.GetJob(pb.GetJobRequest(id=job_id))
        return response.job

    async def node(self, node_id: str) -> node_pb2.Node:
        response: node_pb2.GetNodeResponse = await self.nodes.GetNode(node_pb2.GetNodeRequest(id=node_id))
        return response.node

    async def reach(
        self, job_id: str, phase: str, also: Callable[[job_pb2.Job], bool] = lambda job: True
    ) -> job_pb2.Job:
        """Wait until a job is in a phase, and until a condition holds for it."""
        wanted = job_pb2.JobPhase.Value(f"JOB_PHASE_{phase}")
        seen: list[str] = []
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    try:
                        async for job in self._changes(job_id):
                            seen.append(f"{job_pb2.JobPhase.Name(job.phase)} {job.refusal.code} {job.refusal.detail}")
                            if job.phase == wanted and also(job):
                                return job
                    except grpc.aio.AioRpcError as error:  # the queue is restarting
                        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                            raise
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{job_id} was never {phase}: {seen}") from None

    async def _changes(self, job_id: str) -> AsyncIterator[job_pb2.Job]:
        request = pb.WatchJobsRequest(filter=pb.JobFilter(ids=[job_id]), view=pb.JOB_VIEW_FULL)
        watch: Any = self.jobs.WatchJobs(request)
        try:
            async for response in watch:
                for job in response.jobs:
                    yield job
        finally:
            watch.cancel()

    async def refused(self, job_id: str, code: str) -> job_pb2.Job:
        """Wait until a job has a refusal. Polls: watches do not report changes of refusals alone."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                job = await self.job(job_id)
                if job.phase == job_pb2.JOB_PHASE_QUEUED and job.refusal.code == code:
                    return job
                await asyncio.sleep(0.01)

    async def all_ended(self) -> None:
        """Wait until every job that is known now has ended."""
        watch = self.jobs.WatchJobs(pb.WatchJobsRequest(until_ended=True))
        async for _ in watch:
            pass

    async def records_left(self, prefix: str) -> list[str]:
        """Return the keys under a prefix of the store."""
        return [entry.key for entry in (await self.store.list(prefix)).entries]


async def _bound(server: Server) -> int:
    """Bind the port; the socket of a reconnecting client may hold it for a moment."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                return server.bind()
            except CannotListen:
                await asyncio.sleep(0.1)


async def again(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call as clients do while the store is unavailable."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                # cut off by the end of a server
                if error.code() not in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.CANCELLED,
                ):
                    raise
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # most of what is waited for has no event
            await asyncio.sleep(0.005)


async def eventually(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> None:
    """Wait until an asynchronous condition holds."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  # the same
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(store: Store | None = None, **fields: Any) -> AsyncIterator[Mesh]:
    """Yield a mesh without nodes."""
    mesh = Mesh(store or MemoryStore(), **fields)
    try:
        for name in ("predictor", "placement", "queue"):
            await mesh.start(name)
        yield mesh
    finally:
        await mesh.close()


def spec(
    *,
    gpus: float = 1,
    cores: int | None = None,
    replicas: int = 1,
    memory_bytes: int = 0,
    gpu_type: str = "",
    grace: float = 0.0,
    **fields: Any,
) -> job_pb2.JobSpec:
    """Return the spec of a job with one role."""
    request = resources_pb2.ResourceRequest(
        gpu_milli=round(gpus * 1000), cores=cores, memory_bytes=memory_bytes, gpu_type=gpu_type
    )
    given: dict[str, Any] = {
        "name": "job",
        "roles": [job_pb2.Role(name="worker", replicas=replicas, resources=request)],
        "command": ["true"],
        "grace": duration(grace),
    }
    return job_pb2.JobSpec(**(given | fields))


def without(config: placement.PlacementConfig, **fields: Any) -> placement.PlacementConfig:
    """Return a configuration with other values."""
    return replace(config, **fields)


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return the stable reason of a failed call."""
    return from_error(error).reason
