"""The single gRPC server of a process: any number of services behind one interceptor, with health and reflection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cotenant import file_descriptors, name_resolution, telemetry
from cotenant.codec.method_table import METHOD_RULES
from cotenant.name_resolution import NAMES
from cotenant.rpc import restartable_server
from cotenant.rpc.auth_interceptor import CALLS_MAX, AuthInterceptor
from cotenant.rpc.channel import MESSAGE_BYTES_MAX_DEFAULT
from cotenant.rpc.connections import RULES, ConnectionRules, Connections, ProcessProblem, connections_max
from cotenant.rpc.endpoints import Endpoints, host_and_port
from cotenant.rpc.health_service import HealthServicer
from cotenant.rpc.loop_lag import LoopLagMonitor
from cotenant.rpc.router import Router, import_public_services
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security.certificate_expiry import CertificateExpiry
from cotenant.security.grpc_tls import server_credentials
from cotenant.security.identity import Anyone, Authenticator, BearerToken
from cotenant.security.server_security import PLAIN, Security
from cotenant.security.tls_files import REJECTION_REMEDY
from cotenant.security.validity import Validity
from cotenant.telemetry.plain_structlog import structlog
from cotenant.v1.condition_pb2 import LoopLag

log = structlog.get_logger()

DEADLINE_SECONDS_DEFAULT = 60.0
REBIND_SECONDS = 0.05
IDLE_SECONDS_MAX = 900.0  # connections without calls are closed cleanly; clients reconnect at the next call
PINGS_SECONDS_MIN = 5.0  # between pings of an idle client; clients that ping more often are disconnected
OVERALL = ""  # the health protocol's name for the server as a whole

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

AddServicer = Callable[[Any, Any], None]

SERVERS_ENDED = telemetry.counter(
    "cotenant.loop.servers_ended",
    "{server}",
    "Servers that stopped unexpectedly and were restarted: a client sends malformed requests.",
)


class Host(Protocol):
    """Something that services can be added to: a server, or the handlers of a leadership term."""

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Add a service with the generated `add_…_to_server`."""

    def set_serving(self, service: str, serving: bool) -> None:
        """Set a service's health in the health protocol."""


class CannotListen(Exception):
    """The server cannot listen on its address; the message says why."""


def _is_unary(path: str) -> bool:
    """Return whether a path is that of a method of the API without streams."""
    rules = METHOD_RULES.get(path)
    return rules is not None and not rules.streams


