"""Undecodable responses fail their calls in one way, and no code receives None."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc as agent_grpc
from cotenant.rpc.channel import Channel, connect
from cotenant.store.etcd import EtcdStore
from cotenant.store.port import Put, StoreUnavailable
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc

NO_MESSAGE = b"\xff\xff\xff"


class Noise(grpc.GenericRpcHandler):
    """Answers any call with a valid message, if there is one, and then with undecodable bytes."""

    def __init__(self, good: bytes | None = None) -> None:
        self.good = good

    def service(self, call: Any) -> Any:
        """Find a handler."""
        name = call.method.rpartition("/")[2]
        if name == "WatchJobs":
            return grpc.unary_stream_rpc_method_handler(self._stream)
        if name == "Connect":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if name == "UploadOutput":
            return grpc.stream_unary_rpc_method_handler(self._answer)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: Any, context: Any) -> bytes:
        return NO_MESSAGE

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        if self.good is not None:
            yield self.good
        yield NO_MESSAGE
        await asyncio.Event().wait()


@pytest.fixture
async def noise() -> AsyncIterator[str]:
    """Yield the address of a server that answers with noise."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Noise(jobs_pb.WatchJobsResponse(synced=True).SerializeToString()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def channel(noise: str) -> AsyncIterator[Channel]:
    """Yield a channel to it."""
    async with connect(noise) as made:
        yield made


def is_told(error: grpc.aio.AioRpcError, method: str) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and f"{method}: it was damaged in transit" in (
        error.details() or ""
    )


async def test_an_undecodable_response_fails_like_a_broken_connection(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stub: Any = jobs_grpc.JobServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub.GetJob(jobs_pb.GetJobRequest(id="a"))
    assert is_told(told.value, "/cotenant.v1.JobService/GetJob")
    agents: Any = agent_grpc.AgentServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await agents.UploadOutput(iter([agent_pb2.UploadOutputRequest(read_id="r")]))
    assert is_told(told.value, "UploadOutput")
    assert "Traceback" not in caplog.text


async def test_a_stream_yields_valid_messages_and_fails_at_an_undecodable_one(channel: Channel) -> None:
    stub: Any = jobs_grpc.JobServiceStub(channel)
    call = stub.WatchJobs(jobs_pb.WatchJobsRequest())
    messages = aiter(call)
    assert (await anext(messages)).synced
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await anext(messages)
    assert is_told(told.value, "WatchJobs")
    assert call.cancelled()


async def test_a_stream_read_by_single_messages_fails_at_an_undecodable_one(channel: Channel) -> None:
    call = agent_grpc.AgentServiceStub(channel).Connect()
    await call.write(agent_pb2.ConnectRequest(beat=1))
    await call.read()  # the valid message
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call.read()
    assert is_told(told.value, "Connect")


async def test_an_etcd_that_answers_noise_is_unavailable(noise: str) -> None:
    store = EtcdStore([noise], timeout_seconds=0.5)
    try:
        with pytest.raises(StoreUnavailable, match="cannot decode"):
            await store.get("a")
        with pytest.raises(StoreUnavailable, match="cannot decode"):
            await store.transact([], [Put("a", b"")])
        with pytest.raises(StoreUnavailable, match="cannot decode"):
            await store.grant(2.0)
    finally:
        await store.close()
