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

from cotenant.rpc import errors
from cotenant.rpc.server import AddServicer


class Replaced(Exception):
    """The stage was closed while a call was in it: what came of the call is not known."""


class Stage:
    """Takes servicers as a server does. `on_serving` hears whether their services can do their work."""

    def __init__(self, on_serving: Callable[[], None] = lambda: None) -> None:
        self.serving: dict[str, bool] = {}
        self._on_serving = on_serving
        self._handlers: dict[str, Any] = {}
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
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

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

    async def answer(self, path: str, request: Any, context: Any) -> bytes:
        """Serve a call that is answered once. `request` is bytes, or a stream of them."""
        handler = self._handlers[path]
        behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
        read = _reader(path, handler.request_deserializer)
        message = _each(read, request) if handler.request_streaming else read(request)
        with self._call():
            return bytes(handler.response_serializer(await _served(path, behavior)(message, context)))

    async def stream(self, path: str, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        """Serve a call that is answered by a stream."""
        handler = self._handlers[path]
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        read = _reader(path, handler.request_deserializer)
        message = _each(read, request) if handler.request_streaming else read(request)
        with self._call() as task:
            async with aclosing(_served(path, behavior)(message, context)) as responses:
                async for response in responses:
                    self._calls.discard(task)  # while gRPC writes: cancelled there, it would tell the caller nothing
                    yield handler.response_serializer(response)
                    if self._closed:
                        raise Replaced
                    self._calls.add(task)


def _served(path: str, behavior: Any) -> Any:
    if inspect.isasyncgenfunction(behavior) or inspect.iscoroutinefunction(behavior):
        return behavior
    raise errors.Problem(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{path} is not implemented by this server")


def _reader(path: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise errors.Problem(
                grpc.StatusCode.INVALID_ARGUMENT, "NOT_UNDERSTOOD", f"what was sent is no request of {path}"
            ) from None

    return read


async def _each(read: Callable[[bytes], Any], pieces: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for piece in pieces:
        yield read(piece)
