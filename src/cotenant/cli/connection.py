"""The connection between a command and the mesh: find it, call it, translate its errors for users."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio

from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.codec.errors import Problem, from_error
from cotenant.rpc.access import Access, AccessError, expand_home, find
from cotenant.rpc.channel import Channel, connect, replicas_of
from cotenant.security.grpc_tls import BadTls, TlsFiles, load
from cotenant.v1.array_service_pb2_grpc import ArrayServiceStub
from cotenant.v1.contention_service_pb2_grpc import ContentionServiceStub
from cotenant.v1.job_service_pb2_grpc import JobServiceStub
from cotenant.v1.node_service_pb2_grpc import NodeServiceStub
from cotenant.v1.policy_service_pb2_grpc import PolicyServiceStub
from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceStub
from cotenant.v1.process_service_pb2 import GetProcessRequest
from cotenant.v1.process_service_pb2_grpc import ProcessServiceStub
from cotenant.v1.tenant_service_pb2_grpc import TenantServiceStub

if TYPE_CHECKING:
    from cotenant.v1.array_service_pb2_grpc import ArrayServiceAsyncStub
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub
    from cotenant.v1.job_service_pb2_grpc import JobServiceAsyncStub
    from cotenant.v1.node_service_pb2_grpc import NodeServiceAsyncStub
    from cotenant.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub
    from cotenant.v1.process_service_pb2_grpc import ProcessServiceAsyncStub
    from cotenant.v1.tenant_service_pb2_grpc import TenantServiceAsyncStub

T = TypeVar("T")
Code = grpc.StatusCode

CERTIFICATE_NOTICE = timedelta(days=7)  # every command warns this long before the caller's certificate expires
_AWAY = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
_BAD_INPUT = frozenset(
    {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.OUT_OF_RANGE, Code.ALREADY_EXISTS, Code.UNAUTHENTICATED}
)


class Mesh:
    """Stubs of the services, over one channel per address."""

    def __init__(self, find: Callable[[], Access]) -> None:
        self._find = find
        self._access = find()
        self._channels: dict[str, Channel] = {}

    @property
    def jobs(self) -> JobServiceAsyncStub:
        """The queue's API for jobs."""
        return cast("JobServiceAsyncStub", JobServiceStub(self._channel("queue")))

    @property
    def arrays(self) -> ArrayServiceAsyncStub:
        """The queue's API for arrays."""
        return cast("ArrayServiceAsyncStub", ArrayServiceStub(self._channel("queue")))

    @property
    def nodes(self) -> NodeServiceAsyncStub:
        """Placement's API for nodes."""
        return cast("NodeServiceAsyncStub", NodeServiceStub(self._channel("placement")))

    @property
    def tenants(self) -> TenantServiceAsyncStub:
        """The queue's API for tenants."""
        return cast("TenantServiceAsyncStub", TenantServiceStub(self._channel("queue")))

    @property
    def predictor(self) -> PredictorServiceAsyncStub:
        """The predictor's API for estimates and profiles."""
        return cast("PredictorServiceAsyncStub", PredictorServiceStub(self._channel("predictor")))

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
        for channel in await self._contention_replicas():
            try:
                answers += await call(cast("ContentionServiceAsyncStub", ContentionServiceStub(channel)))
                answered = True
            except grpc.aio.AioRpcError as error:
                if not is_unreachable(error.code()):
                    raise
                failed = error
        if failed and not answered:
            raise failed
        if failed:
            reason = command_error(from_error(failed)).message
            note(f"a replica of the contention service is unreachable, so its nodes are missing: {reason}")
        return answers

    async def _contention_replicas(self) -> list[Channel]:
        """Return a channel to each replica of contention, through the entry if its addresses were not given."""
        if self.is_given("contention"):
            return [self._connected(address, called) for address, called in replicas_of(self._address("contention"))]
        entry = self._channel("contention")
        try:
            answer = await self.process_stub(*self.entries()[0][:2]).GetProcess(GetProcessRequest())
        except grpc.aio.AioRpcError:
            return [entry]  # the call itself reports what is wrong
        found = [endpoint.address for endpoint in answer.endpoints if endpoint.service == "contention"]
        return [entry.to(address) for address in found] if len(found) > 1 else [entry]

    def is_given(self, service: str) -> bool:
        """Return whether a service has an address of its own: not that of all services, which may route its calls."""
        given = asdict(self._access.endpoints)
        return bool(given[service]) and len(set(given.values())) > 1

    def entries(self) -> list[tuple[str, str, list[str]]]:
        """Return each known address, the name of its certificate, and the services for which it was given."""
        found: dict[tuple[str, str], list[str]] = {}
        for service, endpoint in asdict(self._access.endpoints).items():
            for entry in replicas_of(endpoint):
                found.setdefault(entry, []).append(service)
        return [(address, called, services) for (address, called), services in found.items()]

    def process_stub(self, address: str, called: str = "", to: str = "") -> ProcessServiceAsyncStub:
        """Return the replica stub of the process at an address, or of the process to which it passes calls."""
        channel = self._connected(address, called)
        return cast("ProcessServiceAsyncStub", ProcessServiceStub(channel.to(to) if to else channel))

    def policies(self) -> dict[str, PolicyServiceAsyncStub]:
        """Return a policy stub for each service, one for each address that was given to several of them alone."""
        channels: dict[str, Channel] = {}
        firsts: set[str] = set()
        for service, address in asdict(self._access.endpoints).items():
            if not self.is_given(service):
                channels[service] = self._channel(service).to(service)
            elif address not in firsts:
                firsts.add(address)
                channels[service] = self._channel(service)
        return {
            service: cast("PolicyServiceAsyncStub", PolicyServiceStub(channel)) for service, channel in channels.items()
        }

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files that the connections use."""
        return self._access.tls

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
        for channel in channels.values():
            await channel.close()

    def _address(self, service: str) -> str:
        """Return the address of a service; without one, any address, where the process routes the service's calls."""
        known: dict[str, str] = asdict(self._access.endpoints)
        return known[service] or next(address for address in known.values() if address)

    def _channel(self, service: str) -> Channel:
        return self._connected(self._address(service))

    def _connected(self, address: str, called: str = "") -> Channel:
        if address not in self._channels:
            self._channels[address] = connect(address, self._access.token, tls=self._access.tls, called=called)
        return self._channels[address]


