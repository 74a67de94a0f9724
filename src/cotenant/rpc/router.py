"""Passes calls for services that this process does not serve to the services that do, so that one address is enough.

Theory of operation. Each process knows the endpoints of the mesh. For a method of the public API whose service is not
served here, the interceptor asks the router for a handler: it takes raw bytes, so that the call arrives unchanged, and
relays the answer. The caller was authenticated and authorized here, and is again where the call is answered. A routed
call is marked, and a process that receives a marked call for a service that it does not serve refuses it: endpoints
that point in a circle end after one hop. A follower may still forward a routed call to its leader, which is a mark of
its own.

Some answers describe one process: `ProcessService`, `PolicyService` and, because each replica has its own nodes,
`ContentionService`. Such a call may name its process in the metadata `cotenant-to`: a service, or the address of a
replica as `GetProcess` returns it. Other addresses are refused, so nobody can make this process call a stranger.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

import cotenant.v1
from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.codec.method_table import METHOD_RULES
from cotenant.rpc.channel import Channel, UnresolvedNames, look_up, relaying_channel
from cotenant.rpc.endpoints import SERVICES, TO, Endpoints, addresses_of
from cotenant.rpc.relay import is_ended, is_routed, relay_error, relayed_metadata
from cotenant.rpc.service_homes import ADDRESSABLE, EVERYWHERE, HOMES, PUBLIC_PACKAGE, homes_of, is_public, service_of
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security import audit
from cotenant.security.audit import ROUTED

LOOK_UP_SECONDS = 2.0  # for the names of replicas; afterwards they are listed as they were configured
MISROUTED = "MISROUTED"
ADDRESS_UNKNOWN = "SERVICE_ADDRESS_UNKNOWN"
MISCONFIGURED = frozenset({MISROUTED, ADDRESS_UNKNOWN})  # a retry does not help
UNREACHABLE = "SERVICE_UNREACHABLE"

Destination = tuple[str, str]  # an endpoint, and the name that its certificate is for if that is another


class Router:
    """Routes calls to the endpoints of a mesh; `served` are the gRPC services of this process."""

    def __init__(self, endpoints: Endpoints, served: Iterable[str] = ()) -> None:
        self.endpoints = endpoints
        self.own = homes_of(served)
        self._handlers: dict[str, Any] = {}
        self._channels: dict[Destination, asyncio.Task[Channel]] = {}

    def routed_services(self) -> list[str]:
        """Return the public gRPC services that callers reach through this process.

        >>> Router(Endpoints(queue="a:1"), ["cotenant.v1.NodeService"]).routed_services()
        ['cotenant.v1.JobService', 'cotenant.v1.ArrayService', 'cotenant.v1.TenantService', ...
        """
        return [
            service
            for service, home in HOMES.items()
            if is_public(service) and home not in self.own and getattr(self.endpoints, home)
        ]

    def handler(self, path: str, metadata: Sequence[tuple[str, Any]], served: Any) -> Any:
        """Return the handler for a call: `served`, that of this process, if it is to answer; None if nobody can."""
        service = service_of(path)
        if served is not None:
            if service not in ADDRESSABLE or not self._is_for_another(service, metadata):
                return served
        elif not (is_public(service) and service in HOMES and path in METHOD_RULES):
            return None
        if path not in self._handlers:
            self._handlers[path] = self._made(path)
        return self._handlers[path]

    def _is_for_another(self, service: str, metadata: Sequence[tuple[str, Any]]) -> bool:
        """Return whether a call names another process and was not routed yet."""
        keys = dict(metadata or ())
        if TO not in keys or ROUTED in keys:
            return False
        return keys[TO] not in SERVICES or (service in EVERYWHERE and keys[TO] not in self.own)

    def _made(self, path: str) -> Any:
        """Return the raw-byte handler of a method."""

        async def answer(request: Any, context: Any) -> bytes:
            return await self._answer(path, request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            async for response in self._stream(path, request, context):
                yield response

        stream.passes_on = True  # type: ignore[attr-defined]  # functions have attributes
        method = _method(path)
        kinds = ("unary", "stream")
        make = getattr(grpc, f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}_rpc_method_handler")
        return make(stream if method.server_streaming else answer)

    async def _answer(self, path: str, request: Any, context: Any) -> bytes:
        service, destination = await self._destination(path, context)
        channel = await self._channel(service, destination)
        make: Any = channel.unary_unary if isinstance(request, bytes) else channel.stream_unary
        metadata = relayed_metadata(context, destination[0], ROUTED)
        call = make(path)(request, metadata=metadata, timeout=context.time_remaining())
        try:
            response: bytes = await call
            context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        except asyncio.CancelledError:
            if is_ended():
                raise
            raise _stopping() from None
        except grpc.aio.AioRpcError as error:
            raise await _relayed(context, service, destination, error) from None
        return response

    async def _stream(self, path: str, request: Any, context: Any) -> AsyncIterator[bytes]:
        """Relay a response stream; the next message is read when the caller has taken the last one."""
        service, destination = await self._destination(path, context)
        channel = await self._channel(service, destination)
        make: Any = channel.unary_stream if isinstance(request, bytes) else channel.stream_stream
        metadata = relayed_metadata(context, destination[0], ROUTED)
        call = make(path)(request, metadata=metadata, timeout=context.time_remaining())
        try:
            await audit.log_stream()
            async for response in call:
                yield response
            context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        except asyncio.CancelledError:
            if is_ended():
                raise
            raise _stopping() from None
        except grpc.aio.AioRpcError as error:
            raise await _relayed(context, service, destination, error) from None
        finally:
            call.cancel()

    # Destinations --------------------------------------------------------------------------------------------

    async def _destination(self, path: str, context: Any) -> tuple[str, Destination]:
        """Return which service of the mesh answers a call, and where.

        Raises:
            Problem: UNAVAILABLE: the call was routed before, or this process does not know the address.
        """
        name, to = service_of(path), dict(context.invocation_metadata() or ()).get(TO, "")
        home = HOMES.get(name, "")
        if is_routed(context):
            raise _final(
                MISROUTED,
                f"another process routed this call here, but this process ({_listed(self.own)}) does not serve {name}: "
                f"its --endpoints names a wrong address for the {home or 'other'} service",
            )
        if name in ADDRESSABLE and to and to not in SERVICES:
            return home or "other", await self._replica(to)
        home = home or to
        endpoint = getattr(self.endpoints, home)
        if not endpoint:
            raise _final(
                ADDRESS_UNKNOWN,
                f"this process ({_listed(self.own)}) does not know the address of the {home} service; "
                f"start it with --endpoints …,{home}=HOST:PORT, or call that service itself",
            )
        return home, (endpoint, "")

    async def _replica(self, address: str) -> Destination:
        """Return the destination for the address of a replica.

        Raises:
            Problem: INVALID_ARGUMENT: no endpoint of the mesh has this address.
        """
        for _, known, called in await self.replicas():
            if known == address:
                return known, called
        told = f"{address!r} is neither a service nor the address of a process that GetProcess returns"
        raise errors.invalid([errors.Violation(TO, told)])

    async def replicas(self) -> list[tuple[str, str, str]]:
        """Return service, address and certificate name of each process that the endpoints name."""
        named = [(service, endpoint) for service in SERVICES if (endpoint := getattr(self.endpoints, service))]
        found = await asyncio.gather(*(_replicas(endpoint) for _, endpoint in named))
        return [
            (service, address, called)
            for (service, _), replicas in zip(named, found, strict=True)
            for address, called in replicas
        ]

    async def _channel(self, service: str, destination: Destination) -> Channel:
        """Return the channel to a destination, which is opened by its first call.

        Raises:
            Problem: UNAVAILABLE: its name cannot be resolved.
        """
        opening = self._channels.get(destination)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._channels[destination] = asyncio.create_task(relaying_channel(*destination), name="routing")
        try:
            return await asyncio.shield(opening)
        except UnresolvedNames as error:
            raise errors.unavailable(f"the {service} service cannot be reached: {error}", reason=UNREACHABLE) from None

    async def close(self) -> None:
        """Close all channels."""
        opened, self._channels = self._channels, {}
        for opening in opened.values():
            if opening.done() and not opening.cancelled() and not opening.exception():
                await opening.result().close()
        await cancel_and_wait(*opened.values())


async def _replicas(endpoint: str) -> list[tuple[str, str]]:
    try:
        async with asyncio.timeout(LOOK_UP_SECONDS):
            return await look_up(endpoint)
    except TimeoutError:
        return [(address, "") for address in addresses_of(endpoint)]


def import_public_services() -> None:
    """Import the messages of the public API: reflection, the audit log and the router look them up."""
    for module in pkgutil.iter_modules(cotenant.v1.__path__):
        if module.name.endswith("_service_pb2"):
            importlib.import_module(f"{PUBLIC_PACKAGE}.{module.name}")


def _method(path: str) -> Any:
    """Return the description of a method."""
    find: Callable[[str], Any] = descriptor_pool.Default().FindMethodByName
    try:
        return find(path[1:].replace("/", "."))
    except KeyError:
        import_public_services()
        return find(path[1:].replace("/", "."))


async def _relayed(context: Any, service: str, destination: Destination, error: grpc.aio.AioRpcError) -> Problem:
    """End a call with the status of the relayed call; return a problem if there was no answer."""
    answered = any(key == errors.DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    if error.code() is not grpc.StatusCode.UNAVAILABLE or answered:
        await relay_error(context, error)
    why = errors.from_error(error)
    message = why.message if why.reason != why.code.name else "it does not answer"
    reason = UNREACHABLE if why.reason == why.code.name else why.reason
    return errors.unavailable(f"the {service} service at {destination[0]} cannot be reached: {message}", 0.5, reason)


def _final(reason: str, message: str) -> Problem:
    """Return a problem of the configuration, which a retry does not solve."""
    return Problem(grpc.StatusCode.UNAVAILABLE, reason, message)


def _stopping() -> Problem:
    return errors.unavailable("this process is stopping", 0.5)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no service"
