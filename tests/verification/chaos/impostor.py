"""A deposed placement leader that still believes it leads.

`python -m tests.verification.chaos.impostor ADDRESS TERM`. It accepts every agent under an old term. It has no store
that could correct it, and does nothing else: agents must detect it themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
from tests.verification.chaos.taken_address import bind

from cotenant.agent.v1 import agent_service_pb2 as pb
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.security.tls_files import BadTls

MET = "met an agent"


class Impostor(agent_service_pb2_grpc.AgentServiceServicer):
    """Accepts agents, and has no work for them."""

    def __init__(self, term: int) -> None:
        self._term = term

    async def Connect(self, requests: AsyncIterator[pb.ConnectRequest], context: Any) -> AsyncIterator[Any]:
        """Answer each message as a leader would."""
        welcome = pb.Welcome(term=self._term)
        welcome.heartbeat_interval.FromMilliseconds(500)
        welcome.lost_after.FromSeconds(60)
        async for request in requests:
            if request.HasField("hello"):
                print(MET, flush=True)
            yield pb.ConnectResponse(welcome=welcome if request.HasField("hello") else None, heard=request.beat)

    async def UploadOutput(self, requests: AsyncIterator[pb.UploadOutputRequest], context: Any) -> Any:
        """Accept an upload that was never requested."""
        return pb.UploadOutputResponse()

    async def ServeSession(self, requests: AsyncIterator[pb.ServeSessionRequest], context: Any) -> AsyncIterator[Any]:
        """Answer a session that was never requested."""
        yield pb.ServeSessionResponse()


async def main(address: str, term: str) -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    add = cast("Any", agent_service_pb2_grpc.add_AgentServiceServicer_to_server)
    add(Impostor(int(term)), server)
    await bind(server, address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with contextlib.suppress(BadTls):  # its certificate has expired: then nothing listens in the part's place
        asyncio.run(main(*sys.argv[1:3]))
