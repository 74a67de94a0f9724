"""Stubs of the services for commands that only make unary calls, one after the other: without gRPC and asyncio."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from cotenant.codec.method_rules import UNKNOWN_METHOD
from cotenant.codec.method_table import METHOD_RULES
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.unary_client import TimedOut, UnaryClient, Unsupported

T = TypeVar("T")
UNAVAILABLE = 14
RETRY_PUSHBACK = "grpc-retry-pushback-ms"  # negative: the server has already waited; do not retry

CallWithGrpc = Callable[[str, Any], Coroutine[Any, Any, Any]]  # the method and the request


class NotUnary(Exception):
    """A call that only gRPC can make."""


class UnaryStub:
    """A service's stub: `await stub.GetJob(request)`, as of the generated stubs. The coroutine never suspends.

    A call that `UnaryClient` cannot make, or that is to be retried, is made by `with_grpc`;
    where that is None, it raises `NotUnary`.
    """

    def __init__(self, client: UnaryClient, token: str, service: Any, with_grpc: CallWithGrpc | None) -> None:
        self._client, self._service, self._with_grpc = client, service, with_grpc
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def __getattr__(self, name: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        method = self._service.methods_by_name[name]
        path = f"/{self._service.full_name}/{name}"
        rules = METHOD_RULES.get(path, UNKNOWN_METHOD)

        async def call(request: Any) -> Any:
            if rules.has_request_id and not request.request_id:
                request = _with_request_id(request)
            if not rules.retried:  # it could not be repeated by `with_grpc`
                return self._call_with_grpc(name, request)
            try:
                answer = self._client.call(path, request.SerializeToString(), self._metadata, rules.deadline_seconds)
                if not answer.status:
                    return method.output_type._concrete_class.FromString(answer.message)
            except TimedOut:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            except (Unsupported, DecodeError):
                return self._call_with_grpc(name, request)
            trailers = dict(answer.trailers)
            if answer.status == UNAVAILABLE and not str(trailers.get(RETRY_PUSHBACK, "")).startswith("-"):
                return self._call_with_grpc(name, request)
            [code] = [code for code in grpc.StatusCode if code.value[0] == answer.status]
            raise _error(code, answer.details, answer.trailers)

        return call

    def _call_with_grpc(self, name: str, request: Any) -> Any:
        if self._with_grpc is None:
            raise NotUnary
        return asyncio.run(self._with_grpc(name, request))


def run_unary(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that awaits nothing but unary stubs."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise RuntimeError("a command awaits more than unary calls")


def _with_request_id(request: Any) -> Any:
    """Return a copy with a `request_id`, by which the server recognizes a repeated call."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.request_id = os.urandom(16).hex()
    return copy


def _error(code: Any, details: str, trailers: Any = ()) -> Exception:
    error: Exception = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)
    return error
