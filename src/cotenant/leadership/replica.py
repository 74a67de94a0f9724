"""One replica of a service: it answers calls while it leads, and forwards them to the leader otherwise.

Theory of operation. The server's handlers take raw bytes. While this process leads, they pass calls to the handlers of
the service that was built and loaded for this term; all state of an earlier term is dropped. While it follows, calls
are forwarded. A leader that loses its lease closes its service, with all calls in progress, and follows; the process
keeps running. The health protocol reports SERVING as long as a call would be answered, here or by another replica.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import grpc
from google.protobuf import descriptor_pool

from cotenant.codec import errors
from cotenant.codec.method_rules import UNKNOWN_METHOD, MethodRules
from cotenant.codec.method_table import METHOD_RULES
from cotenant.leadership.election import Election
from cotenant.leadership.fenced_store import DelegatingStore, WarmStore
from cotenant.leadership.forwarding import Forwarder
from cotenant.leadership.leader_handlers import LeaderHandlers, LeaderReplaced
from cotenant.leadership.leadership_term import HeldTerm, leader_of
from cotenant.leadership.process_service import serve_process_service
from cotenant.leadership.store_cache import RETRY_SECONDS, StoreCache
from cotenant.rpc import gc_tuning
from cotenant.rpc.relay import is_forwarded
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security import audit
from cotenant.store.port import NotLeader, Store, StoreDistrusted, StoreUnavailable
from cotenant.telemetry.plain_structlog import structlog
from cotenant.v1 import process_service_pb2

log = structlog.get_logger()

RECORD_REFUSALS = (  # refusals that callers treat as final, but a stale leader may give them wrongly
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INVALID_ARGUMENT,  # a job with an unknown dependency
)
REVISION = "cotenant-revision"  # trailer of a follower's answer: the store revision it was read at


class LeaderService(Protocol):
    """A service that was built for a leadership term."""

    async def close(self) -> None:
        """Stop the service; attempts on nodes keep running."""


class FollowerReader(Protocol):
    """Answers some calls on a follower; with `serves` also when there is no leader."""

    @property
    def serves(self) -> bool:
        """Whether the health protocol reports SERVING without a leader."""

    def take(self, cache: StoreCache, keys: Iterable[str]) -> None:
        """Handle a change of these keys in the cache."""

    async def run(self) -> None:
        """Keep up with the store until cancelled."""

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Answer a call, or return None if the leader must answer it."""


StartLeading = Callable[[Host, Store, HeldTerm], Awaitable[LeaderService]]


