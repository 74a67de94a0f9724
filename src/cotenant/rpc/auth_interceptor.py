"""What stands between the wire and every servicer: who calls, whether it may, for how long, and what went wrong.

One interceptor does it all, since each one costs every call a coroutine. It wraps a method's handler once and
remembers the wrapped one; what is left per call is the check of the caller against the table of roles, and a `try`.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from cotenant.codec import errors, request_limits
from cotenant.codec.errors import Problem, Violation
from cotenant.rpc.decoding import decode
from cotenant.security.audit import Audit, Entry, begun
from cotenant.security.identity import Authenticator, Identity, caller, denied, enter, spoken_for
from cotenant.security.limits import CallsAtOnce, Limits
from cotenant.security.metering import Meter, begin
from cotenant.security.permissions import ROLES, Rule, Scope
from cotenant.store.port import NotLeader, StoreDistrusted, StoreFull, StoreUnavailable, Unanswered

log = structlog.get_logger()

# The store has been waited for already. A channel that tried again by itself would spend the caller's deadline on it,
# and the caller would never hear what is away.
NO_RETRY = ("grpc-retry-pushback-ms", "-1")

OPEN = "/grpc.health.v1.Health/"  # probes carry no token
FOR_EVERY_ROLE = "/grpc.reflection."  # what there is to be called is no secret to whom the mesh knows
NOBODYS = Rule({})
LOOK_AGAIN_SECONDS = 5.0  # after which a stream asks again whether its caller is still known

CALLS_MAX = 100_000  # at once; each agent holds two streams

Behavior = Callable[[Any, Any], Any]
Read = Callable[[bytes], Coroutine[Any, Any, Any]]


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
        calls_max: int = CALLS_MAX,
        authenticated: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`authenticated` is called with the peer of each call that has authenticated."""
        self._calls = CallsAtOnce(calls_max)
        self._authenticator = authenticator
        self._deadline_seconds = deadline_seconds_default
        self._limits = limits
        self._audit = audit
        self._authenticated = authenticated
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
        read = _reader(method, handler.request_deserializer)
        if inspect.isasyncgenfunction(behavior):
            wrapped: Behavior = self._generator(method, behavior, read)
        elif inspect.iscoroutinefunction(behavior):
            wrapped = self._coroutine(method, behavior, streams, read)
        else:  # generated base classes answer in such a function that they know nothing
            wrapped = self._coroutine(method, _unimplemented(method), True, read)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, None, handler.response_serializer)

    def _coroutine(self, method: str, behavior: Behavior, streams: bool, read: Read) -> Behavior:
        rule = ROLES.get(method, NOBODYS)

        async def guarded(request: Any, context: Any) -> Any:
            entry, meter = self._entry(method, rule, context), Meter(method)
            try:
                with self._admit(method, rule, context, entry, streams, meter):
                    still_known = self._again(method, rule, context) if streams else _nobody_asks
                    request = await _decoded(request, read, meter, still_known)
                    served = meter.run(behavior(request, context))
                    if not streams and context.time_remaining() is None:
                        response = await self._within_default(served)
                    else:
                        response = await served
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

    def _generator(self, method: str, behavior: Behavior, read: Read) -> Behavior:
        rule = ROLES.get(method, NOBODYS)

        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            entry, meter = self._entry(method, rule, context), Meter(method)
            try:
                with self._admit(method, rule, context, entry, True, meter):
                    still_known = self._again(method, rule, context)
                    request = await _decoded(request, read, meter, still_known)
                    if entry is not None:
                        entry.stream = request
                        if not getattr(behavior, "passes_on", False):  # which tells once it knows whether it does
                            await begun()
                    async with aclosing(meter.each(behavior(request, context))) as responses:
                        async for response in responses:
                            still_known()
                            self._charge(meter)
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

    @contextmanager
    def _admit(
        self, method: str, rule: Rule, context: Any, entry: Entry | None, streams: bool, meter: Meter
    ) -> Iterator[None]:
        """Find out who calls, and whether it may; count the call, and charge its caller, while it is served."""
        with self._calls.hold():
            metadata = context.invocation_metadata()
            shown = self._authenticator.authenticate(method, metadata, context.auth_context)
            self._authenticated(context.peer())
            if entry is not None:
                entry.identity = shown
            if self._limits is not None:
                self._limits.take(shown)  # before anything is refused: that costs as much, and a line of the audit log
            identity = spoken_for(shown, metadata)
            if entry is not None:
                entry.identity = identity
            enter(identity, scope_of(identity, method, rule))
            begin(meter)
            if self._limits is None:
                yield
                return
            self._limits.check_processing(identity)
            try:
                with self._limits.stream(identity) if streams else nullcontext():
                    yield
            finally:
                self._charge(meter)

    def _charge(self, meter: Meter) -> None:
        """Charge the caller for what its call has cost since it was charged last."""
        if self._limits is not None:
            self._limits.charge(caller(), meter.take())

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


def _reader(method: str, deserialize: Callable[[bytes], Any] | None) -> Read:
    """Return what decodes a request of a method, if anything does, and holds it to its limits.

    It is called once the caller is known: nobody else costs this process what decoding takes.
    """
    kind = getattr(deserialize, "__self__", None)  # the class of which generated code gives `FromString`

    async def read(data: bytes) -> Any:
        request_limits.check_bytes(method, len(data))
        if deserialize is None:
            return data
        try:
            message = deserialize(data) if kind is None else await decode(kind, data)
        except (DecodeError, ValueError):
            raise errors.invalid([Violation("request", "is no message of this method's type")]) from None
        request_limits.check(message)
        return message

    return read


async def _decoded(request: Any, read: Read, meter: Meter, still_known: Callable[[], None]) -> Any:
    """Return a request, or a stream of them, decoded.

    Raises:
        Problem: INVALID_ARGUMENT where one cannot be decoded or is beyond a limit; of a stream, where such a one is
            read, also where the caller is not known any more.
    """
    if hasattr(request, "__aiter__"):
        return _each_decoded(request, read, still_known)
    return await meter.run(read(request))


async def _each_decoded(
    requests: AsyncIterator[bytes], read: Read, still_known: Callable[[], None]
) -> AsyncIterator[Any]:
    async for data in requests:
        still_known()
        yield await read(data)


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
        case StoreFull():
            told = f"the store is full, and nothing was changed: {error}; `cotenant status` names the way back"
            return errors.unavailable(told, reason="STORE_FULL")
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
