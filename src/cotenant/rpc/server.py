"""The one gRPC server of a process: any number of services behind one guard, with health and reflection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cotenant import file_descriptors, name_resolution, telemetry
from cotenant.codec.methods import METHODS
from cotenant.name_resolution import NAMES
from cotenant.rpc import restartable_server
from cotenant.rpc.auth_interceptor import CALLS_MAX, Guard
from cotenant.rpc.connections import RULES, ConnectionRules, Connections, Problem, connections_max
from cotenant.rpc.endpoints import host_and_port
from cotenant.rpc.health_service import Health
from cotenant.rpc.loop_lag import Stalls
from cotenant.rpc.task_cancellation import end
from cotenant.security.certificate_expiry import Expiry
from cotenant.security.grpc_tls import server_credentials
from cotenant.security.identity import Anyone, Authenticator, BearerToken
from cotenant.security.server_security import PLAIN, Security
from cotenant.security.validity import Validity
from cotenant.v1.condition_pb2 import LoopLag

log = structlog.get_logger()

MIB = 2**20
MESSAGE_BYTES_MAX_DEFAULT = 4 * MIB
DEADLINE_SECONDS_DEFAULT = 60.0
REBIND_SECONDS = 0.05
IDLE_SECONDS_MAX = 900.0  # a connection without calls is closed in order; its client opens another when it calls
PINGS_SECONDS_MIN = 5.0  # between two pings of a client that hears nothing; who sends more is cut off
OVERALL = ""  # the health protocol's name for the server as a whole

AddServicer = Callable[[Any, Any], None]

SERVERS_ENDED = telemetry.counter(
    "cotenant.loop.servers_ended",
    "{server}",
    "Servers that ended by themselves and were begun anew: somebody sends bad requests.",
)


class Host(Protocol):
    """What serves: a server, or what stands in for one."""

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Serve a service with the generated `add_…_to_server`."""

    def set_serving(self, service: str, serving: bool) -> None:
        """Tell by the health protocol whether a service can do its work."""


class CannotListen(Exception):
    """The address cannot be listened on; the message says why."""


class Server:
    """Serves what was added to it before `start`.

    Without a token, an authenticator or a `security` that has one it lets everybody in.
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
        self._guard = Guard(
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
        self._health = Health(self._connections, authenticator, security.limits)
        self._stalls = Stalls()
        self._beside: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        self._server: Any = None
        self._port = 0
        self._started = False

    def add(self, add_servicer: AddServicer, servicer: Any, service: str) -> None:
        """Serve `service`, for example "cotenant.v1.JobService", with the generated `add_…_to_server`."""
        if self._started:
            raise RuntimeError("services are added before the server starts")
        self._servicers.append((add_servicer, servicer))
        self._serving.setdefault(service, True)

    @property
    def certificate(self) -> Validity | None:
        """From when until when the certificate is valid that it shows now; None without TLS."""
        return self._tls.material.validity if self._tls else None

    def problems(self) -> list[Problem]:
        """Return what is wrong with the connections and descriptors of this process, and with names that it uses."""
        return [*self._connections.problems(), *(Problem(error, name_resolution.REMEDY) for error in NAMES.errors())]

    def loop_lag(self) -> LoopLag:
        """Return by how much the event loop is behind."""
        return self._stalls.lag()

    def bind(self) -> int:
        """Take the port and return it, so that services can be told where they will be; `start` does it otherwise.

        Raises:
            CannotListen: the address is in use, or not this machine's.
        """
        if self._server is None:
            self._server, self._port = self._bound(self._address)
        return self._port

    def _bound(self, address: str) -> tuple[Any, int]:
        server = restartable_server.server(
            interceptors=[*telemetry.server_interceptors(METHODS.__contains__), self._guard],
            options=_options(self._message_bytes_max, self._connections.rules.handshake_seconds),
        )
        credentials = server_credentials(self._tls) if self._tls else None
        return server, _bind(server, address, credentials)

    async def start(self) -> int:
        """Begin to serve and return the port.

        Raises:
            CannotListen: the address is in use, or not this machine's.
        """
        self.bind()
        self._started = True
        for service, serving in self._serving.items():
            self._health.set(service, _status(serving))
        self._health.set(OVERALL, _status(all(self._serving.values())))
        await self._begin(self._server)
        self._beside = [
            asyncio.create_task(self._stalls.run(), name="stalls"),
            asyncio.create_task(NAMES.run(), name="name-checks"),
            asyncio.create_task(self._connections.run(self._port), name="connections"),
            asyncio.create_task(self._begin_again(), name="server"),
        ]
        if self._tls:
            self._beside.append(asyncio.create_task(Expiry(self._tls).run(), name="expiry"))
        return self._port

    async def _begin(self, server: Any) -> None:
        """Have one of gRPC's servers answer with all that was added."""
        for add_servicer, servicer in self._servicers:
            add_servicer(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [*self._serving, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        await server.start()

    async def _begin_again(self) -> None:
        """Put a new one in the place of a server of gRPC's that ended by itself, as often as that happens."""
        while True:
            try:
                await asyncio.shield(self._server.wait_for_termination())  # what it waits for is the server's own
                return  # it was stopped
            except Exception as error:  # whatever it ended with
                log.error("server_ended_by_itself", port=self._port, error=f"{type(error).__name__}: {error}")
            self._server = await self._rebound(f"{self._address.rpartition(':')[0]}:{self._port}")
            await self._begin(self._server)
            SERVERS_ENDED.add()

    async def _rebound(self, address: str) -> Any:
        """Take the port anew, as soon as it is free."""
        while True:
            try:
                return self._bound(address)[0]
            except CannotListen as error:
                log.info("port_not_free_yet", why=str(error))
            await asyncio.sleep(REBIND_SECONDS)

    def set_serving(self, service: str, serving: bool) -> None:
        """Tell by the health protocol whether a service can do its work; the server as a whole can if all can."""
        if service not in self._serving:
            raise KeyError(f"{service} is not served here; {', '.join(self._serving)} are")
        self._serving[service] = serving
        if self._started:
            self._health.set(service, _status(serving))
            self._health.set(OVERALL, _status(all(self._serving.values())))

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no new calls, let those under way finish within the grace, then cut them off."""
        if not self._started:
            return
        await end(*self._beside)
        self._health.shut_down()
        await self._server.stop(grace_seconds)
        self._stopped.set()

    async def wait(self) -> None:
        """Return once the server has been stopped."""
        await self._stopped.wait()


def _options(message_bytes_max: int, handshake_seconds: float) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else a second server on the same port would silently share its calls
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", -1),  # the receiver says what it takes
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(PINGS_SECONDS_MIN * 1000)),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.server_handshake_timeout_ms", round(handshake_seconds * 1000)),  # of TLS and HTTP/2
        ("grpc.max_allowed_incoming_connections", connections_max(file_descriptors.usage())),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS_MAX * 1000)),
        ("grpc.http2.ping_timeout_ms", 10_000),  # which is the one that counts, in gRPC of today
    ]


def _bind(server: Any, address: str, credentials: Any) -> int:
    try:
        host, port = host_and_port(address)  # gRPC would take port 65,537 for port 1
        if credentials is not None:
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))
    except ValueError as error:
        raise CannotListen(f"cannot listen on {address}: {error}") from None
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {address}: {_why(host, port) or error}") from None


def _why(host: str, port: int) -> str:
    """Ask the kernel, since gRPC does not pass on why a port could not be bound."""
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
