"""The interceptor before every servicer: authentication, authorization, limits, deadlines and error statuses.

A single interceptor does all of this, because each interceptor costs every call a coroutine. It wraps a method's
handler once and caches the wrapped handler; the cost per call is the check against the role table and a `try`.
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
from google.protobuf.message import DecodeError

from cotenant.codec import errors, request_bytes, request_limits
from cotenant.codec.errors import Problem, Violation
from cotenant.codec.method_table import METHOD_RULES
from cotenant.codec.unknown_methods import not_served_here, unknown_method
from cotenant.rpc.decoding import decode
from cotenant.rpc.router import MISCONFIGURED, Router
from cotenant.rpc.service_homes import HOMES, service_of
from cotenant.security.audit import Audit, AuditEntry, log_stream
from cotenant.security.identity import Authenticator, Identity, acting_identity, caller, denied, set_caller
from cotenant.security.limits import CallsAtOnce, Limits
from cotenant.security.metering import Meter, begin
from cotenant.security.permissions import ROLES, Role, Rule, Scope
from cotenant.store.port import NotLeader, StoreDistrusted, StoreFull, StoreUnavailable, UnknownOutcome
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

# The server has already waited for the store. A channel that retried by itself would spend the caller's deadline on it,
# and the caller would never learn what is unavailable.
NO_RETRY = ("grpc-retry-pushback-ms", "-1")

PUBLIC_SERVICE = "/grpc.health.v1.Health/"  # probes carry no token
ANY_ROLE_SERVICE = "/grpc.reflection."  # the list of methods is no secret to authenticated callers
DENIED = Rule({})
ANY_ROLE = Rule(dict.fromkeys(Role, Scope.ANY))  # that a method is unknown is no secret to authenticated callers
RECHECK_SECONDS = 5.0  # how often a stream authenticates its caller again

CALLS_MAX = 100_000  # at once; each agent holds two streams

Behavior = Callable[[Any, Any], Any]
Read = Callable[[bytes], Coroutine[Any, Any, Any]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates calls, checks roles and limits, sets deadlines and writes the audit log.

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
        """`authenticated` is called with the peer of each authenticated call."""
        self._calls = CallsAtOnce(calls_max)
        self._authenticator = authenticator
        self._deadline_seconds = deadline_seconds_default
        self._limits = limits
        self._audit = audit
        self._authenticated = authenticated
        self.router: Router | None = None
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Return the method's handler, wrapped: that of this process, or one that routes or refuses the call."""
        handler = await continuation(call)
        method = call.method
        if method.startswith(PUBLIC_SERVICE):
            return handler
        if self.router is not None:
            handler = self.router.handler(method, call.invocation_metadata, handler)
        if handler is None:
            return self._refusing(method)
        known = self._wrapped.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        wrapped_call = self._wrap(method, handler)
        self._wrapped[method] = handler, wrapped_call
        return wrapped_call

    def _wrap(self, method: str, handler: Any) -> Any:
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
        else:  # the generated base class: not implemented
            wrapped = self._coroutine(method, _unimplemented(method), True, read)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, None, handler.response_serializer)

    def _refusing(self, method: str) -> Any:
        """Return the handler for a method that nobody serves here. It is not kept: callers choose the paths."""
        known = method in METHOD_RULES
        rule = ROLES[method] if known else ANY_ROLE
        refuse = _raising(
            not_served_here(method, HOMES.get(service_of(method), "another service"))
            if known
            else unknown_method(method)
        )
        return grpc.stream_stream_rpc_method_handler(self._coroutine(method, refuse, True, _reader(method, None), rule))

    def _coroutine(
        self, method: str, behavior: Behavior, streams: bool, read: Read, rule: Rule | None = None
    ) -> Behavior:
        rule = rule or ROLES.get(method, DENIED)

        async def wrapped_call(request: Any, context: Any) -> Any:
            entry, meter = self._entry(method, rule, context), Meter(method)
            try:
                with self._admit(method, rule, context, entry, streams, meter):
                    still_known = self._recheck(method, rule, context) if streams else _no_recheck
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
                raise  # the servicer has chosen the status itself
            except (grpc.aio.InternalError, asyncio.CancelledError) as error:
                if entry is not None:
                    await entry.left(request)  # the work may have been done anyway
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise asyncio.CancelledError from None  # the caller is gone
            except Exception as error:
                await self._refuse(context, method, error, entry, request)

        return wrapped_call

    def _generator(self, method: str, behavior: Behavior, read: Read) -> Behavior:
        rule = ROLES.get(method, DENIED)

        async def wrapped_call(request: Any, context: Any) -> AsyncIterator[Any]:
            entry, meter = self._entry(method, rule, context), Meter(method)
            try:
                with self._admit(method, rule, context, entry, True, meter):
                    still_known = self._recheck(method, rule, context)
                    request = await _decoded(request, read, meter, still_known)
                    if entry is not None:
                        entry.stream = request
                        if not getattr(behavior, "passes_on", False):  # a forwarding handler calls `log_stream` itself
                            await log_stream()
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

        return wrapped_call

    def _entry(self, method: str, rule: Rule, context: Any) -> AuditEntry | None:
        return self._audit.entry(method, rule, context.peer(), context.invocation_metadata()) if self._audit else None

    @contextmanager
    def _admit(
        self, method: str, rule: Rule, context: Any, entry: AuditEntry | None, streams: bool, meter: Meter
    ) -> Iterator[None]:
        """Authenticate and authorize a call; count it, and charge its caller, while it is served."""
        with self._calls.hold():
            metadata = context.invocation_metadata()
            shown = self._authenticator.authenticate(method, metadata, context.auth_context)
            self._authenticated(context.peer())
            if entry is not None:
                entry.identity = shown
            if self._limits is not None:
                self._limits.take(shown)  # before any refusal: a refusal costs as much, and an audit line
            identity = acting_identity(shown, metadata)
            if entry is not None:
                entry.identity = identity
            set_caller(identity, scope_of(identity, method, rule))
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
        """Charge the caller for the processor time since the last charge."""
        if self._limits is not None:
            self._limits.charge(caller(), meter.take())

    def _recheck(self, method: str, rule: Rule, context: Any) -> Callable[[], None]:
        """Return the check that a stream runs with each message: whether its caller could still start it.

        A token that is revoked or expired ends the streams that were started with it.
        """
        metadata, looked = context.invocation_metadata(), time.monotonic()

        def still_known() -> None:
            nonlocal looked
            if (now := time.monotonic()) - looked < RECHECK_SECONDS:
                return
            looked = now
            shown = self._authenticator.authenticate(method, metadata, context.auth_context)
            scope_of(acting_identity(shown, metadata), method, rule)

        return still_known

    async def _refuse(
        self, context: Any, method: str, error: Exception, entry: AuditEntry | None, request: Any
    ) -> NoReturn:
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
                f"the call set no deadline and took longer than the server's default of {self._deadline_seconds:g} s",
            ) from None


