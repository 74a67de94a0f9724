"""The standard health service. `Check` is open to everybody, for load balancers; `Watch` is open within limits.

A watch costs memory for as long as it lasts, and needs no token. So those of connections that have not authenticated
are bounded per address, in all and in time. Beyond a limit the oldest ends, not the newest: gRPC's clients watch the
health of a server before their first call, and a flood must not lock them out. Once a connection has authenticated its
watches are bounded by their number on it; those that carry a token count like every other stream of its bearer. gRPC's
own servicer writes to a watcher under a lock that `set` takes too: one that never reads would keep the state of the
server from changing. Here each watcher has an event of its own.
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
from cotenant.security.identity import Authenticator, bearer
from cotenant.security.limits import Limits

WATCH = "/grpc.health.v1.Health/Watch"
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SHOWN = ("x509_common_name", "x509_subject_alternative_name")  # of a peer with a certificate that was verified


@dataclass(eq=False, slots=True)
class OpenWatch:
    """A watch that is open, and what ends it."""

    peer: str
    address: str
    limit: asyncio.Timeout


class Health(health_pb2_grpc.HealthServicer):
    """Tells by service whether it serves."""

    def __init__(self, connections: Connections, authenticator: Authenticator, limits: Limits | None) -> None:
        self._connections, self._authenticator, self._limits = connections, authenticator, limits
        self._status: dict[str, Any] = {}
        self._changed: set[asyncio.Event] = set()
        self._shutting_down = False
        self._watches: dict[str, dict[OpenWatch, None]] = {}  # by peer
        self._open: dict[OpenWatch, None] = {}  # of peers that have not authenticated, the oldest first
        self._open_at: dict[str, dict[OpenWatch, None]] = {}  # the same by address
        connections.on_authenticated = self._settle
        connections.watches = self._watches.__contains__

    def set(self, service: str, status: Any) -> None:
        """Set the status of a service; without effect once the server shuts down."""
        if not self._shutting_down and self._status.get(service) != status:
            self._status[service] = status
            self._wake()

    def shut_down(self) -> None:
        """Set every service to NOT_SERVING for good."""
        self._shutting_down = True
        self._status = dict.fromkeys(self._status, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Answer once."""
        self._note(context)
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Answer now and whenever the status changes."""
        self._note(context)
        try:
            async with asyncio.timeout(None) as limit:
                with self._counted(context, limit):
                    await self._tell(request.service, context)
        except TimeoutError:
            return  # the peer may begin again
        except Problem as problem:
            details = ((errors.DETAILS_KEY, errors.to_status(problem).SerializeToString()),)
            await context.abort(problem.code, problem.message, trailing_metadata=details)

    async def _tell(self, service: str, context: Any) -> None:
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

    def _note(self, context: Any) -> None:
        """Note who asks: a certificate was verified in the handshake."""
        shown = context.auth_context()
        if any(name in shown for name in SHOWN):
            self._connections.authenticated(context.peer())
        else:
            self._connections.asked(context.peer())

    @contextmanager
    def _counted(self, context: Any, limit: asyncio.Timeout) -> Iterator[None]:
        """Count a watch for as long as it lasts.

        Raises:
            Problem: RESOURCE_EXHAUSTED; or the token that it carries is not known.
        """
        peer, metadata, rules = context.peer(), context.invocation_metadata(), self._connections.rules
        watch = OpenWatch(peer, address_of(peer), limit)
        with ExitStack() as counted:
            if bearer(metadata) is not None:
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
        """Bound a watch in time, and their number: the oldest make room for it."""
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
        with suppress(RuntimeError):  # it ends already
            watch.limit.reschedule(asyncio.get_running_loop().time())

    def _settle(self, peer: str) -> None:
        """Take the bounds from the watches of a connection that has authenticated."""
        for watch in self._watches.get(peer, ()):
            if watch in self._open:
                self._release(watch)
                with suppress(RuntimeError):  # it ends already
                    watch.limit.reschedule(None)

    def _release(self, watch: OpenWatch) -> None:
        """Count a watch no longer among those of connections that have not authenticated."""
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
