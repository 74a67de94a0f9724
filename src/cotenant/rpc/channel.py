"""Channels to the services: retries, deadlines, keepalive and the token are handled for the caller.

A wrapper around grpc's own channel adds the defaults. Interceptors could do it too, but in grpc.aio every interceptor
creates a task per call, which costs more than the rest of this package together.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc
import grpc.aio

from cotenant import telemetry
from cotenant.codec.method_rules import UNKNOWN_METHOD
from cotenant.codec.method_table import METHOD_RULES
from cotenant.name_resolution import NAMES
from cotenant.rpc.decode_guard import CheckedStreamCall, CheckedUnaryCall, guarded_deserializer
from cotenant.rpc.endpoints import MESH_NAME, TO, Endpoints, addresses_of, host_and_port
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles, channel_credentials

log = telemetry.logger()

__all__ = ["Channel", "Endpoints", "connect", "service_config"]

MIB = 2**20
JOB_SERVICE = "/cotenant.v1.JobService/"
ANSWER_BYTES_MAX = 64 * MIB
MESSAGE_BYTES_MAX_DEFAULT = 4 * MIB  # of requests that a server reads
ATTEMPTS_MAX = 4
LOOK_SECONDS = 5.0  # between DNS lookups of the names in a list, and gRPC's for a single name
UNRESOLVED_RETRY_SECONDS, UNRESOLVED_LOG_SECONDS = 0.5, 10.0
PING_SECONDS, PONG_SECONDS = 7.0, 5.0  # detects a halted server, whose connections stay open
OLD_MAX = 4  # connections with earlier certificates; calls on older ones are cut off


def connect(
    endpoint: str,
    token: str = "",
    *,
    health_service: str | None = None,
    tls: TlsFiles | None = None,
    called: str = "",
    resolved: ResolvedEndpoint | None = None,
) -> Channel:
    """Open a channel. Nothing is sent before the first call, so the server may start later.

    Calls take turns over the addresses of `a:1|b:1`, and over all addresses of a name. With `health_service`, and with
    several addresses, they go only to servers that report this service, or the server as a whole, as serving.
    Without `tls` the channel uses the certificates set by `secure` for the process. `called` is the name that the
    server's certificate must have, if it is not the endpoint's. `resolved` is the endpoint if `resolve` resolved it.

    Raises:
        BadTls: the certificates cannot be used.
    """
    if not endpoint:
        raise ValueError("missing endpoint: give host:port")
    if health_service is None and len(addresses_of(endpoint)) > 1:
        health_service = ""
    if not (token.isascii() and (token.isprintable() or not token)):
        raise ValueError("the token contains invalid characters")
    named = resolved or ResolvedEndpoint(endpoint)
    options, interceptors = _options(health_service, endpoint, called), telemetry.client_interceptors()
    watched = WatchedTlsFiles(tls) if tls is not None else _of_process
    return Channel(lambda: dial(named.target, options, interceptors, watched), token, watched, named)


_of_process: WatchedTlsFiles | None = None


def secure(tls: TlsFiles | None) -> None:
    """Set the certificates with which this process calls other processes from now on.

    Raises:
        BadTls: the certificates cannot be used.
    """
    global _of_process
    _of_process = WatchedTlsFiles(tls) if tls is not None else None


def shown() -> WatchedTlsFiles | None:
    """Return the certificates that this process shows to servers, as set by `secure`; None without TLS."""
    return _of_process


def dial(target: str, options: Any, interceptors: Any = (), watched: WatchedTlsFiles | None = None) -> Any:
    """Open one of grpc's own channels, by default with the certificates set by `secure`."""
    watched = watched or _of_process
    if watched is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    credentials = channel_credentials(watched.material)
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


def target_of(endpoint: str) -> str:
    """Return the gRPC target for addresses. A target may list several IP addresses but only one name.

    Names in a list are resolved here; `ResolvedEndpoint` does so repeatedly, as gRPC does for a single name.

    >>> target_of("queue.mesh:7070"), target_of("10.0.0.1:7070|10.0.0.2:7070")
    ('queue.mesh:7070', 'ipv4:10.0.0.1:7070,10.0.0.2:7070')
    >>> target_of("[::1]:1|[::1]:2")
    'ipv6:[::1]:1,[::1]:2'

    Raises:
        UnresolvedNames: neither IPv4 nor IPv6 has an address for each name.
    """
    addresses = addresses_of(endpoint)
    if len(addresses) == 1:
        return endpoint
    for scheme, family in (("ipv4", socket.AF_INET), ("ipv6", socket.AF_INET6)):
        found = [_numbers(address, family) for address in addresses]
        if all(found):
            return f"{scheme}:{','.join(dict.fromkeys(number for numbers in found for number in numbers))}"
    raise UnresolvedNames(
        f"{endpoint!r}: cannot resolve all names; each name of a list must resolve when it is first used"
    )