def scope_of(identity: Identity, method: str, rule: Rule) -> Scope:
    """Return the scope in which a caller may call a method.

    Raises:
        Problem: PERMISSION_DENIED: none of the caller's roles may call it.
    """
    if method.startswith(ANY_ROLE_SERVICE) and identity.roles:
        return Scope.ANY
    scope = identity.scope(rule)
    if scope is not None:
        return scope
    name = method.rpartition("/")[2]
    roles = " and ".join(sorted(identity.roles)) or "without a role"
    if allowed := sorted(rule.scopes):
        message = f"{identity.name} is {roles} and may not call {name}; {', '.join(allowed)} may"
        if any(role in rule.scopes for role in identity.roles):
            message = f"{identity.name} is limited to some tenants; {name} covers all tenants"
    else:
        message = f"{method} is not open to any role"
    raise denied("ROLE_MAY_NOT", message)


def _reader(method: str, deserialize: Callable[[bytes], Any] | None) -> Read:
    """Return the function that decodes a request of a method and checks its limits.

    It runs only after authentication, so that strangers cannot make this process spend time on decoding.
    """
    kind = getattr(deserialize, "__self__", None)  # the class whose `FromString` generated code passes

    async def read(data: bytes) -> Any:
        request_bytes.check_bytes(method, data)
        if deserialize is None:
            return data
        try:
            message = deserialize(data) if kind is None else await decode(kind, data)
        except (DecodeError, ValueError):
            raise errors.invalid([Violation("request", "is not a message of this method's type")]) from None
        request_limits.check(message)
        return message

    return read


async def _decoded(request: Any, read: Read, meter: Meter, still_known: Callable[[], None]) -> Any:
    """Return a decoded request, or a stream of decoded requests.

    Raises:
        Problem: INVALID_ARGUMENT: a request cannot be decoded or exceeds a limit. For a stream this is raised when the
            message is read, as is the problem that the caller is no longer authenticated.
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


def _no_recheck() -> None:
    """Do nothing: a call with one request was checked when it began."""


def _unimplemented(method: str) -> Behavior:
    message = f"{method} is not implemented by this server"
    return _raising(Problem(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", message))


def _raising(problem: Problem) -> Behavior:
    """Return the behavior of a method that is refused."""

    async def refuse(request: Any, context: Any) -> NoReturn:
        raise problem

    return refuse


async def _send(context: Any, problem: Problem, error: Exception) -> NoReturn:
    """End the call with the status of a problem."""
    status = errors.to_status(problem)
    trailers: list[tuple[str, str | bytes]] = [(errors.DETAILS_KEY, status.SerializeToString())]
    away = isinstance(error, StoreUnavailable) and not isinstance(error, (NotLeader, UnknownOutcome))
    if away or problem.reason in MISCONFIGURED:
        trailers.append(NO_RETRY)
    await context.abort(problem.code, status.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort raises")


def problem_of(method: str, error: Exception) -> Problem:
    """Return the problem that a caller may see for any exception."""
    match error:
        case Problem():
            return error
        case NotLeader():
            return errors.unavailable(str(error), 0.5, errors.NOT_LEADER)
        case StoreFull():
            told = f"the store is full, and nothing was changed: {error}; `cotenant status` shows how to recover"
            return errors.unavailable(told, reason="STORE_FULL")
        case StoreDistrusted():
            return errors.unavailable(
                f"nothing is written: {error}; an operator must {error.remedy}", reason=error.reason
            )
        case StoreUnavailable():
            return errors.unavailable(f"the store is unavailable: {error}", reason="STORE_UNAVAILABLE")
        case grpc.RpcError() if error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ):
            return errors.unavailable(f"a required service is unavailable: {errors.from_error(error).message}")
    incident = secrets.token_hex(4)
    log.error("call_failed", method=method, incident=incident, exc_info=error)
    return errors.internal(incident)
