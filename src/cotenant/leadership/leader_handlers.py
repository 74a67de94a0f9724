"""The servicers of one leadership term: their handlers by method, and the calls in progress.

A gRPC server's handlers cannot be exchanged once it has started. So a replica's server registers raw-byte handlers for
every method of its services; they pass each call to the handlers of the current term, which decode the bytes as the
generated code would.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cotenant.codec import errors, request_limits
from cotenant.rpc.decoding import decode
from cotenant.rpc.server import AddServicer


class LeaderReplaced(Exception):
    """The term ended while a call was in progress: the outcome of the call is unknown."""


class LeaderHandlers:
    """Registers servicers as a server does, for one term. `on_serving` is called when a service's health changes."""

    def __init__(self, on_serving: Callable[[], None] = lambda: None) -> None:
        self.serving: dict[str, bool] = {}
        self._on_serving = on_serving
        self._registered: dict[str, Any] = {}
        self._handlers: dict[str, _Handler] = {}  # of the methods that were called
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Add a service."""
        add_servicer(servicer, self)
        self.serving.setdefault(service, True)

    def set_serving(self, service: str, serving: bool) -> None:
        """Set whether a service can do its work."""
        self.serving[service] = serving
        self._on_serving()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the handlers that generated code passes in."""
        self._registered |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignore the second registration by generated code, for older servers."""

    def close(self) -> None:
        """Cancel all calls; their outcomes are unknown."""
        self._closed = True
        for call in self._calls:
            call.cancel()

    @contextmanager
    def _call(self) -> Iterator[asyncio.Task[Any]]:
        """Track a call, so that it ends with the term."""
        task = asyncio.current_task()
        assert task
        if self._closed:
            raise LeaderReplaced
        self._calls.add(task)
        try:
            yield task
        except asyncio.CancelledError:
            if self._closed and task.uncancel() == 0:
                raise LeaderReplaced from None
            raise
        finally:
            self._calls.discard(task)

    def _handler(self, path: str) -> _Handler:
        if path not in self._handlers:
            self._handlers[path] = _Handler(path, self._registered[path])
        return self._handlers[path]

    async def answer(self, path: str, request: Any, context: Any) -> bytes:
        """Serve a call with a single response. `request` is bytes, or a stream of bytes."""
        handler = self._handler(path)
        message = await handler.read(request)
        with self._call():
            return bytes(handler.write(await handler.served()(message, context)))

    async def stream(self, path: str, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        """Serve a call with a response stream."""
        handler = self._handler(path)
        message = await handler.read(request)
        with self._call() as task:
            async with aclosing(handler.served()(message, context)) as responses:
                async for response in responses:
                    self._calls.discard(task)  # a cancel while gRPC writes would send no status
                    yield handler.write(response)
                    if self._closed:
                        raise LeaderReplaced
                    self._calls.add(task)


class _Handler:
    """A method's handler: what the generated code provides, with the parts that all calls share."""

    __slots__ = ("_behavior", "_parse", "_path", "_streams", "write")

    def __init__(self, path: str, handler: Any) -> None:
        asks, answers = handler.request_streaming, handler.response_streaming
        behavior = getattr(handler, f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}")
        is_served = inspect.isasyncgenfunction(behavior) or inspect.iscoroutinefunction(behavior)
        self._path, self._streams, self._parse = path, asks, handler.request_deserializer
        self._behavior = behavior if is_served else None
        self.write: Callable[[Any], bytes] = handler.response_serializer

    def served(self) -> Any:
        """Return the servicer's method.

        Raises:
            Problem: UNIMPLEMENTED: the servicer does not implement it.
        """
        if self._behavior is not None:
            return self._behavior
        raise errors.Problem(
            grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{self._path} is not implemented by this server"
        )

    async def read(self, request: Any) -> Any:
        """Decode a request, or a stream of requests."""
        return self._each(request) if self._streams else await self._read(request)

    async def _read(self, data: bytes) -> Any:
        kind = getattr(self._parse, "__self__", None)
        try:
            message = self._parse(data) if kind is None else await decode(kind, data)
        except DecodeError:
            raise errors.Problem(
                grpc.StatusCode.INVALID_ARGUMENT, "NOT_UNDERSTOOD", f"cannot decode the request of {self._path}"
            ) from None
        request_limits.check(message)
        return message

    async def _each(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for piece in pieces:
            yield await self._read(piece)
