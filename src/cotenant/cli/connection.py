"""The line between a command and the mesh: find it, call it, and put what it refuses into a user's words."""

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
from cotenant.cli.outcome import CommandError, ExitCode, note, usage
from cotenant.codec.errors import Problem, from_error
from cotenant.rpc.access import Access, NoAccess, at_home, find
from cotenant.rpc.channel import connect, replicas_of
from cotenant.rpc.endpoints import SERVICES
from cotenant.security.grpc_tls import BadTls, TlsFiles, load
from cotenant.v1.contention_service_pb2_grpc import ContentionServiceStub
from cotenant.v1.job_service_pb2_grpc import JobServiceStub
from cotenant.v1.node_service_pb2_grpc import NodeServiceStub
from cotenant.v1.policy_service_pb2_grpc import PolicyServiceStub
from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceStub
from cotenant.v1.replica_service_pb2_grpc import ReplicaServiceStub
from cotenant.v1.tenant_service_pb2_grpc import TenantServiceStub

if TYPE_CHECKING:  # these names are the type checker's alone
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub
    from cotenant.v1.job_service_pb2_grpc import JobServiceAsyncStub
    from cotenant.v1.node_service_pb2_grpc import NodeServiceAsyncStub
    from cotenant.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub
    from cotenant.v1.replica_service_pb2_grpc import ReplicaServiceAsyncStub
    from cotenant.v1.tenant_service_pb2_grpc import TenantServiceAsyncStub

T = TypeVar("T")
Code = grpc.StatusCode

TOLD_BEFORE = timedelta(days=7)  # so long before its end every command tells of the caller's own certificate
_AWAY = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
_BAD_INPUT = frozenset(
    {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.OUT_OF_RANGE, Code.ALREADY_EXISTS, Code.UNAUTHENTICATED}
)


