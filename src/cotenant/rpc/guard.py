"""What stands between the wire and every servicer: who calls, for how long, and what went wrong.

One interceptor does all three, since each one costs every call a coroutine. It wraps a method's handler once and
remembers the wrapped one; what is left per call is the check of the token and a `try`.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from cotenant.rpc import errors
from cotenant.rpc.errors import Problem
from cotenant.rpc.identity import Authenticator, enter
from cotenant.store.port import NotLeader, StoreUnavailable

log = structlog.get_logger()

# The store has been waited for already. A channel that tried again by itself would spend the caller's deadline on it,
# and the caller would never hear what is away.
NO_RETRY = ("grpc-retry-pushback-ms", "-1")

OPEN = "/grpc.health.v1.Health/"  # probes carry no token

Behavior = Callable[[Any, Any], Any]


class Guard(grpc.aio.ServerInterceptor):
    """Authenticates calls, bounds them in time and turns exceptions into statuses."""

    def __init__(self, authenticator: Authenticator, deadline_seconds_default: float) -> None:
        self._authenticator = authenticator
        self._deadline_seconds = deadline_seconds_default
        self._guarded: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Return the method's handler, wrapped."""
        handler = await continuation(call)
        method = call.method
        if handler is None or method.startswith(OPEN):
            return handler
        known = self._guarded.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        guarded = self._guard(method, handler)
        self._guarded[method] = handler, guarded
        return guarded

    def _guard(self, method: str, handler: Any) -> Any:
        """Wrap a handler according to its kind."""
        kind = (
            ("stream" if handler.request_streaming else "unary")
            + "_"
            + ("stream" if handler.response_streaming else "unary")
        )
        behavior = getattr(handler, kind)
        if inspect.isasyncgenfunction(behavior):
            wrapped: Behavior = self._generator(method, behavior)
        elif inspect.iscoroutinefunction(behavior):
            wrapped = self._coroutine(method, behavior, bounded=kind == "unary_unary")
        else:  # generated base classes answer in such a function that they know nothing
            wrapped = self._coroutine(method, _unimplemented(method), bounded=False)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, method: str, behavior: Behavior, bounded: bool) -> Behavior:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                self._admit(method, context)
                if bounded and context.time_remaining() is None:
                    return await self._within_default(behavior(request, context))
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise  # the servicer has said itself what it wants to be sent
            except Exception as error:
                await _send(context, method, error)

        return guarded

    def _generator(self, method: str, behavior: Behavior) -> Behavior:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                self._admit(method, context)
                async for response in behavior(request, context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _send(context, method, error)

        return guarded

    def _admit(self, method: str, context: Any) -> None:
        enter(self._authenticator.authenticate(method, context.invocation_metadata(), context.auth_context))

    async def _within_default(self, served: Awaitable[Any]) -> Any:
        timeout = asyncio.timeout(self._deadline_seconds)
        try:
            async with timeout:
                return await served
        except TimeoutError:
            if not timeout.expired():
                raise  # the servicer's own
            raise Problem(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_EXCEEDED",
                f"the call set no deadline and took longer than the {self._deadline_seconds:g} s "
                "that the server allows then",
            ) from None


def _unimplemented(method: str) -> Behavior:
    async def refuse(request: Any, context: Any) -> NoReturn:
        raise Problem(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{method} is not implemented by this server")

    return refuse


async def _send(context: Any, method: str, error: Exception) -> NoReturn:
    """End the call with the status that tells of the error."""
    problem = problem_of(method, error)
    status = errors.to_status(problem)
    trailers: list[tuple[str, str | bytes]] = [(errors.DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, StoreUnavailable) and not isinstance(error, NotLeader):
        trailers.append(NO_RETRY)
    await context.abort(problem.code, status.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort raises")


def problem_of(method: str, error: Exception) -> Problem:
    """Put any exception into the words that a caller may be told."""
    match error:
        case Problem():
            return error
        case NotLeader():
            return errors.unavailable(str(error), 0.5, errors.NOT_LEADER)
        case StoreUnavailable():
            return errors.unavailable(f"the store is away: {error}", reason="STORE_UNAVAILABLE")
        case grpc.RpcError() if error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ):
            return errors.unavailable(f"a service that this one needs is away: {errors.from_error(error).message}")
    incident = secrets.token_hex(4)
    log.error("call_failed", method=method, incident=incident, exc_info=error)
    return errors.internal(incident)
