"""Messages that are none: gRPC logs a traceback, and goes on with None where one was expected.

Without TLS nothing protects what is on its way, and something else may listen where a service was. So whoever reads is
given a mark instead, by which a server refuses the request (`Guard`), and a client's call fails as one whose connection
is broken: whether it was done is not known.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class Illegible:
    """Stands for bytes that are no message of the method's type."""


ILLEGIBLE = Illegible()


def reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Read what can be read, and give the mark for what cannot."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, ValueError):
            return ILLEGIBLE

    return read


class _LegibleCall:
    """One of grpc.aio's calls, which fails with UNAVAILABLE where an answer to it is none."""

    __slots__ = ("_call", "_method")

    def __init__(self, call: Any, method: str) -> None:
        self._call, self._method = call, method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _legible(self, message: Any) -> Any:
        if message is not ILLEGIBLE:
            return message
        self._call.cancel()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            f"the answer to {self._method} is none: it was damaged on its way, or came from something else",
        )


class LegibleAnswer(_LegibleCall):
    """A call with one answer."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._legible((yield from self._call.__await__()))


class LegibleStream(_LegibleCall):
    """A call with a stream of answers."""

    __slots__ = ("_messages",)

    def __init__(self, call: Any, method: str) -> None:
        super().__init__(call, method)
        self._messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> LegibleStream:
        self._messages = aiter(self._call)
        return self

    async def __anext__(self) -> Any:
        assert self._messages
        return self._legible(await anext(self._messages))

    async def read(self) -> Any:
        """Return the next message, or the end of the stream."""
        return self._legible(await self._call.read())
