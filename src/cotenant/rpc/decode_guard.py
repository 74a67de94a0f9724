"""Rejects undecodable messages; grpc.aio would log a traceback and pass None to the handler.

Without TLS nothing protects messages in transit, and another program may listen where a service was. So an undecodable
message is replaced by a marker: a server refuses the request (`AuthInterceptor`), and a client's call fails like a
broken connection: its outcome is unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class Undecodable:
    """Marks bytes that are not a message of the method's type."""


UNDECODABLE = Undecodable()


def guarded_deserializer(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer that returns the marker for undecodable bytes."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, ValueError):
            return UNDECODABLE

    return read


class _CheckedCall:
    """A grpc.aio call that fails with UNAVAILABLE if its response is undecodable."""

    __slots__ = ("_call", "_method")

    def __init__(self, call: Any, method: str) -> None:
        self._call, self._method = call, method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _checked(self, message: Any) -> Any:
        if message is not UNDECODABLE:
            return message
        self._call.cancel()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            f"cannot decode the response to {self._method}: it was damaged in transit, or another program sent it",
        )


class CheckedUnaryCall(_CheckedCall):
    """A call with a single response."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._checked((yield from self._call.__await__()))


class CheckedStreamCall(_CheckedCall):
    """A call with a response stream."""

    __slots__ = ("_messages",)

    def __init__(self, call: Any, method: str) -> None:
        super().__init__(call, method)
        self._messages: AsyncIterator[Any] | None = None

    def __aiter__(self) -> CheckedStreamCall:
        self._messages = aiter(self._call)
        return self

    async def __anext__(self) -> Any:
        assert self._messages
        return self._checked(await anext(self._messages))

    async def read(self) -> Any:
        """Return the next message, or the end of the stream."""
        return self._checked(await self._call.read())
