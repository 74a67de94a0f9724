"""RPCs without sockets: stubs on one side, the services' own guard and servicers on the other, bytes in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NoReturn

import grpc
import grpc.aio
from tests.verification.control_plane.virtual_time import Dead, Process

from cotenant.rpc.auth_interceptor import AuthInterceptor
from cotenant.rpc.channel import Channel
from cotenant.security.identity import Anyone

HOP_SECONDS = 0.0005
RECORDED_CALLS_MAX, REPEAT_SECONDS = 200, 10.0
SLOW_SECONDS_MAX = 0.4
SLOW_SHARE = 0.03
DEADLINE_SECONDS = 60.0
REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def _error(code: grpc.StatusCode, details: str, trailers: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


class _Aborted(grpc.aio.AbortError):  # type: ignore[misc]  # compiled, without types
    """A servicer has aborted its call."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__()
        self.error = error


class _Context:
    """A servicer's context."""

    def __init__(self, metadata: Any, loop: asyncio.AbstractEventLoop, deadline: float | None) -> None:
        self._metadata, self._loop, self._deadline = tuple(metadata or ()), loop, deadline
        self.trailers: Any = ()

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def peer(self) -> str:
        return "simulated"

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.trailers = trailers

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        raise _Aborted(_error(code, details, trailing_metadata))


class SimulatedServer:
    """Replaces a process's server: accepts servicers as the real one does, behind the real guard."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._auth_interceptor = AuthInterceptor(Anyone(), DEADLINE_SECONDS)
        self._handlers: dict[str, Any] = {}
        self._generic: list[Any] = []
        self._guarded: dict[str, Any] = {}

    def add(self, add_servicer: Callable[[Any, Any], None], servicer: Any, service: str) -> None:
        """Serve a service."""
        add_servicer(servicer, self)

    def set_serving(self, service: str, serving: bool) -> None:
        """Do nothing: health is never queried."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add handlers as generated code provides them."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add handlers of raw bytes."""
        self._generic += handlers

    async def handler(self, path: str, metadata: Any) -> Any:
        """Return a method's handler, guarded."""
        if path in self._guarded:
            return self._guarded[path]
        call = _Details(path, metadata)

        async def found(call: _Details) -> Any:
            handlers = (generic.service(call) for generic in self._generic)
            return self._handlers.get(path) or next((handler for handler in handlers if handler is not None), None)

        self._guarded[path] = await self._auth_interceptor.intercept_service(found, call)
        return self._guarded[path]


class MuteServer(SimulatedServer):
    """Replaces a server: accepts every call, and answers none."""

    async def handler(self, path: str, metadata: Any) -> Any:
        """Wait forever."""
        await asyncio.get_running_loop().create_future()


class _Details:
    def __init__(self, method: str, metadata: Any) -> None:
        self.method, self.invocation_metadata = method, metadata