def access_of(flags: Flags) -> Access:
    """Return the address and credentials of the mesh.

    Raises:
        NoAccess: no option, variable or file names the mesh.
    """
    state_dir = expand_home(flags.state_dir, "--state-dir") if flags.state_dir else None
    tls = flags.tls_ca, flags.tls_cert, flags.tls_key
    return find(state_dir, os.environ, endpoint=flags.endpoint, token=flags.token, tls=tls)


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


def with_mesh(flags: Flags, work: Callable[[Mesh], Awaitable[T]]) -> T:
    """Run `work` with a connection to the mesh and return its result.

    Raises:
        CommandError: the mesh is unreachable or refused a call.
    """

    async def session() -> T:
        async with open_mesh(flags) as mesh:
            done = await work(mesh)
            if mesh.tls:
                _warn_of_expiry(mesh.tls)
            return done

    try:
        return asyncio.run(session())
    except AccessError as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except BadTls as error:
        raise usage_error(str(error)) from None
    except grpc.aio.AioRpcError as error:
        raise command_error(from_error(error)) from error


def _warn_of_expiry(tls: TlsFiles) -> None:
    """Print a note if the caller's certificate expires within a week."""
    now, validity = datetime.now(UTC), load(tls).validity
    if validity and validity.is_due(now) and validity.ends - now < CERTIFICATE_NOTICE:
        note(f"your certificate {tls.cert} {validity.in_words(now)}; ask its issuer for a new one")


def command_error(problem: Problem) -> CommandError:
    """Return a service's error as a CommandError with the matching exit code."""
    plain = problem.reason in (problem.code.name, "") or problem.reason.endswith("_NOT_FOUND")
    message = problem.message if plain else f"{problem.reason}: {problem.message}"
    details = [f"{violation.field}: {violation.description}".lstrip(": ") for violation in problem.violations]
    if details:
        message = "invalid request"
    return CommandError(message, hint=_hint(problem), details=details, code=exit_code(problem.code))


def is_unreachable(code: grpc.StatusCode) -> bool:
    """Return whether a status means that the service did not answer."""
    return code in _AWAY


def exit_code(code: grpc.StatusCode) -> ExitCode:
    """Return the exit code for a gRPC status."""
    if is_unreachable(code):
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if code in _BAD_INPUT else ExitCode.FAILED


def _hint(problem: Problem) -> str:
    if remedy := problem.metadata.get("remedy"):
        return remedy
    if is_unreachable(problem.code) and problem.reason == problem.code.name:
        return "check that the mesh is running: start one with `cotenant up`, or set --endpoint or COTENANT_ENDPOINT"
    if problem.retry_after_seconds is not None:
        return f"try again in {problem.retry_after_seconds:g} s"
    if problem.code is Code.ABORTED:
        return "it was changed concurrently; try again"
    return ""
