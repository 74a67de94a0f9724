"""The connection between a command and the mesh: find it, call it, translate its errors for users."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.unary_stubs import NotUnary, UnaryStub, run_unary
from cotenant.deferred import Deferred, asyncio, grpc
from cotenant.rpc.access import Access, AccessError, Sources, expand_home, find_with_sources
from cotenant.rpc.endpoints import addresses_of, host_and_port
from cotenant.rpc.unary_client import UnaryClient

if TYPE_CHECKING:
    from cotenant.codec import errors
    from cotenant.codec.errors import Problem
    from cotenant.rpc import channel
    from cotenant.rpc.channel import Channel
    from cotenant.security import grpc_tls
    from cotenant.security.grpc_tls import TlsFiles
    from cotenant.v1.advice_service_pb2_grpc import AdviceServiceAsyncStub
    from cotenant.v1.array_service_pb2_grpc import ArrayServiceAsyncStub
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub
    from cotenant.v1.folder_service_pb2_grpc import FolderServiceAsyncStub
    from cotenant.v1.job_service_pb2_grpc import JobServiceAsyncStub
    from cotenant.v1.node_service_pb2_grpc import NodeServiceAsyncStub
    from cotenant.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub
    from cotenant.v1.process_service_pb2_grpc import ProcessServiceAsyncStub
    from cotenant.v1.schedule_service_pb2_grpc import ScheduleServiceAsyncStub
    from cotenant.v1.secret_service_pb2_grpc import SecretServiceAsyncStub
    from cotenant.v1.tenant_service_pb2_grpc import TenantServiceAsyncStub
else:
    errors = Deferred("cotenant.codec.errors")
    channel = Deferred("cotenant.rpc.channel")
    grpc_tls = Deferred("cotenant.security.grpc_tls")

T = TypeVar("T")
CERTIFICATE_NOTICE_DAYS = 7  # every command warns this long before the caller's certificate expires
_AWAY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
_BAD_INPUT = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "ALREADY_EXISTS", "UNAUTHENTICATED"})


class Mesh:
    """Stubs of the services, over one channel per address.

    With `unary`, stubs of plain addresses only make unary calls, one after the other, without gRPC or an event loop.
    `report` receives what a user should know of, such as that a lost stream is retried.
    """

    def __init__(
        self,
        find: Callable[[], Access],
        *,
        unary: bool = False,
        strictly: bool = False,
        report: Callable[[str], None] = note,
    ) -> None:
        self._find, self._strictly = find, strictly
        self.report = report
        self._access = find()
        self.unary = unary and self._access.tls is None and all(map(_is_one, self._known().values()))
        self._channels: dict[str, Channel] = {}
        self._clients: dict[str, UnaryClient] = {}

    @property
    def jobs(self) -> JobServiceAsyncStub:
        """The queue's API for jobs."""
        return cast("JobServiceAsyncStub", self._stub("queue", "JobService"))

    @property
    def arrays(self) -> ArrayServiceAsyncStub:
        """The queue's API for arrays."""
        return cast("ArrayServiceAsyncStub", self._stub("queue", "ArrayService"))

    @property
    def folders(self) -> FolderServiceAsyncStub:
        """The queue's API for uploaded folders."""
        return cast("FolderServiceAsyncStub", self._stub("queue", "FolderService"))

    @property
    def schedules(self) -> ScheduleServiceAsyncStub:
        """The queue's API for schedules."""
        return cast("ScheduleServiceAsyncStub", self._stub("queue", "ScheduleService"))

    @property
    def secrets(self) -> SecretServiceAsyncStub:
        """The queue's API for secrets."""
        return cast("SecretServiceAsyncStub", self._stub("queue", "SecretService"))

    @property
    def nodes(self) -> NodeServiceAsyncStub:
        """Placement's API for nodes."""
        return cast("NodeServiceAsyncStub", self._stub("placement", "NodeService"))

    @property
    def tenants(self) -> TenantServiceAsyncStub:
        """The queue's API for tenants."""
        return cast("TenantServiceAsyncStub", self._stub("queue", "TenantService"))

    @property
    def predictor(self) -> PredictorServiceAsyncStub:
        """The predictor's API for estimates and profiles."""
        return cast("PredictorServiceAsyncStub", self._stub("predictor", "PredictorService"))

    @property
    def advice(self) -> AdviceServiceAsyncStub:
        """The predictor's API for plans of snapshots."""
        return cast("AdviceServiceAsyncStub", self._stub("predictor", "AdviceService"))

    async def call_contention_replicas(
        self, call: Callable[[ContentionServiceAsyncStub], Awaitable[Sequence[T]]]
    ) -> list[T]:
        """Call every replica of contention, as each knows only its own nodes; print a note if some are unreachable.

        Raises:
            AioRpcError: a replica refused the call, or none is reachable.
        """
        answers: list[T] = []
        failed: grpc.aio.AioRpcError | None = None
        answered = False
        for one in await self._contention_replicas():
            try:
                answers += await call(cast("ContentionServiceAsyncStub", _grpc_stub("ContentionService", one)))
                answered = True
            except grpc.aio.AioRpcError as error:
                if not is_unreachable(error.code()):
                    raise
                failed = error
        if failed and not answered:
            raise failed
        if failed:
            reason = command_error(errors.from_error(failed)).message
            self.report(f"a replica of the contention service is unreachable, so its nodes are missing: {reason}")
        return answers

    async def _contention_replicas(self) -> list[Channel]:
        """Return a channel to each replica of contention, through the entry if its addresses were not given."""
        if self.is_given("contention"):
            return [
                self._connected(address, called) for address, called in channel.replicas_of(self._address("contention"))
            ]
        from cotenant.v1.process_service_pb2 import GetProcessRequest

        entry = self.channel_to("contention")
        try:
            answer = await self.process_stub(*self.entries()[0][:2]).GetProcess(GetProcessRequest())
        except grpc.aio.AioRpcError:
            return [entry]  # the call itself reports what is wrong
        found = [endpoint.address for endpoint in answer.endpoints if endpoint.service == "contention"]
        return [entry.to(address) for address in found] if len(found) > 1 else [entry]

    def is_given(self, service: str) -> bool:
        """Return whether a service has an address of its own: not that of all services, which may route its calls."""
        given = self._known()
        return bool(given[service]) and len(set(given.values())) > 1

    def entries(self) -> list[tuple[str, str, list[str]]]:
        """Return each known address, the name of its certificate, and the services for which it was given."""
        found: dict[tuple[str, str], list[str]] = {}
        for service, endpoint in self._known().items():
            for entry in channel.replicas_of(endpoint):
                found.setdefault(entry, []).append(service)
        return [(address, called, services) for (address, called), services in found.items()]

    def process_stub(self, address: str, called: str = "", to: str = "") -> ProcessServiceAsyncStub:
        """Return the replica stub of the process at an address, or of the process to which it passes calls."""
        entry = self._connected(address, called)
        return cast("ProcessServiceAsyncStub", _grpc_stub("ProcessService", entry.to(to) if to else entry))

    def policies(self) -> dict[str, PolicyServiceAsyncStub]:
        """Return a policy stub for each service, one for each address that was given to several of them alone."""
        channels: dict[str, Channel] = {}
        firsts: set[str] = set()
        for service, address in self._known().items():
            if not self.is_given(service):
                channels[service] = self.channel_to(service).to(service)
            elif address not in firsts:
                firsts.add(address)
                channels[service] = self.channel_to(service)
        return {
            service: cast("PolicyServiceAsyncStub", _grpc_stub("PolicyService", one))
            for service, one in channels.items()
        }

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files that the connections use."""
        return self._access.tls

    async def gather(self, *work: Coroutine[Any, Any, object]) -> None:
        """Await everything, at the same time unless the stubs are `unary`."""
        if not self.unary:
            await asyncio.gather(*work)
            return
        try:
            for one in work:
                await one
        finally:
            for one in work:
                one.close()  # those after a failed one were never awaited

    async def find_again(self) -> None:
        """Look up the mesh's address again: a restarted mesh may have another port."""
        try:
            access = self._find()
        except AccessError:
            return  # not restarted yet
        if access != self._access:
            await self.close()
            self._access = access

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        for one in channels.values():
            await one.close()
        for client in self._clients.values():
            client.close()

    def _address(self, service: str) -> str:
        """Return the address of a service; without one, any address, where the process routes the service's calls."""
        known = self._known()
        return known[service] or next(address for address in known.values() if address)

    def _known(self) -> dict[str, str]:
        """Return the endpoint of each service, "" if unknown."""
        return self._access.endpoints._asdict()

    def _stub(self, service: str, name: str) -> Any:
        """Return the stub of a gRPC service."""
        if not self.unary:
            return _grpc_stub(name, self.channel_to(service))
        address = self._address(service)
        if address not in self._clients:
            self._clients[address] = UnaryClient(*host_and_port(address))

        async def with_grpc(method: str, request: Any) -> Any:
            async with channel.connect(address, self._access.token) as connected:
                return await getattr(_grpc_stub(name, connected), method)(request)

        return UnaryStub(
            self._clients[address], self._access.token, _descriptor(name), None if self._strictly else with_grpc
        )

    def channel_to(self, service: str) -> Channel:
        """Return the channel to a service; without an address of its own, to a process that routes its calls."""
        return self._connected(self._address(service))

    def _connected(self, address: str, called: str = "") -> Channel:
        if address not in self._channels:
            self._channels[address] = channel.connect(address, self._access.token, tls=self._access.tls, called=called)
        return self._channels[address]


