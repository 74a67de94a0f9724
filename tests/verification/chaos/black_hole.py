"""A listener that never answers: `python -m tests.verification.chaos.black_hole HOST:PORT silent|mute`.

A silent one accepts connections and never sends a byte. A mute one speaks HTTP/2, and TLS if the mesh does, accepts
every call and never answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import grpc
import grpc.aio
from tests.verification.chaos.taken_address import bind, when_free

from cotenant.security.tls_files import BadTls

MET = "met a caller"
SILENT, MUTE = "silent", "mute"


class Mute(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Accepts every call."""

    def service(self, handler_call_details: Any) -> Any:
        """Handle a call by waiting forever."""
        print(MET, flush=True)
        return grpc.stream_stream_rpc_method_handler(_wait)


async def _wait(requests: Any, context: Any) -> Any:
    await asyncio.Event().wait()
    yield b""


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    print(MET, flush=True)
    await asyncio.Event().wait()


async def main(address: str, mode: str) -> None:
    """Listen until killed."""
    if mode == SILENT:
        host, _, port = address.rpartition(":")
        server = await when_free(lambda: asyncio.start_server(_hold, host, int(port)))
        await server.serve_forever()
    mute = grpc.aio.server()
    mute.add_generic_rpc_handlers((Mute(),))
    await bind(mute, address)
    await mute.start()
    await mute.wait_for_termination()


if __name__ == "__main__":
    with contextlib.suppress(BadTls):  # its certificate has expired: then nothing listens in the part's place
        asyncio.run(main(*sys.argv[1:3]))
