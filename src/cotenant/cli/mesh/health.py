"""`cotenant health`: whether the services answer and can do their work; for people and for probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import access_of
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, Exit, ExitCode, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.access import AccessError
from cotenant.rpc.channel import connect, replicas_of, secure
from cotenant.rpc.endpoints import Endpoints
from cotenant.security.grpc_tls import BadTls

SERVING = "serving"
SECONDS = 3.0
COLUMNS = (Column("SERVICE"), Column("ADDRESS"), Column("STATE"), Column("REASON", elastic=True))
# The name of each service in the health protocol. A server that hosts several services answers for each.
SERVICE_NAMES = {
    "queue": "cotenant.v1.JobService",
    "placement": "cotenant.internal.v1.PlacementService",
    "predictor": "cotenant.v1.PredictorService",
    "contention": "cotenant.v1.ContentionService",
}


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one service."""

    service: str
    address: str
    state: str = ""  # serving, not serving, not there, or away
    why: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("health")(health)


def health(
    context: typer.Context,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Check only the server at this address.")] = "",
    alive: Annotated[bool, typer.Option("--alive", help="Check only whether it answers.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check whether each service can do its work; without a reachable store or a leader it cannot.

    The exit code is 0 if all services can, 1 if one cannot, and 3 if one does not answer, so the command serves as a
    probe. One serving replica is enough; replicas that do not serve are listed. `cotenant replicas` shows leaders. Each
    service is checked at its own address: unlike other calls, health checks are not routed.

    \b
    Examples:
      cotenant health
      cotenant health 127.0.0.1:7070
      cotenant health --alive 127.0.0.1:7070    # liveness probe: a restart would not help the store
    """
    found = asyncio.run(_ask(_addresses(Flags.of(context), address)))
    if as_json:
        views.print_json([asdict(one) for one in found])
    else:
        print_table(COLUMNS, [(one.service, one.address, one.state, one.why) for one in found], nothing="no services")
    if any(one.state == "away" for one in found):
        raise Exit(ExitCode.UNREACHABLE)
    if not alive and any(one.state != SERVING for one in found):
        raise Exit(ExitCode.FAILED)


def _addresses(flags: Flags, address: str) -> list[Health]:
    """Return the services to check, with their addresses."""
    try:
        only = Endpoints.parse(address).queue if address else ""
        access = access_of(flags._replace(endpoint=address or flags.endpoint))
        secure(access.tls)
    except (ValueError, BadTls) as error:
        raise usage_error(str(error)) from None
    except AccessError as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    if only:
        return [Health("", only)]
    return [Health(service, where) for service, where in access.endpoints._asdict().items() if where]


async def _ask(wanted: Sequence[Health]) -> list[Health]:
    return await asyncio.gather(*(_check(one) for one in wanted))


async def _check(wanted: Health) -> Health:
    """Return the health of a service as callers see it, with the replicas that do not serve."""
    replicas = replicas_of(wanted.address)
    if len(replicas) < 2:
        return await _check_at(wanted, wanted.address)
    whole, *each = await asyncio.gather(
        _check_at(wanted, wanted.address),
        *(_check_at(Health(wanted.service, address), address, called) for address, called in replicas),
    )
    if whole.state != SERVING:
        return whole
    missing = [f"{one.address} is {one.state}" for one in each if one.state != SERVING]
    return replace(whole, why=", ".join(missing))


async def _check_at(wanted: Health, address: str, called: str = "") -> Health:
    request = HealthCheckRequest(service=SERVICE_NAMES.get(wanted.service, ""))
    try:
        async with connect(address, called=called) as channel:
            answer = await HealthStub(channel).Check(request, timeout=SECONDS)
    except ValueError as error:  # names that cannot be resolved
        return replace(wanted, state="away", why=str(error))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            why = "another service answers at this address; health checks are not routed, `cotenant status` is"
            return replace(wanted, state="not there", why=why)
        return replace(wanted, state="away", why=(error.details() or error.code().name).partition("\n")[0])
    if answer.status == HealthCheckResponse.SERVING:
        return replace(wanted, state=SERVING)
    return replace(wanted, state="not serving", why="cannot work: its store is unreachable or it has no leader")