def _is_one(endpoint: str) -> bool:
    """Return whether an endpoint is one address; several need health checks."""
    return len(addresses_of(endpoint)) <= 1


def _module(service: str) -> str:
    """Return the module of a service, without its ending."""
    return f"cotenant.v1.{service.removesuffix('Service').lower()}_service_pb2"


def _grpc_stub(service: str, connected: Channel) -> Any:
    """Return the generated stub of a gRPC service."""
    return getattr(import_module(f"{_module(service)}_grpc"), f"{service}Stub")(connected)


def _descriptor(service: str) -> Any:
    return import_module(_module(service)).DESCRIPTOR.services_by_name[service]


def access_of(flags: Flags) -> Access:
    """Return the address and credentials of the mesh.

    Raises:
        NoAccess: no option, variable or file names the mesh.
    """
    return access_and_sources_of(flags)[0]


def access_and_sources_of(flags: Flags) -> tuple[Access, Sources]:
    """Return the address and credentials of the mesh, and where they come from.

    Raises:
        NoAccess: no option, variable or file names the mesh.
    """
    state_dir = expand_home(flags.state_dir, "--state-dir") if flags.state_dir else None
    tls = flags.tls_ca, flags.tls_cert, flags.tls_key
    return find_with_sources(state_dir, os.environ, endpoint=flags.endpoint, token=flags.token, tls=tls)