class Mesh:
    """Stubs of the services, over one channel per address."""

    def __init__(self, find: Callable[[], Access]) -> None:
        self._find = find
        self._access = find()
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def jobs(self) -> JobServiceAsyncStub:
        """The queue's API for jobs."""
        return cast("JobServiceAsyncStub", JobServiceStub(self._channel("queue")))

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
        """The predictor's estimates."""
        return cast("PredictorServiceAsyncStub", PredictorServiceStub(self._channel("predictor")))

    async def of_each_contention(self, ask: Callable[[ContentionServiceAsyncStub], Awaitable[Sequence[T]]]) -> list[T]:
        """Ask all replicas of contention, each of which knows of its own nodes; tells of those that are away.

        Raises:
            AioRpcError: one refused, or all are away.
        """
        told_by: list[T] = []
        failed: grpc.aio.AioRpcError | None = None
        answered = False
        for address, called in replicas_of(self._address("contention")):
            stub = cast("ContentionServiceAsyncStub", ContentionServiceStub(self._connected(address, called)))
            try:
                told_by += await ask(stub)
                answered = True
            except grpc.aio.AioRpcError as error:
                if not away(error.code()):
                    raise
                failed = error
        if failed and not answered:
            raise failed
        if failed:
            note(f"a replica of contention is away, so its nodes are missing: {told(from_error(failed)).message}")
        return told_by

    def replicas(self) -> list[tuple[str, str, ReplicaServiceAsyncStub]]:
        """Every service at each of its addresses, with who tells of the process there."""
        return [
            (service, address, cast("ReplicaServiceAsyncStub", ReplicaServiceStub(self._connected(address, called))))
            for service in SERVICES
            for address, called in replicas_of(getattr(self._access.endpoints, service))
        ]

    def policies(self) -> dict[str, PolicyServiceAsyncStub]:
        """Each service's list of policies, by the first service at each address."""
        firsts: dict[str, str] = {}
        for service, address in asdict(self._access.endpoints).items():
            if address:
                firsts.setdefault(address, service)
        return {
            service: cast("PolicyServiceAsyncStub", PolicyServiceStub(self._channel(service)))
            for service in firsts.values()
        }

    @property
    def tls(self) -> TlsFiles | None:
        """The certificates that it is reached with."""
        return self._access.tls

    async def find_again(self) -> None:
        """Look where the mesh is now: one that was started again may have another port."""
        try:
            access = self._find()
        except NoAccess:
            return  # it has not been started again yet
        if access != self._access:
            await self.close()
            self._access = access

    async def close(self) -> None:
        """Hang up."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _address(self, service: str) -> str:
        address: str = getattr(self._access.endpoints, service)
        if not address:
            raise NoAccess(f"it is not known where {service} is; name it in --endpoint {service}=HOST:PORT")
        return address

    def _channel(self, service: str) -> grpc.aio.Channel:
        return self._connected(self._address(service))

    def _connected(self, address: str, called: str = "") -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = connect(address, self._access.token, tls=self._access.tls, called=called)
        return self._channels[address]


def access_of(flags: Flags) -> Access:
    """Find out where the mesh is.

    Raises:
        NoAccess: nothing tells.
    """
    state_dir = at_home(flags.state_dir, "--state-dir") if flags.state_dir else None
    tls = flags.tls_ca, flags.tls_cert, flags.tls_key
    return find(state_dir, os.environ, endpoint=flags.endpoint, token=flags.token, tls=tls)


@asynccontextmanager
async def opened(flags: Flags) -> AsyncIterator[Mesh]:
    """Find the mesh, and hang up at the end.

    Raises:
        NoAccess: it is not known where the mesh is.
    """
    mesh = Mesh(lambda: access_of(flags))
    try:
        yield mesh
    finally:
        await mesh.close()


def reach(flags: Flags, work: Callable[[Mesh], Awaitable[T]]) -> T:
    """Do something with the mesh.

    Raises:
        CommandError: the mesh cannot be reached, or refused.
    """

    async def session() -> T:
        async with opened(flags) as mesh:
            done = await work(mesh)
            if mesh.tls:
                _tell_of_end(mesh.tls)
            return done

    try:
        return asyncio.run(session())
    except NoAccess as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except BadTls as error:
        raise usage(str(error)) from None
    except grpc.aio.AioRpcError as error:
        raise told(from_error(error)) from error


def _tell_of_end(tls: TlsFiles) -> None:
    """Say that the caller's own certificate runs out, in its last week."""
    now, validity = datetime.now(UTC), load(tls).validity
    if validity and validity.is_due(now) and validity.ends - now < TOLD_BEFORE:
        note(f"your certificate {tls.cert} {validity.in_words(now)}; ask who issued it for a new one")


def told(problem: Problem) -> CommandError:
    """Put what a service answered into a user's words, with the exit code that fits."""
    plain = problem.reason in (problem.code.name, "") or problem.reason.endswith("_NOT_FOUND")
    message = problem.message if plain else f"{problem.reason}: {problem.message}"
    details = [f"{violation.field}: {violation.description}".lstrip(": ") for violation in problem.violations]
    if details:
        message = "this cannot be taken as it is"
    return CommandError(message, hint=_hint(problem), details=details, code=exit_code(problem.code))


def away(code: grpc.StatusCode) -> bool:
    """Tell whether a status means that nobody answered."""
    return code in _AWAY


def exit_code(code: grpc.StatusCode) -> ExitCode:
    """Sort a status into the exit codes that scripts tell apart."""
    if away(code):
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if code in _BAD_INPUT else ExitCode.FAILED


def _hint(problem: Problem) -> str:
    if remedy := problem.metadata.get("remedy"):
        return remedy
    if away(problem.code) and problem.reason == problem.code.name:
        return "is the mesh up? `cotenant up` starts one here; --endpoint or COTENANT_ENDPOINT names another"
    if problem.retry_after_seconds is not None:
        return f"try again in {problem.retry_after_seconds:g} s"
    if problem.code is Code.ABORTED:
        return "it changed meanwhile; try again"
    return ""