def replicas_of(endpoint: str) -> list[tuple[str, str]]:
    """Return each replica's own address, and the name that its certificate is for if that is another.

    A name with several addresses, as Kubernetes gives to all replicas of a service, stands for all of them.

    >>> replicas_of("10.0.0.1:7070|10.0.0.2:7070")
    [('10.0.0.1:7070', ''), ('10.0.0.2:7070', '')]
    """
    found = []
    for address in addresses_of(endpoint):
        host = host_and_port(address)[0]
        numbers = [] if _is_number(host) else _numbers(address, socket.AF_INET) or _numbers(address, socket.AF_INET6)
        several = sorted(set(numbers))
        found += [(number, host) for number in several] if len(several) > 1 else [(address, "")]
    return found


async def look_up(endpoint: str) -> list[tuple[str, str]]:
    """Do as `replicas_of` in a thread: a name server may be slow, and a cancelled caller leaves the lookup behind."""
    if all(_is_number(host_and_port(address)[0]) for address in addresses_of(endpoint)):
        return replicas_of(endpoint)
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[tuple[str, str]]] = loop.create_future()

    def tell(replicas: list[tuple[str, str]]) -> None:
        if not found.done():
            found.set_result(replicas)

    def look() -> None:
        try:
            replicas = replicas_of(endpoint)
        except UnicodeError:  # not a valid host name
            replicas = [(address, "") for address in addresses_of(endpoint)]
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, replicas)

    try:
        threading.Thread(target=look, name="names", daemon=True).start()
    except RuntimeError:  # no thread can be started: gRPC looks the name up when it connects
        return [(address, "") for address in addresses_of(endpoint)]
    return await found


class UnresolvedNames(ValueError):
    """A name of an endpoint cannot be resolved, now at least."""


class ResolvedEndpoint:
    """The gRPC target of an endpoint. Names in a list are resolved again in the background, without delaying calls."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic, *, last_known: str = "") -> None:
        """Resolve all names, or start with the last known target; raises what `target_of` raises."""
        self._endpoint, self._clock = endpoint, clock
        try:
            self.target = target_of(endpoint)
        except UnresolvedNames:
            if not last_known:
                raise
            self.target = last_known
        addresses = addresses_of(endpoint)
        NAMES.watch(self, (host_and_port(address)[0] for address in addresses))
        self.changes = len(addresses) > 1 and not all(_is_number(host_and_port(one)[0]) for one in addresses)
        self._looked = clock()
        self._looking: threading.Thread | None = None

    def look(self) -> str:
        """Return the known target, and start to resolve it again if it is old."""
        if self.changes and self._clock() - self._looked > LOOK_SECONDS and self._looking is None:
            self._looked = self._clock()
            self._looking = threading.Thread(target=self._look, name="names", daemon=True)
            try:
                self._looking.start()
            except RuntimeError:  # no thread can be started: the last known addresses stay
                self._looking = None
        return self.target

    def _look(self) -> None:
        try:
            self.target = target_of(self._endpoint)
        except ValueError:
            pass  # the name server is unavailable, or a name is gone: keep the known target
        finally:
            self._looking = None


async def resolve(endpoint: str, last_known: str = "") -> ResolvedEndpoint:
    """Resolve an endpoint in a thread, because a name server may be slow.

    Raises:
        UnresolvedNames: a name cannot be resolved, and no target is known from before.
    """
    resolved = partial(ResolvedEndpoint, endpoint, last_known=last_known)
    try:
        return await asyncio.to_thread(resolved)
    except RuntimeError:  # no thread can be started
        return resolved()


async def connect_when_resolved(endpoint: str, token: str = "") -> Channel:
    """Do as `connect` as soon as all names of a list resolve: a name server may be away when a service starts.

    Raises:
        BadTls, ValueError: as `connect`.
    """
    logged_time = -math.inf
    while True:
        try:
            return connect(endpoint, token, resolved=await resolve(endpoint))
        except UnresolvedNames as error:
            if time.monotonic() - logged_time >= UNRESOLVED_LOG_SECONDS:
                log.warning("names_unresolved", error=str(error))
                logged_time = time.monotonic()
            await asyncio.sleep(UNRESOLVED_RETRY_SECONDS)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _numbers(address: str, family: socket.AddressFamily) -> list[str]:
    host, port = host_and_port(address)
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except OSError:  # the name server does not know or does not answer, or this process is out of file descriptors
        return []
    bare = [str(one[4][0]) for one in found]
    return [f"[{number}]:{port}" if family is socket.AF_INET6 else f"{number}:{port}" for number in bare]


def forwarding_channel(endpoint: str) -> grpc.aio.Channel:
    """Open a channel for forwarded calls: nothing is added to them, and they are not retried."""
    channel: grpc.aio.Channel = dial(endpoint, [*_options(None), ("grpc.enable_retries", 0)])
    return channel


async def relaying_channel(endpoint: str, called: str = "") -> Channel:
    """Open a channel for calls that are relayed to a service: as `forwarding_channel`, to any of several replicas.

    Raises:
        UnresolvedNames: a name of the endpoint cannot be resolved, now at least.
    """
    named = await resolve(endpoint)
    health_service = "" if len(addresses_of(endpoint)) > 1 else None
    options = [*_options(health_service, endpoint, called), ("grpc.enable_retries", 0)]
    return _RelayingChannel(lambda: dial(named.target, options), "", _of_process, named)


def certificate_generation() -> int:
    """Return how often this process's certificates have changed; channels of an earlier generation show old ones."""
    return _of_process.look() if _of_process is not None else 0


