"""What comes as an answer and is none fails its call in one way, and nobody reads from None."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.rpc.channel import Channel, connect
from cotenant.store.etcd import EtcdStore
from cotenant.store.port import Put, StoreUnavailable
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import node_service_pb2_grpc as node_grpc

NO_MESSAGE = b"\xff\xff\xff"


class Noise(grpc.GenericRpcHandler):
    """Answers whatever is called: a good message where there is one, then bytes that are none."""

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
    """Where something listens that answers with noise."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Noise(jobs_pb.WatchJobsResponse(synced=True).SerializeToString()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def channel(noise: str) -> AsyncIterator[Channel]:
    """A channel to it."""
    async with connect(noise) as made:
        yield made


def is_told(error: grpc.aio.AioRpcError, method: str) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and f"{method} is none" in (error.details() or "")


async def test_an_answer_that_is_none_is_as_if_the_connection_had_broken(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stub: Any = jobs_grpc.JobServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub.GetJob(jobs_pb.GetJobRequest(id="a"))
    assert is_told(told.value, "/cotenant.v1.JobService/GetJob")
    agents: Any = node_grpc.AgentServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await agents.UploadOutput(iter([node_pb2.UploadOutputRequest(read_id="r")]))
    assert is_told(told.value, "UploadOutput")
    assert "Traceback" not in caplog.text


async def test_a_stream_gives_what_is_good_and_ends_with_what_is_not(channel: Channel) -> None:
    stub: Any = jobs_grpc.JobServiceStub(channel)
    call = stub.WatchJobs(jobs_pb.WatchJobsRequest())
    messages = aiter(call)
    assert (await anext(messages)).synced
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await anext(messages)
    assert is_told(told.value, "WatchJobs")
    assert call.cancelled()


async def test_a_stream_that_is_read_piece_by_piece_does_so_too(channel: Channel) -> None:
    call = node_grpc.AgentServiceStub(channel).Connect()
    await call.write(node_pb2.ConnectRequest(beat=1))
    await call.read()  # the good one, whatever it means here
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call.read()
    assert is_told(told.value, "Connect")


async def test_an_etcd_that_answers_noise_is_away(noise: str) -> None:
    store = EtcdStore([noise], timeout_seconds=0.5)
    try:
        with pytest.raises(StoreUnavailable, match="damaged"):
            await store.get("a")
        with pytest.raises(StoreUnavailable, match="damaged"):
            await store.transact([], [Put("a", b"")])
        with pytest.raises(StoreUnavailable, match="damaged"):
            await store.grant(2.0)
    finally:
        await store.close()
