from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import grpc.aio
import pytest
from tests.unit.services.contention.conftest import sample, sending

from cotenant import telemetry
from cotenant.agent.v1 import sample_service_pb2_grpc
from cotenant.codec.errors import from_error
from cotenant.rpc.channel import connect
from cotenant.services.contention.__main__ import serve
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import contention_service_pb2_grpc as pb_grpc


async def test_a_contention_process_serves_until_it_is_stopped_and_then_ends_open_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "setup", lambda service: None)  # the logs are the whole process's
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(address="127.0.0.1:0", token="secret", on_start=port.set_result))
    async with connect(f"127.0.0.1:{await port}", "secret") as channel:
        stub = pb_grpc.ContentionServiceStub(channel)
        stream = sample_service_pb2_grpc.SampleServiceStub(channel).StreamSamples()
        await stream.write(sending("n1", sample(at=time.time())))
        while not (await stub.ListSamples(pb.ListSamplesRequest())).samples:
            pass
        serving.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert from_error(ended.value).message == "contention is shutting down; connect again"
        with pytest.raises(asyncio.CancelledError):
            await serving


def test_running_the_module_prints_how_to_start_the_service() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cotenant.services.contention"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "start this service with: cotenant serve contention\n"
