"""One process of a service of which there are several: it answers while it leads, and has the leader answer else.

Theory of operation. The server's handlers take raw bytes. While this process leads they go to a stage, on which the
service was built and loaded for this term; whatever it believed under another term is forgotten. While it follows, they
are passed on. A leader that loses its lease closes its service, with all calls that are in it, and follows; the process
does not end. The health protocol says SERVING as long as a call would find somebody to answer it, here or elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

import grpc
import structlog
from google.protobuf import descriptor_pool

from cotenant.codec import errors
from cotenant.codec.methods import METHODS, Method
from cotenant.leadership.election import Election
from cotenant.leadership.fenced_store import Through, WarmStore
from cotenant.leadership.forwarding import Forwarder, is_forwarded
from cotenant.leadership.leader_handlers import Replaced, Stage
from cotenant.leadership.leadership_term import Held, leader_of
from cotenant.leadership.replica_service import serve_description
from cotenant.leadership.store_cache import RETRY_SECONDS, Mirror
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_cancellation import end
from cotenant.security import audit
from cotenant.store.port import NotLeader, Store, StoreDistrusted, StoreUnavailable
from cotenant.v1 import replica_service_pb2

log = structlog.get_logger()

BY_RECORDS = (  # refusals that callers take for final, and that may rest on what this replica does not know
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INVALID_ARGUMENT,  # a job that waits for one of which nothing is known
)
REVISION = "cotenant-revision"  # trailer of an answer from records: the store's revision up to which they were known


class Leading(Protocol):
    """A service that was built to lead."""

    async def close(self) -> None:
        """End it; what runs on nodes runs on."""


class Reader(Protocol):
    """What answers some calls of a replica that follows; with `serves` it is of use also where nobody leads."""

    @property
    def serves(self) -> bool:
        """Whether the health protocol is to say SERVING without a leader."""

    def take(self, mirror: Mirror, keys: Iterable[str]) -> None:
        """Hear that these keys of the mirror have changed."""

    async def run(self) -> None:
        """Keep up, until cancelled."""

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Answer a call, or None where the leader is to be asked."""


Lead = Callable[[Host, Store, Held], Awaitable[Leading]]


