"""Where a leader's servicers stand as long as it leads: their handlers by method, and the calls that are in them.

A server's handlers cannot be exchanged once it has started. So what a replica's server has are handlers of raw bytes
for every method of its services; they hand a call to the stage of the day, which reads the bytes as the generated code
would.
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


class Replaced(Exception):
    """The stage was closed while a call was in it: what came of the call is not known."""


class Stage:
    """Takes servicers as a server does. `on_serving` hears whether their services can do their work."""

    def __init__(self, on_serving: Callable[[], None] = lambda: None) -> None:
        self.serving: dict[str, bool] = {}
        self._on_serving = on_serving
        self._given: dict[str, Any] = {}
        self._handlers: dict[str, _Handler] = {}  # of the methods that were called
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Serve a service."""
        add_servicer(servicer, self)
        self.serving.setdefault(service, True)

    def set_serving(self, service: str, serving: bool) -> None:
        """Tell whether a service can do its work."""
        self.serving[service] = serving
        self._on_serving()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take handlers as generated code gives them."""
        self._given |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Pass over what generated code gives as well, for older servers."""

    def close(self) -> None:
        """End all calls; what came of them is not known."""
        self._closed = True
        for call in self._calls:
            call.cancel()

    @contextmanager
    def _call(self) -> Iterator[asyncio.Task[Any]]:
        """Hold a call, so that it ends with the stage."""
        task = asyncio.current_task()
        assert task
        if self._closed:
            raise Replaced
        self._calls.add(task)
        try:
            yield task
        except asyncio.CancelledError:
            if self._closed and task.uncancel() == 0:
                raise Replaced from None
            raise
        finally:
            self._calls.discard(task)

    def _handler(self, path: str) -> _Handler:
        if path not in self._handlers:
            self._handlers[path] = _Handler(path, self._given[path])
        return self._handlers[path]

    async def answer(self, path: str, request: Any, context: Any) -> bytes:
        """Serve a call that is answered once. `request` is bytes, or a stream of them."""
        handler = self._handler(path)
        message = await handler.read(request)
        with self._call():
            return bytes(handler.write(await handler.served()(message, context)))

    async def stream(self, path: str, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        """Serve a call that is answered by a stream."""
        handler = self._handler(path)
        message = await handler.read(request)
        with self._call() as task:
            async with aclosing(handler.served()(message, context)) as responses:
                async for response in responses:
                    self._calls.discard(task)  # while gRPC writes: cancelled there, it would tell the caller nothing
                    yield handler.write(response)
                    if self._closed:
                        raise Replaced
                    self._calls.add(task)


class _Handler:
    """What serves a method: as generated code gives it, but for what is the same for all of its calls."""

    __slots__ = ("_behavior", "_parse", "_path", "_streams", "write")

    def __init__(self, path: str, handler: Any) -> None:
        asks, answers = handler.request_streaming, handler.response_streaming
        behavior = getattr(handler, f"{'stream' if asks else 'unary'}_{'stream' if answers else 'unary'}")
        is_served = inspect.isasyncgenfunction(behavior) or inspect.iscoroutinefunction(behavior)
        self._path, self._streams, self._parse = path, asks, handler.request_deserializer
        self._behavior = behavior if is_served else None
        self.write: Callable[[Any], bytes] = handler.response_serializer

    def served(self) -> Any:
        """The servicer's method.

        Raises:
            Problem: UNIMPLEMENTED where it has none.
        """
        if self._behavior is not None:
            return self._behavior
        raise errors.Problem(
            grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{self._path} is not implemented by this server"
        )

    async def read(self, request: Any) -> Any:
        """Read a request, or each of a stream of them."""
        return self._each(request) if self._streams else await self._read(request)

    async def _read(self, data: bytes) -> Any:
        kind = getattr(self._parse, "__self__", None)
        try:
            message = self._parse(data) if kind is None else await decode(kind, data)
        except DecodeError:
            raise errors.Problem(
                grpc.StatusCode.INVALID_ARGUMENT, "NOT_UNDERSTOOD", f"what was sent is no request of {self._path}"
            ) from None
        request_limits.check(message)
        return message

    async def _each(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for piece in pieces:
            yield await self._read(piece)
