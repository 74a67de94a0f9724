from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant import plugins
from cotenant.agent.v1 import sample_service_pb2, sample_service_pb2_grpc
from cotenant.core.policy.protocols import Directive, NodeWindow
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.contention.api.server import DEFAULTS, Config, ContentionServicer, start
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import contention_service_pb2_grpc as pb_grpc

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def warnings_only() -> None:
    """Capture all log levels: the recovery of a policy is not a warning."""


class Policy:
    """A policy that returns what the test sets, and records its windows."""

    name = "none"
    api_version = 1

    def __init__(self) -> None:
        self.windows: list[NodeWindow] = []
        self.answer: Callable[[NodeWindow], Sequence[Directive]] = lambda window: ()

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        self.windows.append(window)
        return self.answer(window)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    policy = Policy()
    monkeypatch.setattr(plugins, "load", lambda group, name, options: policy)
    return policy


@dataclass
class Served:
    """Contention at the other end of a channel."""

    channel: Channel
    servicer: ContentionServicer

    def stub(self) -> Any:
        return pb_grpc.ContentionServiceStub(self.channel)

    def sample_stub(self) -> Any:
        return sample_service_pb2_grpc.SampleServiceStub(self.channel)

    async def stream(self, *requests: sample_service_pb2.StreamSamplesRequest) -> list[sample_service_pb2.Directive]:
        """Send messages and return the answers after the server has processed all of them."""
        call = self.sample_stub().StreamSamples(iter(requests))
        return [directive async for response in call for directive in response.directives]

    async def last(self, node_id: str = "") -> Sequence[pb.NodeSample]:
        response: pb.ListSamplesResponse = await self.stub().ListSamples(pb.ListSamplesRequest(node_id=node_id))
        return response.samples

    async def incidents(self, **fields: Any) -> pb.ListIncidentsResponse:
        response: pb.ListIncidentsResponse = await self.stub().ListIncidents(pb.ListIncidentsRequest(**fields))
        return response


@asynccontextmanager
async def serving(
    config: Config = DEFAULTS, now: Callable[[], float] = lambda: NOW, queue: Channel | None = None
) -> AsyncIterator[Served]:
    """Serve contention over real gRPC, as `cotenant up` does."""
    server = Server()
    servicer = await start(server, serve_policies(server), config, now, queue)
    port = await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield Served(channel, servicer)
    finally:
        await servicer.close()
        await server.stop(0)


def sample(node_id: str = "n1", at: float = NOW, **fields: Any) -> pb.NodeSample:
    time = Timestamp()
    time.FromNanoseconds(int(at * 1e9))
    given: dict[str, Any] = {
        "node_id": node_id,
        "time": time,
        "window": Duration(seconds=5),
        "cpu": pb.Pressure(some_avg10=12.5),
        "cpu_percent": 50,
        "memory_bandwidth_bytes_per_second": -1,
        "attempts": [attempt()],
    }
    return pb.NodeSample(**(given | fields))


def attempt(job_id: str = "j1", **fields: Any) -> pb.AttemptSample:
    given: dict[str, Any] = {
        "job_id": job_id,
        "number": 1,
        "cores_used": 3.5,
        "gpu_utilisation_percent": 90,
        "memory_bandwidth_bytes_per_second": -1,
        "steady": True,
    }
    return pb.AttemptSample(**(given | fields))


def sending(node_id: str, *samples: pb.NodeSample) -> sample_service_pb2.StreamSamplesRequest:
    return sample_service_pb2.StreamSamplesRequest(node_id=node_id, samples=samples)