class Server:
    """Serves the services that were added before `start`.

    Without a token, an authenticator, or a `security` that has one, every caller is admitted.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        *,
        authenticator: Authenticator | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX_DEFAULT,
        calls_max: int = CALLS_MAX,
        deadline_seconds_default: float = DEADLINE_SECONDS_DEFAULT,
        security: Security = PLAIN,
        connections: ConnectionRules = RULES,
    ) -> None:
        if authenticator is None:
            authenticator = security.authenticator
        if authenticator is None:
            authenticator = BearerToken(token) if token is not None else Anyone()
        self._address = address
        self._tls = security.tls
        mutual = self._tls is not None and self._tls.files.client_certificates
        self._connections = Connections(connections, mutual_tls=mutual)
        self._auth_interceptor = AuthInterceptor(
            authenticator,
            deadline_seconds_default,
            security.limits,
            security.audit,
            calls_max,
            self._connections.authenticated,
        )
        self._message_bytes_max = security.message_bytes_max or message_bytes_max
        self._servicers: list[tuple[AddServicer, Any]] = []
        self._serving: dict[str, bool] = {}
        self._health = HealthServicer(self._connections, authenticator, security.limits)
        self._loop_lag = LoopLagMonitor()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        self._server: Any = None
        self._port = 0
        self._started = False
        self._endpoints: Endpoints | None = None
        self._problems: list[Callable[[], Sequence[ProcessProblem]]] = []

    def watch_problems(self, problems: Callable[[], Sequence[ProcessProblem]]) -> None:
        """Report a service's own problems with those of this process."""
        self._problems.append(problems)

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Add `service`, for example "cotenant.v1.JobService", with the generated `add_…_to_server`."""
        if self._started:
            raise RuntimeError("add services before the server starts")
        self._servicers.append((add_servicer, servicer))
        self._serving.setdefault(service, True)

    @property
    def certificate(self) -> Validity | None:
        """The validity of the certificate that the server shows now; None without TLS."""
        return self._tls.material.validity if self._tls else None

    def problems(self) -> list[ProcessProblem]:
        """Return problems with the connections, file descriptors, TLS files and DNS names of this process."""
        return [
            *self._connections.problems(),
            *(problem for problems in self._problems for problem in problems()),
            *self._tls_problems(),
            *(ProcessProblem(error, name_resolution.REMEDY) for error in NAMES.errors()),
        ]

    def _tls_problems(self) -> list[ProcessProblem]:
        """Return why the server does not use the TLS files that it finds."""
        if self._tls is None:
            return []
        self._tls.look()
        if not self._tls.rejection:
            return []
        reason = f"it does not use its new certificate: {self._tls.rejection}"
        return [ProcessProblem(reason, REJECTION_REMEDY)]

    def loop_lag(self) -> LoopLag:
        """Return the lag of the event loop."""
        return self._loop_lag.lag()

    def bind(self) -> int:
        """Bind the port and return it, so that services can be told their address before `start`.

        Raises:
            CannotListen: the address is in use, or not of this machine.
        """
        if self._server is None:
            self._server, self._port = self._build_and_bind(self._address)
        return self._port

    def _build_and_bind(self, address: str) -> tuple[Any, int]:
        server = restartable_server.server(
            interceptors=[*telemetry.server_interceptors(_is_unary), self._auth_interceptor],
            options=_options(self._message_bytes_max, self._connections.rules.handshake_seconds),
        )
        credentials = server_credentials(self._tls) if self._tls else None
        return server, _bind(server, address, credentials)

    async def start(self) -> int:
        """Start to serve and return the port.

        Raises:
            CannotListen: the address is in use, or not of this machine.
        """
        self.bind()
        self._started = True
        if self._endpoints is not None:
            import_public_services()
            self._auth_interceptor.router = Router(self._endpoints, self._serving)
        for service, serving in self._serving.items():
            self._health.set(service, _status(serving))
        self._health.set(OVERALL, _status(all(self._serving.values())))
        await self._start_serving(self._server)
        self._tasks = [
            asyncio.create_task(self._loop_lag.run(), name="stalls"),
            asyncio.create_task(NAMES.run(), name="name-checks"),
            asyncio.create_task(self._connections.run(self._port), name="connections"),
            asyncio.create_task(self._restart_when_stopped(), name="server"),
        ]
        if self._tls:
            self._tasks.append(asyncio.create_task(CertificateExpiry(self._tls).run(), name="expiry"))
        return self._port

    async def _start_serving(self, server: Any) -> None:
        """Register all services with a gRPC server and start it."""
        # From the extra `server`, and imported here because an agent imports this module for its errors.
        from grpc_reflection.v1alpha import reflection

        for add_servicer, servicer in self._servicers:
            add_servicer(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        routed = self.router.routed_services() if self.router else []
        names = [*self._serving, *routed, HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        await server.start()

    async def _restart_when_stopped(self) -> None:
        """Replace the gRPC server whenever it stops unexpectedly."""
        while True:
            try:
                await asyncio.shield(self._server.wait_for_termination())  # the awaited future belongs to the server
                return  # it was stopped
            except Exception as error:  # any error may have stopped it
                log.error("server_stopped_unexpectedly", port=self._port, error=f"{type(error).__name__}: {error}")
            self._server = await self._rebind(f"{self._address.rpartition(':')[0]}:{self._port}")
            await self._start_serving(self._server)
            SERVERS_ENDED.add()

    async def _rebind(self, address: str) -> Any:
        """Bind the port again as soon as it is free."""
        while True:
            try:
                return self._build_and_bind(address)[0]
            except CannotListen as error:
                log.info("port_still_in_use", why=str(error))
            await asyncio.sleep(REBIND_SECONDS)

    def route(self, endpoints: Endpoints) -> None:
        """Pass calls for public services that are not added to this server to the endpoints of the mesh.

        Call this before `start`. Their health is not reported here: the health protocol is for what a process serves.
        """
        self._endpoints = endpoints

    @property
    def router(self) -> Router | None:
        """The router of this server once it has started; None if it routes no calls."""
        return self._auth_interceptor.router

    @property
    def services(self) -> Sequence[str]:
        """The gRPC services that are served here."""
        return tuple(self._serving)

    def set_serving(self, service: str, serving: bool) -> None:
        """Set a service's health; the server as a whole is healthy if all services are."""
        if service not in self._serving:
            raise KeyError(f"unknown service {service}; this server has {', '.join(self._serving)}")
        self._serving[service] = serving
        if self._started:
            self._health.set(service, _status(serving))
            self._health.set(OVERALL, _status(all(self._serving.values())))

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Accept no new calls, let calls in progress finish within the grace, then cancel them."""
        if not self._started:
            return
        await cancel_and_wait(*self._tasks)
        self._health.shut_down()
        await self._server.stop(grace_seconds)
        if self.router:
            await self.router.close()
        self._stopped.set()

    async def wait(self) -> None:
        """Return once the server has been stopped."""
        await self._stopped.wait()


def _options(message_bytes_max: int, handshake_seconds: float) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else a second server on the same port would silently share its calls
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", -1),  # the receiver sets the limit
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(PINGS_SECONDS_MIN * 1000)),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.server_handshake_timeout_ms", round(handshake_seconds * 1000)),  # of TLS and HTTP/2
        ("grpc.max_allowed_incoming_connections", connections_max(file_descriptors.usage())),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS_MAX * 1000)),
        ("grpc.http2.ping_timeout_ms", 10_000),  # the option that current gRPC uses
    ]


def _bind(server: Any, address: str, credentials: Any) -> int:
    try:
        host, port = host_and_port(address)  # gRPC would treat port 65,537 as port 1
        if credentials is not None:
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))
    except ValueError as error:
        raise CannotListen(f"cannot listen on {address}: {error}") from None
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {address}: {_bind_error(host, port) or error}") from None


def _bind_error(host: str, port: int) -> str:
    """Return why a port cannot be bound, from the kernel; gRPC does not report it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _status(serving: bool) -> Any:
    response = health_pb2.HealthCheckResponse
    return response.SERVING if serving else response.NOT_SERVING
