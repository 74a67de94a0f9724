"""What stands between the wire and every servicer: who calls, whether it may, for how long, and what went wrong.

One interceptor does it all, since each one costs every call a coroutine. It wraps a method's handler once and
remembers the wrapped one; what is left per call is the check of the caller against the table of roles, and a `try`.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from cotenant.rpc import errors
from cotenant.rpc.audit import Audit, Entry, begun
from cotenant.rpc.errors import Problem, Violation
from cotenant.rpc.identity import Authenticator, Identity, denied, enter, spoken_for
from cotenant.rpc.legible import Illegible, reading
from cotenant.rpc.limits import Limits
from cotenant.rpc.permissions import ROLES, Rule, Scope
from cotenant.store.port import NotLeader, StoreDistrusted, StoreUnavailable, Unanswered

log = structlog.get_logger()

# The store has been waited for already. A channel that tried again by itself would spend the caller's deadline on it,
# and the caller would never hear what is away.
NO_RETRY = ("grpc-retry-pushback-ms", "-1")

OPEN = "/grpc.health.v1.Health/"  # probes carry no token
FOR_EVERY_ROLE = "/grpc.reflection."  # what there is to be called is no secret to whom the mesh knows
NOBODYS = Rule({})
LOOK_AGAIN_SECONDS = 5.0  # after which a stream asks again whether its caller is still known

Behavior = Callable[[Any, Any], Any]


class Guard(grpc.aio.ServerInterceptor):
    """Authenticates calls, holds them to the table of roles and to limits, bounds them in time, tells the audit log.

    Exceptions become statuses.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        deadline_seconds_default: float,
        limits: Limits | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._deadline_seconds = deadline_seconds_default
        self._limits = limits
        self._audit = audit
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
        streams = handler.request_streaming or handler.response_streaming
        if inspect.isasyncgenfunction(behavior):
            wrapped: Behavior = self._generator(method, behavior)
        elif inspect.iscoroutinefunction(behavior):
            wrapped = self._coroutine(method, behavior, streams)
        else:  # generated base classes answer in such a function that they know nothing
            wrapped = self._coroutine(method, _unimplemented(method), streams=True)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, reading(handler.request_deserializer), handler.response_serializer)

    def _coroutine(self, method: str, behavior: Behavior, streams: bool) -> Behavior:
        rule = ROLES.get(method, NOBODYS)

        async def guarded(request: Any, context: Any) -> Any:
            entry = self._entry(method, rule, context)
            try:
                with self._admit(method, rule, context, entry, streams):
                    request = _legible(request, self._again(method, rule, context) if streams else _nobody_asks)
                    if not streams and context.time_remaining() is None:
                        response = await self._within_default(behavior(request, context))
                    else:
                        response = await behavior(request, context)
                if entry is not None:
                    await entry.answered(request, response)
                return response
            except grpc.aio.AbortError:
                raise  # the servicer has said itself what it wants to be sent
            except (grpc.aio.InternalError, asyncio.CancelledError) as error:
                if entry is not None:
                    await entry.left(request)  # what was begun may be done all the same
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise asyncio.CancelledError from None  # nobody is there to whom anything could be sent
            except Exception as error:
                await self._refuse(context, method, error, entry, request)

        return guarded

    def _generator(self, method: str, behavior: Behavior) -> Behavior:
        rule = ROLES.get(method, NOBODYS)

        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            entry = self._entry(method, rule, context)
            try:
                with self._admit(method, rule, context, entry, streams=True):
                    still_known = self._again(method, rule, context)
                    request = _legible(request, still_known)
                    if entry is not None:
                        entry.stream = request
                        if not getattr(behavior, "passes_on", False):  # which tells once it knows whether it does
                            await begun()
                    async for response in behavior(request, context):
                        still_known()
                        yield response
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None  # the same
            except Exception as error:
                await self._refuse(context, method, error, entry, request)

        return guarded

    def _entry(self, method: str, rule: Rule, context: Any) -> Entry | None:
        return self._audit.entry(method, rule, context.peer(), context.invocation_metadata()) if self._audit else None

    def _admit(
        self, method: str, rule: Rule, context: Any, entry: Entry | None, streams: bool
    ) -> AbstractContextManager[None]:
        """Find out who calls, and whether it may; what is returned is to be held while the call is served."""
        metadata = context.invocation_metadata()
        shown = self._authenticator.authenticate(method, metadata, context.auth_context)
        if entry is not None:
            entry.identity = shown
        if self._limits is not None:
            self._limits.take(shown)  # before anything is refused: that costs as much, and a line of the audit log
        identity = spoken_for(shown, metadata)
        if entry is not None:
            entry.identity = identity
        enter(identity, scope_of(identity, method, rule))
        return self._limits.stream(identity) if self._limits is not None and streams else nullcontext()

    def _again(self, method: str, rule: Rule, context: Any) -> Callable[[], None]:
        """Make what a stream asks with each message: whether its caller could begin it now.

        A token that is revoked, or over, ends the streams that were begun with it.
        """
        metadata, looked = context.invocation_metadata(), time.monotonic()

        def still_known() -> None:
            nonlocal looked
            if (now := time.monotonic()) - looked < LOOK_AGAIN_SECONDS:
                return
            looked = now
            shown = self._authenticator.authenticate(method, metadata, context.auth_context)
            scope_of(spoken_for(shown, metadata), method, rule)

        return still_known

    async def _refuse(self, context: Any, method: str, error: Exception, entry: Entry | None, request: Any) -> NoReturn:
        problem = problem_of(method, error)
        if entry is not None:
            await entry.refused(request, problem)
        await _send(context, problem, error)

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


