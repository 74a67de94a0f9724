"""A client that opens streams it never reads, or idle connections.

`python -m tests.verification.chaos.greedy_client streams|connections HOST:PORT COUNT`. Idle connections carry neither a
token nor any byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import grpc.aio
from tests.verification.chaos.certificates import of_process

from cotenant.rpc import channel
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

HELD = "holds"
STREAMS, CONNECTIONS = "streams", "connections"
ANSWER_SECONDS = 2.0


async def hold_streams(address: str, count: int) -> None:
    """Open watches and never read them. gRPC itself reads a few kilobytes of each."""
    channel.secure(of_process())
    async with channel.connect(address, os.environ["COTENANT_TOKEN"]) as connection:
        stub: Any = JobServiceStub(connection)
        watches = [stub.WatchJobs(pb.WatchJobsRequest()) for _ in range(count)]
        held = 0
        for watch in watches:
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                await asyncio.wait_for(watch.initial_metadata(), ANSWER_SECONDS)
                held += 1
        print(HELD, held, flush=True)
        await asyncio.Event().wait()


async def hold_connections(address: str, count: int) -> None:
    """Open connections and send nothing."""
    host, _, port = address.rpartition(":")
    held = []
    for _ in range(count):
        with contextlib.suppress(OSError, TimeoutError):
            held.append(await asyncio.wait_for(asyncio.open_connection(host, int(port)), ANSWER_SECONDS))
    print(HELD, len(held), flush=True)
    await asyncio.Event().wait()


async def main(kind: str, address: str, count: str) -> None:
    """Hold them until killed."""
    await (hold_streams if kind == STREAMS else hold_connections)(address, int(count))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