class Replica:
    """One process's replica of a service. `lead` builds and loads the service for a term and registers it on a host.

    `prefix` is where the service keeps its records; a follower caches them, so that a new leader need not read them (""
    if the service does that itself). `read` builds the follower's reader; its argument is a callback for changes of the
    health status. With `patient`, the store may be unavailable at the start.
    """

    def __init__(
        self,
        server: Server,
        store: Store,
        election: Election,
        services: Sequence[str],
        prefix: str,
        lead: StartLeading,
        *,
        read: Callable[[Callable[[], None]], FollowerReader] | None = None,
        patient: bool = False,
    ) -> None:
        self._server, self._store, self._election, self._lead = server, store, election, lead
        self._services, self._prefix = services, prefix
        self._forwarder = Forwarder(election)
        self._leader_handlers: LeaderHandlers | None = None
        self._leading: LeaderService | None = None
        self._held: HeldTerm | None = None
        self._holding: asyncio.Task[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._read, self._patient = read, patient
        self._reader: FollowerReader | None = None
        self._cache: StoreCache | None = None
        self._state_changed = asyncio.Event()  # set and cleared at once, to wake all current waiters
        for service in services:
            server.add(self._add_to, service, service)

    @property
    def leads(self) -> bool:
        """Whether this process serves as the leader."""
        return self._leader_handlers is not None

    @property
    def store(self) -> Store:
        """The store that all replicas share."""
        return self._store

    def describe(self) -> process_service_pb2.Replica:
        """Return this process's status among the replicas."""
        leader = self._election.leader
        return process_service_pb2.Replica(
            service=self._election.key.partition("/")[0],
            address=self._election.address,
            leads=self.leads,
            leader_address=leader.address if leader else "",
            term=leader.term if leader else 0,
            revision=self._cache.revision if self._cache else 0,
        )

    # Life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the replicas. A process that has the store alone leads when this returns.

        Raises:
            StoreUnavailable: the store cannot be reached.
            Exception: a lone process cannot lead.
        """
        if not self._patient:
            try:
                await self._store.get(self._election.key)
            except StoreUnavailable as error:
                if not isinstance(error, StoreDistrusted):  # an operator can accept the store while this waits
                    raise StoreUnavailable(f"cannot start without the store: {error}") from error
        self._tasks.append(asyncio.create_task(self._election.follow(), name=f"{self._election.key}-follow"))
        self._tasks.append(asyncio.create_task(self._watch_leader(), name=f"{self._election.key}-health"))
        if self._election.alone:
            await self._acquire_leadership(StoreCache(self._store, self._prefix))
        self._set_serving()

    async def run(self) -> None:
        """Lead whenever this process is elected, and follow otherwise, until cancelled.

        Raises:
            Exception: this process cannot lead, for a reason other than loss of the store or of the leadership.
        """
        while True:
            if self._held is None:
                await self._campaign()
            assert self._holding
            await self._holding
            await self._release_leadership()
            gc_tuning.refreeze()  # the state of this term is one reference cycle, and the next term reads it again

    async def resign(self) -> None:
        """Resign the leadership. Calls are forwarded to the next leader from then on."""
        await self._release_leadership()

    async def close(self) -> None:
        """Resign and leave the replicas."""
        await self._release_leadership()
        await cancel_and_wait(*self._tasks)
        await self._forwarder.close()

    async def _campaign(self) -> None:
        """Follow until this process is elected and serves."""
        reader = self._reader = self._read(self._set_serving) if self._read else None
        cache = StoreCache(self._store, self._prefix, lambda keys: reader.take(cache, keys) if reader else None)
        tasks = []
        self._cache = cache
        if self._prefix:
            tasks.append(asyncio.create_task(cache.run(), name=f"{self._prefix}-mirror"))
        if reader:
            tasks.append(asyncio.create_task(reader.run(), name=f"{self._prefix}-reader"))
        try:
            await self._acquire_leadership(cache)
        finally:
            self._reader = self._cache = None
            await cancel_and_wait(*tasks)
            cache.forget()  # the leader's store still refers to it and would keep all entries alive

    async def _acquire_leadership(self, cache: StoreCache) -> None:
        while self._held is None:
            held = await self._election.campaign()
            self._holding = asyncio.create_task(self._election.hold(held), name=f"{held.key}-hold")
            try:
                await self._serve(held, cache)
            except (StoreUnavailable, NotLeader) as error:
                log.warning("leader_load_failed", key=self._election.key, term=held.term, error=str(error))
                await self._election.resign(held, "its state could not be read")
                if self._election.alone:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            except BaseException:
                await self._election.resign(held, "it cannot serve")
                raise

    async def _serve(self, held: HeldTerm, cache: StoreCache) -> None:
        """Build the service for a term and start answering calls."""
        leader_handlers = LeaderHandlers(self._set_serving)
        store = DelegatingStore(self._store) if self._election.alone else WarmStore(self._store, cache, held.term)
        self._leading = await self._lead(leader_handlers, store, held)
        if held.lost:
            await self._leading.close()
            raise NotLeader(held.lost)
        gc_tuning.freeze_young()  # what was loaded stays until the term ends
        self._held, self._leader_handlers = held, leader_handlers
        self._set_serving()
        log.info("leader_serving", key=held.key, term=held.term)

    async def _release_leadership(self) -> None:
        held, leading, leader_handlers = self._held, self._leading, self._leader_handlers
        self._held = self._leading = self._leader_handlers = None
        if leader_handlers:
            leader_handlers.close()
        self._set_serving()
        if leading:
            try:
                await leading.close()
            except Exception:  # the leadership must be resigned anyway
                log.exception("close_failed", key=self._election.key)
        if held:
            await self._election.resign(held)
        if self._holding:
            await asyncio.gather(self._holding, return_exceptions=True)
            self._holding = None

    # Health --------------------------------------------------------------------------------------------------

    async def _watch_leader(self) -> None:
        while True:
            await self._election.changed()
            self._forwarder.follow(self._election.leader)
            self._set_serving()

    def _set_serving(self) -> None:
        """Report whether a call would be answered, and wake the waiting calls."""
        self._state_changed.set()
        self._state_changed.clear()
        known = self._election.leader is not None or (self._reader is not None and self._reader.serves)
        for service in self._services:
            serving = self._leader_handlers.serving.get(service, True) if self._leader_handlers else known
            self._server.set_serving(service, serving)

    # Calls ---------------------------------------------------------------------------------------------------

    def _add_to(self, service: str, server: Any) -> None:
        """Register a raw-byte handler for each method of a service with the gRPC server."""
        described: Any = descriptor_pool.Default().FindServiceByName(service)
        handlers = {method.name: self._handler(service, method) for method in described.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _handler(self, service: str, method: Any) -> Any:
        path = f"/{service}/{method.name}"
        repeatable = not method.client_streaming

        async def answer(request: Any, context: Any) -> bytes:
            return await self._answer(path, request, context, repeatable)

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            async for response in self._stream(path, request, context):
                yield response

        stream.passes_on = True  # type: ignore[attr-defined]  # functions have attributes
        kinds = ("unary", "stream")
        make = getattr(grpc, f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}_rpc_method_handler")
        return make(stream if method.server_streaming else answer)

    async def _answer(self, path: str, request: Any, context: Any, repeatable: bool) -> bytes:
        deadline = self._forwarder.deadline_of(context)
        while True:
            audit.record_forwarding("")  # not forwarded in this iteration so far
            if leader_handlers := self._leader_handlers:
                held = self._held  # read now: the answer belongs to this term, which may be over by then
                try:
                    return await leader_handlers.answer(path, request, context)
                except (LeaderReplaced, NotLeader, errors.Problem) as error:
                    weighed = await self._verified_refusal(error, held)
                    if not (repeatable and _may_retry(weighed, METHOD_RULES.get(path, UNKNOWN_METHOD))):
                        raise _as_status(weighed) from None
                await self._wait_until_replaced(leader_handlers, deadline)
            else:
                reader = None if is_forwarded(context) else self._reader  # a forwarded call needs the leader's answer
                if reader and (told := await reader.answer(path, request, context)) is not None:
                    return told
                leader = await self._forwarder.leader(context, deadline)
                if self._leader_handlers or leader.address == self._election.address:
                    await self._wait_until_leading(deadline)
                    continue
                answer = await self._forwarder.answer(leader, path, request, context, deadline)
                if answer is not None:
                    return answer

    async def _verified_refusal(self, error: Exception, held: HeldTerm | None) -> Exception:
        """Return a refusal only if this replica still leads in the same term; else return `NotLeader`.

        A replaced leader that is cut off from the store does not know what was acknowledged since.

        Raises:
            StoreUnavailable: the leadership cannot be verified.
        """
        if held is None or not held.lease or not isinstance(error, errors.Problem) or error.code not in RECORD_REFUSALS:
            return error
        leader = leader_of(entry) if (entry := await self._store.get(held.key)) else None
        if leader and leader.identity == held.identity:
            return error
        held.lose(f"the key {held.key} was taken by another process after term {held.term}")
        return NotLeader("another process leads now")

    async def _stream(self, path: str, request: Any, context: Any) -> AsyncIterator[bytes]:
        deadline = self._forwarder.deadline_of(context)
        while self._leader_handlers is None:
            leader = await self._forwarder.leader(context, deadline)
            if leader.address != self._election.address:
                async for response in self._forwarder.stream(leader, path, request, context):
                    yield response
                return
            await self._wait_until_leading(deadline)
        leader_handlers = self._leader_handlers
        await audit.log_stream()
        try:
            async with aclosing(leader_handlers.stream(path, request, context)) as responses:
                async for response in responses:
                    yield response
        except LeaderReplaced as error:
            raise _as_status(error) from None

    async def _wait_until_replaced(self, leader_handlers: LeaderHandlers, deadline: float) -> None:
        """Wait until the handlers of an ended term are closed."""
        await self._until(lambda: self._leader_handlers is not leader_handlers, deadline)

    async def _wait_until_leading(self, deadline: float) -> None:
        """Wait until this process serves as the elected leader, or is no longer elected."""
        await self._until(
            lambda: (
                self.leads or self._election.leader is None or self._election.leader.address != self._election.address
            ),
            deadline,
        )

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not condition():
                    await self._state_changed.wait()
                return
        raise errors.unavailable("the next leader of this service is still loading its state", reason=errors.NO_LEADER)


def _may_retry(error: Exception, method: MethodRules) -> bool:
    """Return whether a call that failed here may be retried."""
    if isinstance(error, errors.Problem):
        return error.reason == errors.NOT_LEADER
    return isinstance(error, NotLeader) or method.retried


def _as_status(error: Exception) -> Exception:
    why = "this replica lost its leadership; the outcome of the call is unknown"
    return errors.unavailable(why, 0.5, "LEADER_CHANGED") if isinstance(error, LeaderReplaced) else error


async def serve_replica(server: Server, replica: Replica, on_start: Callable[[int], None]) -> None:
    """Serve until cancelled, or until an error keeps this process from leading."""
    serve_process_service(server, replica.describe, store=replica.store)
    try:
        await replica.start()
        port = await server.start()
        log.info("serving", port=port, leads=replica.leads)
        on_start(port)
        await replica.run()
    finally:
        await replica.resign()
        await server.stop(grace_seconds=1.0)
        await replica.close()


def advertised_address(port: int, listens: str, advertised: str = "") -> str:
    """Return the address at which other replicas reach a server; a wildcard address becomes the machine's host name.

    >>> advertised_address(7070, "10.0.0.5:0")
    '10.0.0.5:7070'
    >>> advertised_address(7070, "0.0.0.0:7070", "queue-0.mesh")
    'queue-0.mesh:7070'
    """
    host = listens.rpartition(":")[0]
    if advertised:
        host = f"[{advertised}]" if ":" in advertised and not advertised.startswith("[") else advertised
    elif host in ("0.0.0.0", "[::]", ""):
        host = socket.gethostname()
    return f"{host}:{port}"
