from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cotenant.internal.v1 import observation_service_pb2 as observation
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.predictor.api.server import SERVICE, Config, start
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Committed,
    Compare,
    Conflict,
    Entry,
    Listing,
    Operation,
    Store,
    StoreUnavailable,
)
from cotenant.store.sqlite import SqliteStore
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb
from cotenant.v1 import predictor_service_pb2_grpc as pb_grpc

QUICK = Config(save_seconds=0.02)


class Restarts:
    """Open a store with its earlier content: the same memory, or the same file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._store: Store = MemoryStore() if path is None else SqliteStore(path)

    async def store(self) -> Store:
        if self._path is not None:
            await self._store.close()
            self._store = SqliteStore(self._path)
        return self._store


@pytest.fixture(params=["memory", "sqlite"])
async def restarts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Restarts]:
    restarts = Restarts(None if request.param == "memory" else tmp_path / "state.db")
    yield restarts
    await (await restarts.store()).close()


class FickleStore(MemoryStore):
    """A store that is unavailable on demand and records the size of each transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.operations_max = 128
        self.transactions: list[int] = []

    async def get(self, key: str) -> Entry | None:
        self._require_present()
        return await super().get(key)

    async def list(self, prefix: str) -> Listing:
        self._require_present()
        return await super().list(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self._require_present()
        if len(operations) > self.operations_max:
            raise ValueError(f"{len(operations)} operations are too many")
        self.transactions.append(len(operations))
        return await super().transact(compares, operations)

    def _require_present(self) -> None:
        if self.away:
            raise StoreUnavailable("gone fishing")


@dataclass
class Served:
    """A predictor at the other end of a channel."""

    channel: Channel

    @property
    def stub(self) -> pb_grpc.PredictorServiceAsyncStub:
        return pb_grpc.PredictorServiceStub(self.channel)  # type: ignore[return-value]  # aio by its channel

    async def until(self, serving: bool) -> None:
        """Wait until the predictor has this health status."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for answer in watch:
            if answer.status == wanted:
                watch.cancel()
                return

    async def observe(self, *observations: observation.Observation) -> observation.ObserveResponse:
        stub: Any = observation_service_pb2_grpc.ObservationServiceStub(self.channel)
        answer: observation.ObserveResponse = await stub.Observe(observation.ObserveRequest(observations=observations))
        return answer

    async def estimate(self, *queries: pb.EstimateQuery) -> Sequence[pb.Estimate]:
        answer: pb.EstimateResponse = await self.stub.Estimate(pb.EstimateRequest(queries=queries))
        return answer.estimates


@asynccontextmanager
async def serving(store: Store, config: Config = QUICK) -> AsyncIterator[Served]:
    """Serve a predictor over real gRPC, as `cotenant up` does."""
    server = Server()
    predicting = await start(server, store, serve_policies(server), config)
    port = await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield Served(channel)
    finally:
        await server.stop(0)
        await predicting.close()


def spec(model: str = "resnet50", **fields: Any) -> job_pb2.JobSpec:
    request = resources_pb2.ResourceRequest(gpu_milli=1000, cores=4)
    given: dict[str, Any] = {"model": model, "roles": [job_pb2.Role(name="worker", replicas=1, resources=request)]}
    return job_pb2.JobSpec(**(given | fields))


def window(
    job_id: str = "j1", *, at: int = 1000, cores: int = 4, rate: float = 2.0, **fields: Any
) -> observation.Observation:
    """A window of a job's rate."""
    given: dict[str, Any] = {
        "job_id": job_id,
        "number": 1,
        "spec": spec(),
        "allocation": pb.CandidateAllocation(cores=cores, gpu_milli=1000),
        "rate_per_second": rate,
        "window": Duration(seconds=10),
        "time": Timestamp(seconds=at),
    }
    return observation.Observation(**(given | fields))


def run(job_id: str, *, seconds: int, at: int = 2000, **fields: Any) -> observation.Observation:
    """The end of a job that succeeded."""
    given: dict[str, Any] = {
        "job_id": job_id,
        "number": 1,
        "spec": spec(),
        "run_time": Duration(seconds=seconds),
        "succeeded": True,
        "time": Timestamp(seconds=at),
    }
    return observation.Observation(**(given | fields))


def query(job_id: str = "next", *, cores: Sequence[int] = (), **fields: Any) -> pb.EstimateQuery:
    given: dict[str, Any] = {"job_id": job_id, "spec": spec()}
    candidates = [pb.CandidateAllocation(cores=count, gpu_milli=1000) for count in cores]
    return pb.EstimateQuery(**(given | fields), candidates=candidates)