class Network:
    """All servers and the links between processes. `cut` holds disconnected pairs of names."""

    def __init__(self, rng: Random) -> None:
        self.servers: dict[str, SimulatedServer] = {}
        self.cut: set[frozenset[str]] = set()
        self.slow_share, self.slow_seconds_max = SLOW_SHARE, SLOW_SECONDS_MAX
        self.lags: dict[str, float] = {}  # by name: extra seconds for each message of a process
        self.recorded: deque[_RecordedCall] = deque(maxlen=RECORDED_CALLS_MAX)  # the latest calls, to be redelivered
        self._repeated: list[_Call] = []
        self._rng = rng

    def channel(self, source: Process, addresses: Sequence[str]) -> Channel:
        """Return a channel from a process to the servers at some addresses, in turn."""
        return Channel(lambda: _Wire(self, source, addresses), "")

    def forwarding_channel(self, source: Process, address: str) -> Any:
        """Return a channel that forwards calls unchanged."""
        return _Wire(self, source, [address])

    def redeliver(self, methods: str = "") -> None:
        """Redeliver an earlier call, perhaps to another replica; its answer is dropped."""
        calls = [one for one in self.recorded if one.path.endswith(methods)]
        if calls:
            one = self._rng.choice(calls)
            wire = _Wire(self, Process("nobody"), self._rng.sample(one.addresses, len(one.addresses)))
            call = _Call(wire, one.path, _identity, _identity, one.metadata, REPEAT_SECONDS)
            self._repeated.append(call.unary(one.sent, streams_requests=False))

    def close(self) -> None:
        """End the redelivered calls."""
        for call in self._repeated:
            call.cancel()

    async def hop(self, source: Process, target: Process) -> None:
        """Wait for the latency of one direction, slow at times; a paused end blocks it.

        Raises:
            Dead: one end was killed, or the two are disconnected.
        """
        draw = self._rng.random
        slow = draw() * self.slow_seconds_max if draw() < self.slow_share else 0.0
        if self.lags:
            slow += self.lags.get(source.name, 0.0) + self.lags.get(target.name, 0.0)
        await asyncio.sleep(HOP_SECONDS * (0.5 + draw()) + slow)
        if not source.goes:
            await source.gate()
        if not target.goes:
            await target.gate()
        if self.cut and frozenset((source.name, target.name)) in self.cut:
            raise Dead(target.name)


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    path: str
    sent: bytes
    metadata: Any
    addresses: Sequence[str]