@asynccontextmanager
async def open_mesh(flags: Flags) -> AsyncIterator[Mesh]:
    """Yield a connection to the mesh and close it at the end.

    Raises:
        NoAccess: no option, variable or file names the mesh.
    """
    mesh = Mesh(lambda: access_of(flags))
    try:
        yield mesh
    finally:
        await mesh.close()


def with_mesh(flags: Flags, work: Callable[[Mesh], Awaitable[T]], *, unary: bool = False, strictly: bool = False) -> T:
    """Run `work` with a connection to the mesh and return its result.

    `unary` says that `work` awaits nothing but unary calls, one after the other. They are made with gRPC where
    `UnaryClient` cannot make them; `strictly` rules that out.

    Raises:
        CommandError: the mesh is unreachable or refused a call.
        NotUnary: a call needs gRPC, and must not use it; or the mesh's address does.
    """

    async def session(mesh: Mesh) -> T:
        try:
            done = await work(mesh)
            if mesh.tls:
                _warn_of_expiry(mesh.tls)
            return done
        finally:
            await mesh.close()

    try:
        mesh = Mesh(lambda: access_of(flags), unary=unary, strictly=strictly)
        if strictly and not mesh.unary:
            raise NotUnary
        return run_unary(session(mesh)) if mesh.unary else asyncio.run(session(mesh))
    except AccessError as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except grpc_tls.BadTls as error:
        raise usage_error(str(error)) from None
    except grpc.aio.AioRpcError as error:
        raise command_error(errors.from_error(error)) from error


def _warn_of_expiry(tls: TlsFiles) -> None:
    """Print a note if the caller's certificate expires within a week."""
    from datetime import UTC, datetime, timedelta

    now, validity = datetime.now(UTC), grpc_tls.load(tls).validity
    notice = timedelta(days=CERTIFICATE_NOTICE_DAYS)
    if validity and validity.is_due(now) and validity.ends - now < notice:
        note(f"your certificate {tls.cert} {validity.in_words(now)}; ask its issuer for a new one")


INVALID = "INVALID_ARGUMENT"


def command_error(problem: Problem) -> CommandError:
    """Return a service's error as a CommandError with the matching exit code."""
    plain = problem.reason in (problem.code.name, "") or problem.reason.endswith("_NOT_FOUND")
    message = problem.message if plain else f"{problem.reason}: {problem.message}"
    details = [f"{violation.field}: {violation.description}".lstrip(": ") for violation in problem.violations]
    if problem.reason != INVALID:
        details = []  # the message has them
    elif details:
        message = "invalid request"
    return CommandError(message, hint=_hint(problem), details=details, code=exit_code(problem.code))


def is_unreachable(code: grpc.StatusCode) -> bool:
    """Return whether a status means that the service did not answer."""
    return code.name in _AWAY


def exit_code(code: grpc.StatusCode) -> ExitCode:
    """Return the exit code for a gRPC status."""
    if is_unreachable(code):
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if code.name in _BAD_INPUT else ExitCode.FAILED


def _hint(problem: Problem) -> str:
    if remedy := problem.metadata.get("remedy"):
        return remedy
    if is_unreachable(problem.code) and problem.reason == problem.code.name:
        return "check that the mesh is running: start one with `cotenant up`, or set --endpoint or COTENANT_ENDPOINT"
    if problem.retry_after_seconds is not None:
        return f"try again in {problem.retry_after_seconds:g} s"
    if problem.code is grpc.StatusCode.ABORTED:
        return "it was changed concurrently; try again"
    return ""