def scope_of(identity: Identity, method: str, rule: Rule) -> Scope:
    """Say on what somebody may call a method.

    Raises:
        Problem: PERMISSION_DENIED where the table has no such role for it.
    """
    if method.startswith(FOR_EVERY_ROLE) and identity.roles:
        return Scope.ANY
    scope = identity.scope(rule)
    if scope is not None:
        return scope
    name = method.rpartition("/")[2]
    roles = " and ".join(sorted(identity.roles)) or "without a role"
    if allowed := sorted(rule.scopes):
        message = f"{identity.name} is {roles} and may not call {name}; {', '.join(allowed)} may"
        if any(role in rule.scopes for role in identity.roles):
            message = f"{identity.name} is of some tenants only; {name} tells of all of them together"
    else:
        message = f"{method} is for nobody"
    raise denied("ROLE_MAY_NOT", message)


def _legible(request: Any, still_known: Callable[[], None]) -> Any:
    """Return a request, or a stream of them, in which none is illegible, and none of who is not known any more.

    Raises:
        Problem: INVALID_ARGUMENT; of a stream, where such a one is read.
    """
    if isinstance(request, Illegible):
        raise errors.invalid([Violation("request", "is no message of this method's type")])
    return _legible_each(request, still_known) if hasattr(request, "__aiter__") else request


async def _legible_each(requests: AsyncIterator[Any], still_known: Callable[[], None]) -> AsyncIterator[Any]:
    async for request in requests:
        still_known()
        yield _legible(request, still_known)


def _nobody_asks() -> None:
    """Of a call with one request, which was asked about when it began."""


def _unimplemented(method: str) -> Behavior:
    async def refuse(request: Any, context: Any) -> NoReturn:
        raise Problem(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{method} is not implemented by this server")

    return refuse


async def _send(context: Any, problem: Problem, error: Exception) -> NoReturn:
    """End the call with the status that tells of the problem."""
    status = errors.to_status(problem)
    trailers: list[tuple[str, str | bytes]] = [(errors.DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, StoreUnavailable) and not isinstance(error, (NotLeader, Unanswered)):
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
        case StoreDistrusted():
            return errors.unavailable(
                f"nothing is written: {error}; an operator must {error.remedy}", reason=error.reason
            )
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
