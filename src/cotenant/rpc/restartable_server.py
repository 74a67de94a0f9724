"""gRPC's server, changed to shut down cleanly when it stops unexpectedly, so that another can replace it.

Theory of operation. Since grpcio 1.8x one loop accepts the requests of all methods, and decodes the path of requests
for unregistered methods. A path that is not UTF-8 raises there, and nothing accepts requests any longer: any peer that
reaches the port can stop the server with 200 bytes, authenticated or not. While it stops, the server also drops
requests that are still pending in gRPC's core, into which the core then writes: the process crashes if requests arrive
at that moment. We cannot filter unregistered methods beforehand. So pending requests are kept until the core has
answered, the loop's exception is no error of the shutdown that follows, and `Server` starts again on the same port.
Calls in progress are cut off as at a restart, and their callers retry.

gRPC has no public API for this: interceptors, handlers and `wait_for_termination` come after the loop has ended. This
module uses private methods instead, tested with the versions in `TESTED_VERSIONS` (tests fail with any other, so that
a maintainer checks it). If they are missing, gRPC's plain server is used, and the log says so.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

TESTED_VERSIONS = ("1.85",)  # of grpcio
PRIVATE_METHODS = ("_make_request_call_future", "_start_shutting_down")

_PLAIN: Any = getattr(cygrpc, "AioServer", object)


class _RestartableServer(_PLAIN):
    """The core of a gRPC server that shuts down cleanly."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Request a method's next call from the core. A cancelled waiter leaves the request to be answered."""
        asked = super()._make_request_call_future(method)
        asked.add_done_callback(_retrieve_exception)
        return asyncio.shield(asked)

    async def _start_shutting_down(self) -> None:
        with suppress(Exception):  # the loop's error, which `wait_for_termination` raises too
            await super()._start_shutting_down()


def _retrieve_exception(asked: asyncio.Future[Any]) -> None:
    """Retrieve a request's exception, which it has if the server stopped."""
    if not asked.cancelled():
        asked.exception()


def server(**options: Any) -> Any:
    """Create a server as `grpc.aio.server` does."""
    if missing := [name for name in PRIVATE_METHODS if not hasattr(_PLAIN, name)]:
        log.warning("server_not_restartable", grpcio=grpc.__version__, missing=missing)
        return grpc.aio.server(**options)
    cygrpc.AioServer = _RestartableServer
    try:
        return grpc.aio.server(**options)
    finally:
        cygrpc.AioServer = _PLAIN
