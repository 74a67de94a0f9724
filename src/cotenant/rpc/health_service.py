"""The standard health service. `Check` is open to everybody, for load balancers; `Watch` is open within limits.

A watch costs memory for as long as it lasts, and needs no token. So watches on unauthenticated connections are limited
per address, in total and in time. Beyond a limit the oldest watch ends, not the newest: gRPC's clients watch the health
of a server before their first call, and a flood must not lock them out. Watches on an authenticated connection are
limited by their number; watches with a token count like every other stream of the caller. gRPC's own servicer writes to
a watcher under a lock that `set` takes too: a watcher that never reads would keep the server's state from changing.
Here each watcher has an event of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.rpc.connections import Connections, address_of
from cotenant.security.identity import Authenticator, bearer_token
from cotenant.security.limits import Limits

WATCH = "/grpc.health.v1.Health/Watch"
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SHOWN = ("x509_common_name", "x509_subject_alternative_name")  # properties of a peer with a verified certificate


@dataclass(eq=False, slots=True)
class OpenWatch:
    """An open watch, and the time-out that ends it."""

    peer: str
    address: str
    limit: asyncio.Timeout


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves the health of each service."""

    def __init__(self, connections: Connections, authenticator: Authenticator, limits: Limits | None) -> None:
        self._connections, self._authenticator, self._limits = connections, authenticator, limits
        self._status: dict[str, Any] = {}
        self._changed: set[asyncio.Event] = set()
        self._shutting_down = False
        self._watches: dict[str, dict[OpenWatch, None]] = {}  # by peer
        self._open: dict[OpenWatch, None] = {}  # of peers that have not authenticated, the oldest first
        self._open_at: dict[str, dict[OpenWatch, None]] = {}  # the same, by address
        connections.on_authenticated = self._lift_bounds
        connections.watches = self._watches.__contains__

    def set(self, service: str, status: Any) -> None:
        """Set the status of a service; no effect once the server shuts down."""
        if not self._shutting_down and self._status.get(service) != status:
            self._status[service] = status
            self._wake()

    def shut_down(self) -> None:
        """Set every service to NOT_SERVING permanently."""
        self._shutting_down = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Return the current status."""
        self._note_caller(context)
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Stream the status now and whenever it changes."""
        self._note_caller(context)
        try:
            async with asyncio.timeout(None) as limit:
                with self._counted(context, limit):
                    await self._write_changes(request.service, context)
        except TimeoutError:
            return  # the peer may start a new watch
        except Problem as problem:
            details = ((errors.DETAILS_KEY, errors.to_status(problem).SerializeToString()),)
            await context.abort(problem.code, problem.message, trailing_metadata=details)

    async def _write_changes(self, service: str, context: Any) -> None:
        changed = asyncio.Event()
        self._changed.add(changed)
        told = None
        try:
            while True:
                changed.clear()
                status = self._status.get(service, UNKNOWN)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
        finally:
            self._changed.discard(changed)

    def _note_caller(self, context: Any) -> None:
        """Record the caller's peer; with a verified certificate it is authenticated."""
        shown = context.auth_context()
        if any(name in shown for name in SHOWN):
            self._connections.authenticated(context.peer())
        else:
            self._connections.asked(context.peer())

    @contextmanager
    def _counted(self, context: Any, limit: asyncio.Timeout) -> Iterator[None]:
        """Count a watch for as long as it lasts.

        Raises:
            Problem: RESOURCE_EXHAUSTED, or the watch's token is unknown.
        """
        peer, metadata, rules = context.peer(), context.invocation_metadata(), self._connections.rules
        watch = OpenWatch(peer, address_of(peer), limit)
        with ExitStack() as counted:
            if bearer_token(metadata) is not None:
                identity = self._authenticator.authenticate(WATCH, metadata, context.auth_context)
                self._connections.authenticated(peer)
                if self._limits is not None:
                    counted.enter_context(self._limits.stream(identity))
            elif not self._connections.is_authenticated(peer):
                self._bound(watch)
            elif len(self._watches.get(peer, ())) >= rules.watches_per_connection:
                raise errors.exhausted(
                    "TOO_MANY_STREAMS",
                    f"this connection has {rules.watches_per_connection} health watches open; end one of them first",
                    1.0,
                    limit=str(rules.watches_per_connection),
                )
            self._watches.setdefault(peer, {})[watch] = None
            try:
                yield
            finally:
                self._forget(watch)

    def _bound(self, watch: OpenWatch) -> None:
        """Limit a watch in time, and the number of watches: the oldest ones make room for it."""
        rules = self._connections.rules
        watch.limit.reschedule(asyncio.get_running_loop().time() + rules.watch_seconds)
        here = self._open_at.setdefault(watch.address, {})
        if len(here) >= rules.watches_per_address:
            self._end(next(iter(here)))
        elif len(self._open) >= rules.watches_in_all:
            self._end(next(iter(self._open)))
        self._open[watch] = self._open_at.setdefault(watch.address, {})[watch] = None

    def _end(self, watch: OpenWatch) -> None:
        self._release(watch)
        with suppress(RuntimeError):  # it is already ending
            watch.limit.reschedule(asyncio.get_running_loop().time())

    def _lift_bounds(self, peer: str) -> None:
        """Remove the limits from the watches of a connection that has authenticated."""
        for watch in self._watches.get(peer, ()):
            if watch in self._open:
                self._release(watch)
                with suppress(RuntimeError):  # it is already ending
                    watch.limit.reschedule(None)

    def _release(self, watch: OpenWatch) -> None:
        """Stop counting a watch among those of unauthenticated connections."""
        if self._open.pop(watch, watch) is None:
            here = self._open_at[watch.address]
            del here[watch]
            if not here:
                del self._open_at[watch.address]

    def _forget(self, watch: OpenWatch) -> None:
        self._release(watch)
        self._connections.asked(watch.peer)
        watches = self._watches[watch.peer]
        del watches[watch]
        if not watches:
            del self._watches[watch.peer]