class _Wire:
    """The implementation of a channel."""

    def __init__(self, network: Network, source: Process, addresses: Sequence[str]) -> None:
        self.network, self.source, self.addresses = network, source, list(addresses)
        self._turn = 0

    def server(self) -> SimulatedServer:
        """Return the next server that listens."""
        for _ in self.addresses:
            self._turn += 1
            server = self.network.servers.get(self.addresses[self._turn % len(self.addresses)])
            if server and not server.process.dead:
                return server
        raise Dead("no server listens")

    def _method(self, path: str, write: Any, read: Any, *, streams_requests: bool, streams: bool) -> Callable[..., Any]:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Any:
            made = _Call(self, path, write or _identity, read or _identity, metadata, timeout)
            return made.stream(request, streams_requests) if streams else made.unary(request, streams_requests)

        return call

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(path, request_serializer, response_deserializer, streams_requests=False, streams=False)

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(path, request_serializer, response_deserializer, streams_requests=False, streams=True)

    def stream_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(path, request_serializer, response_deserializer, streams_requests=True, streams=False)

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._method(path, request_serializer, response_deserializer, streams_requests=True, streams=True)

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: no resource is held."""


def _identity(message: Any) -> Any:
    return message


class _Call:
    """One call: a task on the caller's side, and one on the server's."""

    def __init__(self, wire: _Wire, path: str, write: Any, read: Any, metadata: Any, timeout: float | None) -> None:
        self._wire, self._path, self._write, self._read, self._metadata = wire, path, write, read, metadata
        self._timeout, self._trailers, self._late = timeout, (), False
        self._answers: asyncio.Queue[Any]  # of a stream
        self._task: asyncio.Task[Any] | None = None

    def unary(self, request: Any, streams_requests: bool) -> _Call:
        self._task = asyncio.get_running_loop().create_task(self._converse(request, streams_requests, streams=False))
        self._task.add_done_callback(_retrieve_exception)
        return self

    def stream(self, request: Any, streams_requests: bool) -> _Call:
        self._answers = asyncio.Queue(16)
        self._task = asyncio.get_running_loop().create_task(self._converse(request, streams_requests, streams=True))
        self._task.add_done_callback(self._end)
        return self

    def _end(self, task: asyncio.Task[Any]) -> None:
        _retrieve_exception(task)
        while self._answers.full():
            self._answers.get_nowait()
        self._answers.put_nowait(None)

    def __await__(self) -> Any:
        assert self._task
        return self._task.__await__()

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        assert self._task
        try:
            answer = await self._answers.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if answer is not None:
            return self._read(answer)
        self._answers.put_nowait(None)
        if self._task.cancelled():
            raise _error(grpc.StatusCode.CANCELLED, "cancelled by the caller")
        self._task.result()
        raise StopAsyncIteration

    def cancel(self) -> bool:
        assert self._task
        return self._task.cancel()

    async def trailing_metadata(self) -> Any:
        return self._trailers

    async def _converse(self, request: Any, streams_requests: bool, *, streams: bool) -> Any:
        timer = self._start_deadline()
        try:
            return await self._exchange(request, streams_requests, streams)
        except asyncio.CancelledError:
            if self._late and self._task and not self._task.uncancel():
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded") from None
            raise
        except Dead as error:
            raise _error(grpc.StatusCode.UNAVAILABLE, f"unavailable: {error}") from None
        except _Aborted as aborted:
            raise aborted.error from None
        finally:
            if timer:
                timer.cancel()

    def _start_deadline(self) -> asyncio.Handle | None:
        """Cancel the call at its deadline: `asyncio.timeout` does the same in three times the time."""
        if self._timeout is None:
            return None
        loop = asyncio.get_running_loop()
        return (
            loop.call_later(self._timeout, self._on_deadline)
            if self._timeout > 0
            else loop.call_soon(self._on_deadline)
        )

    def _on_deadline(self) -> None:
        assert self._task
        self._late = True
        self._task.cancel()

    async def _exchange(self, request: Any, streams_requests: bool, streams: bool) -> Any:
        network, source, server = self._wire.network, self._wire.source, self._wire.server()
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        sent = self._write(request) if not streams_requests else None
        kept = sent is not None and not streams
        recorded = _RecordedCall(self._path, sent or b"", self._metadata, self._wire.addresses) if kept else None
        if recorded:
            network.recorded.append(recorded)
        await network.hop(source, server.process)
        context = _Context(self._metadata, loop, deadline)
        handler = await server.handler(self._path, self._metadata)
        pieces: asyncio.Queue[bytes | None] | None = asyncio.Queue() if streams_requests else None
        serving = server.process.start(
            self._serve(handler, _drain_queue(pieces) if pieces is not None else sent, context, streams, server.process)
        )
        sending = (
            asyncio.ensure_future(self._send(request, pieces, serving, server.process)) if pieces is not None else None
        )
        over = loop.create_future()
        serving.add_done_callback(partial(_end, over))
        try:
            await over
            if serving.cancelled():
                raise Dead(server.process.name)
            answer = serving.result()
        except _Aborted as aborted:
            if recorded and aborted.error.code() in REFUSED and recorded in network.recorded:
                network.recorded.remove(recorded)  # a refused caller has tried another replica
            raise
        finally:
            serving.cancel()
            if sending:
                sending.cancel()
        await network.hop(server.process, source)
        self._trailers = context.trailers
        return None if streams else self._read(answer)

    async def _send(
        self, requests: Any, pieces: asyncio.Queue[bytes | None], serving: asyncio.Task[Any], target: Process
    ) -> None:
        """Send requests one by one, at the caller's pace; end a call whose caller is disconnected."""
        try:
            async for request in _iterate_requests(requests):
                await self._wire.network.hop(self._wire.source, target)
                pieces.put_nowait(self._write(request))
        except Dead:
            serving.cancel()
        pieces.put_nowait(None)

    async def _serve(self, handler: Any, sent: Any, context: _Context, streams: bool, process: Process) -> Any:
        parse = handler.request_deserializer or _identity
        write = handler.response_serializer or _identity
        message = _decode_each(parse, sent) if handler.request_streaming else parse(sent)
        if not streams:
            behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
            return write(await behavior(message, context))
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        async with aclosing(behavior(message, context)) as responses:
            async for response in responses:
                data = write(response)
                await self._wire.network.hop(process, self._wire.source)
                await self._answers.put(data)
        return None


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _end(over: asyncio.Future[None], _: Any) -> None:
    if not over.done():
        over.set_result(None)


async def _iterate_requests(requests: Any) -> AsyncIterator[Any]:
    if hasattr(requests, "__aiter__"):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


async def _drain_queue(pieces: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (piece := await pieces.get()) is not None:
        yield piece


async def _decode_each(parse: Any, pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for piece in pieces:
        yield parse(piece)
