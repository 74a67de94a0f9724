"""gRPC's server, made to end cleanly where it ends by itself, so that another one can take its place.

Theory of operation. From grpcio 1.8x on one loop takes the requests of all methods, and decodes the path of those
whose method is not registered. A path that is no UTF-8 raises there, and nothing else takes requests any more: whoever
reaches the port ends the server, known or not, with 200 bytes. On its way out it also drops what is still being asked
of gRPC's core, into which the core then writes: a crash of the process, where requests come at that moment. What is not
registered cannot be told apart beforehand from here. So what is being asked is held until the core has answered, the
loop's end is no error of the shutdown that follows it, and `Server` begins anew on the same port. Calls under way are
cut off as at a restart, and their callers come again.

gRPC has no public way to this: interceptors, handlers and `wait_for_termination` come after the loop has ended. What is
used of it instead is private, and tried with the versions of `TRIED` (tests fail with any other, so that somebody
looks). Where it is not there gRPC's plain server serves, which is said in the log.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc._cython import cygrpc

log = structlog.get_logger()

TRIED = ("1.85",)  # of grpcio
USED = ("_make_request_call_future", "_start_shutting_down")

_PLAIN: Any = getattr(cygrpc, "AioServer", object)


class _Enduring(_PLAIN):
    """What a server of gRPC's stands on."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Ask the core for a method's next call. Whoever no longer waits for it leaves it to be answered."""
        asked = super()._make_request_call_future(method)
        asked.add_done_callback(_heard)
        return asyncio.shield(asked)

    async def _start_shutting_down(self) -> None:
        with suppress(Exception):  # what the loop has ended with, of which `wait_for_termination` tells
            await super()._start_shutting_down()


def _heard(asked: asyncio.Future[Any]) -> None:
    """Take note of how a question ended, which is an error where the server has."""
    if not asked.cancelled():
        asked.exception()


def server(**options: Any) -> Any:
    """Make a server as `grpc.aio.server` does."""
    if missing := [name for name in USED if not hasattr(_PLAIN, name)]:
        log.warning("server_not_enduring", grpcio=grpc.__version__, missing=missing)
        return grpc.aio.server(**options)
    cygrpc.AioServer = _Enduring
    try:
        return grpc.aio.server(**options)
    finally:
        cygrpc.AioServer = _PLAIN