def certificate_rejection() -> str:
    """Return why this process does not use the TLS files that it finds; "" if it uses them."""
    certificate_generation()
    return _of_process.rejection if _of_process is not None else ""


class Channel(grpc.aio.Channel):
    """grpc's channel with a default deadline, the token, and a `request_id` for calls that need one.

    When certificates or resolved addresses change, new calls use a new connection; calls in progress keep the old one.
    """

    def __init__(
        self,
        dial: Callable[[], Any],
        token: str,
        watched: WatchedTlsFiles | None = None,
        named: ResolvedEndpoint | None = None,
    ) -> None:
        self._dial, self._watched, self._named = dial, watched, named
        self._generation = self._look()
        self._current = dial()
        self._old: list[Any] = []
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def _look(self) -> tuple[int, str]:
        """Return the versions of certificates and addresses that a new connection would use."""
        return self._watched.look() if self._watched else 0, self._named.look() if self._named else ""

    @property
    def _inner(self) -> Any:
        if (now := self._look()) != self._generation:
            self._generation = now
            self._old = [*self._old, self._current][-OLD_MAX:]
            self._current = self._dial()
        return self._current

    def _stub(self, kind: str, method: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        """Return a stub that is created again when the connection changes."""
        kwargs["response_deserializer"] = guarded_deserializer(kwargs.get("response_deserializer"))
        if self._watched is None and (self._named is None or not self._named.changes):
            stub: Callable[..., Any] = getattr(self._current, kind)(method, *args, **kwargs)
            return stub
        made: list[Any] = [None, None]

        def call(*given: Any, **options: Any) -> Any:
            inner = self._inner
            if made[0] is not inner:
                made[:] = inner, getattr(inner, kind)(method, *args, **kwargs)
            return made[1](*given, **options)

        return call

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a unary call; calls of the API get a default deadline."""
        call = self._stub("unary_unary", method, args, kwargs)
        return _unary(call, method, self._metadata)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a call with a response stream."""
        return _streaming(self._stub("unary_stream", method, args, kwargs), method, self._metadata)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a call with a request stream."""
        return _streaming(self._stub("stream_unary", method, args, kwargs), method, self._metadata, CheckedUnaryCall)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a bidirectional stream."""
        return _streaming(self._stub("stream_stream", method, args, kwargs), method, self._metadata)

    def to(self, process: str) -> Channel:
        """Return a view of this channel whose calls the server passes to one process of the mesh.

        `process` is a service of the mesh, or the address of a replica as `GetProcess` returns it. Close the channel
        itself, not the view.
        """
        view = copy.copy(self)
        view._metadata = (*self._metadata, (TO, process))
        return view

    async def close(self, grace: float | None = None) -> None:
        """Let calls in progress finish within the grace, then cancel them."""
        if self._named:
            NAMES.drop(self._named)
        for inner in (*self._old, self._current):
            await inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Return the state of the connection."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        """Return once the connection's state has changed."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return once the connection is ready."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _RelayingChannel(Channel):
    """A channel that adds nothing to calls; requests and responses are bytes."""

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a unary call."""
        return self._stub("unary_unary", method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a call with a response stream."""
        return self._stub("unary_stream", method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a call with a request stream."""
        return self._stub("stream_unary", method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the stub of a bidirectional stream."""
        return self._stub("stream_stream", method, args, kwargs)


def _unary(call: Any, path: str, extra: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    method = METHOD_RULES.get(path, UNKNOWN_METHOD)

    def make(request: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any) -> Any:
        if method.has_request_id and not request.request_id:
            request = _with_request_id(request)
        _check_bytes(path, request)
        seconds = method.deadline_seconds if timeout is None else timeout
        return CheckedUnaryCall(call(request, timeout=seconds, metadata=_joined(metadata, extra), **kwargs), path)

    return make


def _streaming(
    call: Any,
    path: str,
    extra: tuple[tuple[str, str], ...],
    kind: type[CheckedUnaryCall | CheckedStreamCall] = CheckedStreamCall,
) -> Callable[..., Any]:
    def make(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return kind(call(*args, metadata=_joined(metadata, extra), **kwargs), path)

    return make


def _check_bytes(path: str, request: Any) -> None:
    """Reject a request that servers cannot even read by default; only here its largest fields can be named.

    Servers name the fields of smaller ones. Other services' requests have no large fields, or a limit that only the
    server's settings tell.

    Raises:
        AioRpcError: INVALID_ARGUMENT.
    """
    if not path.startswith(JOB_SERVICE) or request.ByteSize() <= MESSAGE_BYTES_MAX_DEFAULT:
        return
    from cotenant.codec import errors, request_bytes  # here, for what they import takes longer than most commands

    most = request_bytes.bytes_max(path)
    problem = errors.invalid(request_bytes.bytes_violations(path, request.SerializeToString(), most))
    status = errors.to_status(problem)
    trailers = grpc.aio.Metadata((errors.DETAILS_KEY, status.SerializeToString()))
    raise grpc.aio.AioRpcError(problem.code, grpc.aio.Metadata(), trailers, status.message)


def _with_request_id(request: Any) -> Any:
    """Return a copy with a `request_id`: without one, a retry inside the channel could repeat the operation."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.request_id = uuid.uuid4().hex
    return copy


def _joined(metadata: Any, extra: tuple[tuple[str, str], ...]) -> Any:
    return extra if not metadata else (*metadata, *extra)


def service_config(health_service: str | None = None) -> Mapping[str, Any]:
    """Return gRPC's service config: which methods are retried, and how calls are balanced."""
    retried = [path.removeprefix("/").split("/") for path, method in METHOD_RULES.items() if method.retried]
    config: dict[str, Any] = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": [{"service": service, "method": name} for service, name in retried],
                "retryPolicy": {
                    "maxAttempts": ATTEMPTS_MAX,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5},
    }
    if health_service is not None:
        config["healthCheckConfig"] = {"serviceName": health_service}
    return config


def _options(health_service: str | None, endpoint: str = "", called: str = "") -> list[tuple[str, Any]]:
    several = len(addresses_of(endpoint)) > 1  # gRPC checks one name for a list; each server has its own certificate
    name = MESH_NAME if several else called
    return [
        *([("grpc.ssl_target_name_override", name)] if name else []),
        ("grpc.service_config", json.dumps(service_config(health_service))),
        ("grpc.dns_min_time_between_resolutions_ms", round(LOOK_SECONDS * 1000)),  # after failed connections
        ("grpc.use_local_subchannel_pool", 1),  # else a channel that cannot connect yet makes others wait with it
        ("grpc.enable_http_proxy", 0),  # services are local; the environment's proxy is for the web
        ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
        ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(PONG_SECONDS * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PONG_SECONDS * 1000)),  # current gRPC uses this one; default 1 min
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: an agent's streams may be idle for long
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # also the time-out of one connection attempt
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