class Replica:
    """A process's part in a service. `lead` builds and loads the service for a term, and has it serve on a host.

    `prefix` is where the service keeps its records; they are followed, so that a new leader need not read them (""
    where it does so itself). `read` makes what answers from them; it is given what to call when that changes what the
    health protocol is to say. With `patient` the store need not be there at the start.
    """

    def __init__(
        self,
        server: Server,
        store: Store,
        election: Election,
        services: Sequence[str],
        prefix: str,
        lead: Lead,
        *,
        read: Callable[[Callable[[], None]], Reader] | None = None,
        patient: bool = False,
    ) -> None:
        self._server, self._store, self._election, self._lead = server, store, election, lead
        self._services, self._prefix = services, prefix
        self._forwarder = Forwarder(election)
        self._stage: Stage | None = None
        self._leading: Leading | None = None
        self._held: Held | None = None
        self._holding: asyncio.Task[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._read, self._patient = read, patient
        self._reader: Reader | None = None
        self._mirror: Mirror | None = None
        self._moved = asyncio.Event()  # set and cleared at once, to wake all who wait at that moment
        for service in services:
            server.add(self._add_to, service, service)

    @property
    def leads(self) -> bool:
        """Whether this process serves as the leader."""
        return self._stage is not None

    @property
    def store(self) -> Store:
        """The store that all replicas share."""
        return self._store

    def describe(self) -> replica_service_pb2.Replica:
        """Tell what this process is among the replicas."""
        leader = self._election.leader
        return replica_service_pb2.Replica(
            service=self._election.key.partition("/")[0],
            address=self._election.address,
            leads=self.leads,
            leader_address=leader.address if leader else "",
            term=leader.term if leader else 0,
            revision=self._mirror.revision if self._mirror else 0,
        )

    # Life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take part. Who has the store alone leads when this returns.

        Raises:
            StoreUnavailable: the store cannot be asked.
            Exception: whatever keeps a lone process from leading.
        """
        if not self._patient:
            try:
                await self._store.get(self._election.key)
            except StoreUnavailable as error:
                if not isinstance(error, StoreDistrusted):  # which can be accepted while this waits
                    raise StoreUnavailable(f"cannot start without the store: {error}") from error
        self._tasks.append(asyncio.create_task(self._election.follow(), name=f"{self._election.key}-follow"))
        self._tasks.append(asyncio.create_task(self._tell(), name=f"{self._election.key}-health"))
        if self._election.alone:
            await self._take_office(Mirror(self._store, self._prefix))
        self._set_serving()

    async def run(self) -> None:
        """Lead whenever this process is elected, and follow otherwise, until cancelled.

        Raises:
            Exception: whatever keeps this process from leading, but for the store's or the leadership's loss.
        """
        while True:
            if self._held is None:
                await self._campaign()
            assert self._holding
            await self._holding
            await self._leave_office()
            gc.collect()  # what the service knew in this term: all of it names each other, and the next reads it anew

    async def leave(self) -> None:
        """Give the office back. Calls are passed on to the next leader from then on."""
        await self._leave_office()

    async def close(self) -> None:
        """Take part no more."""
        await self._leave_office()
        await end(*self._tasks)
        await self._forwarder.close()

    async def _campaign(self) -> None:
        """Follow until this process is elected and serves."""
        reader = self._reader = self._read(self._set_serving) if self._read else None
        mirror = Mirror(self._store, self._prefix, lambda keys: reader.take(mirror, keys) if reader else None)
        tasks = []
        self._mirror = mirror
        if self._prefix:
            tasks.append(asyncio.create_task(mirror.run(), name=f"{self._prefix}-mirror"))
        if reader:
            tasks.append(asyncio.create_task(reader.run(), name=f"{self._prefix}-reader"))
        try:
            await self._take_office(mirror)
        finally:
            self._reader = self._mirror = None
            await end(*tasks)
            mirror.forget()  # the leader's store still knows it, and would keep all that the store held at first

    async def _take_office(self, mirror: Mirror) -> None:
        while self._held is None:
            held = await self._election.win()
            self._holding = asyncio.create_task(self._election.hold(held), name=f"{held.key}-hold")
            try:
                await self._serve(held, mirror)
            except (StoreUnavailable, NotLeader) as error:
                log.warning("not_loaded", key=self._election.key, term=held.term, error=str(error))
                await self._election.resign(held, "its state could not be read")
                if self._election.alone:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            except BaseException:
                await self._election.resign(held, "it cannot serve")
                raise

    async def _serve(self, held: Held, mirror: Mirror) -> None:
        """Build the service for a term, and let it answer."""
        stage = Stage(self._set_serving)
        store = Through(self._store) if self._election.alone else WarmStore(self._store, mirror, held.term)
        self._leading = await self._lead(stage, store, held)
        if held.lost:
            await self._leading.close()
            raise NotLeader(held.lost)
        self._held, self._stage = held, stage
        self._set_serving()
        log.info("serves_as_leader", key=held.key, term=held.term)

    async def _leave_office(self) -> None:
        held, leading, stage = self._held, self._leading, self._stage
        self._held = self._leading = self._stage = None
        if stage:
            stage.close()
        self._set_serving()
        if leading:
            try:
                await leading.close()
            except Exception:  # the office must be given back all the same
                log.exception("close_failed", key=self._election.key)
        if held:
            await self._election.resign(held)
        if self._holding:
            await asyncio.gather(self._holding, return_exceptions=True)
            self._holding = None

    # Health --------------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        while True:
            await self._election.changed()
            self._forwarder.follow(self._election.leader)
            self._set_serving()

    def _set_serving(self) -> None:
        """Say whether a call would find somebody to answer it, and wake those that wait for that."""
        self._moved.set()
        self._moved.clear()
        known = self._election.leader is not None or (self._reader is not None and self._reader.serves)
        for service in self._services:
            serving = self._stage.serving.get(service, True) if self._stage else known
            self._server.set_serving(service, serving)

    # Calls ---------------------------------------------------------------------------------------------------

    def _add_to(self, service: str, server: Any) -> None:
        """Add a handler of raw bytes for each method of a service to gRPC's server."""
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
            audit.passed_on("")  # not in this round, so far
            if stage := self._stage:
                held = self._held  # by now: what the stage knows is of this office, which may be over when it answers
                try:
                    return await stage.answer(path, request, context)
                except (Replaced, NotLeader, errors.Problem) as error:
                    weighed = await self._weighed(error, held)
                    if not (repeatable and _may_repeat(weighed, METHODS.get(path, Method()))):
                        raise _told(weighed) from None
                await self._lost(stage, deadline)
            else:
                reader = None if is_forwarded(context) else self._reader  # else an older answer of ours may come later
                if reader and (told := await reader.answer(path, request, context)) is not None:
                    return told
                leader = await self._forwarder.leader(context, deadline)
                if self._stage or leader.address == self._election.address:
                    await self._coming(deadline)
                    continue
                answer = await self._forwarder.answer(leader, path, request, context, deadline)
                if answer is not None:
                    return answer

    async def _weighed(self, error: Exception, held: Held | None) -> Exception:
        """Let a refusal stand that rests on what this replica knows only if it leads still, and in the same office.

        One that was replaced, and is cut off from the store, does not know what was acknowledged since.

        Raises:
            StoreUnavailable: nobody can tell.
        """
        if held is None or not held.lease or not isinstance(error, errors.Problem) or error.code not in BY_RECORDS:
            return error
        leader = leader_of(entry) if (entry := await self._store.get(held.key)) else None
        if leader and leader.identity == held.identity:
            return error
        held.lose(f"the key {held.key} was taken after term {held.term}")
        return NotLeader("another process leads now")

    async def _stream(self, path: str, request: Any, context: Any) -> AsyncIterator[bytes]:
        deadline = self._forwarder.deadline_of(context)
        while self._stage is None:
            leader = await self._forwarder.leader(context, deadline)
            if leader.address != self._election.address:
                async for response in self._forwarder.stream(leader, path, request, context):
                    yield response
                return
            await self._coming(deadline)
        stage = self._stage
        await audit.begun()
        try:
            async with aclosing(stage.stream(path, request, context)) as responses:
                async for response in responses:
                    yield response
        except Replaced as error:
            raise _told(error) from None

    async def _lost(self, stage: Stage, deadline: float) -> None:
        """Wait until a stage on which nothing is done any more is closed."""
        await self._until(lambda: self._stage is not stage, deadline)

    async def _coming(self, deadline: float) -> None:
        """Wait until this process serves as the leader that it was elected to be, or is it no more."""
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
                    await self._moved.wait()
                return
        raise errors.unavailable("the next leader of this service reads its state", reason=errors.NO_LEADER)


def _may_repeat(error: Exception, method: Method) -> bool:
    """Tell whether a call that did not come to its end here may be made again."""
    if isinstance(error, errors.Problem):
        return error.reason == errors.NOT_LEADER
    return isinstance(error, NotLeader) or method.retried


def _told(error: Exception) -> Exception:
    why = "this replica leads no more; whether it was done is not known"
    return errors.unavailable(why, 0.5, "LEADER_CHANGED") if isinstance(error, Replaced) else error


async def serve_replica(server: Server, replica: Replica, on_start: Callable[[int], None]) -> None:
    """Serve until cancelled, or until something keeps this process from leading."""
    serve_description(server, replica.describe, store=replica.store)
    try:
        await replica.start()
        port = await server.start()
        log.info("serving", port=port, leads=replica.leads)
        on_start(port)
        await replica.run()
    finally:
        await replica.leave()
        await server.stop(grace_seconds=1.0)
        await replica.close()


def reached_at(port: int, listens: str, advertised: str = "") -> str:
    """Say where other replicas reach a server; one that listens everywhere is reached by its machine's name.

    >>> reached_at(7070, "10.0.0.5:0")
    '10.0.0.5:7070'
    >>> reached_at(7070, "0.0.0.0:7070", "queue-0.mesh")
    'queue-0.mesh:7070'
    """
    host = listens.rpartition(":")[0]
    if advertised:
        host = f"[{advertised}]" if ":" in advertised and not advertised.startswith("[") else advertised
    elif host in ("0.0.0.0", "[::]", ""):
        host = socket.gethostname()
    return f"{host}:{port}"
