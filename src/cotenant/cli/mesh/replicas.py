"""`cotenant replicas`: the processes of each service and their leaders."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.condition_views import EMPTY_PROCESS_VIEW, process_view
from cotenant.cli.connection import Mesh, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.render import Column, print_table
from cotenant.codec.errors import from_error
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.endpoints import SERVICES
from cotenant.v1.process_service_pb2 import (
    GetProcessRequest,
    GetProcessResponse,
    Replica,
    StoreCapacity,
    StoreMember,
    StoreTrust,
)

COLUMNS = (
    Column("SERVICE"),
    Column("ADDRESS", elastic=True),
    Column("STATE", styled=True),
    Column("TERM", right=True),
    Column("REVISION", right=True),
    Column("RELEASE"),
    Column("LEADER / PROBLEM", elastic=True),
)
ANSWER_SECONDS_MAX = 5.0  # per process: a slow process must not delay the list


@dataclass(frozen=True, slots=True)
class MeshReport:
    """Reports of all processes about themselves and about their store."""

    processes: list[views.View]
    members: list[views.View]
    trusts: list[views.View]  # each process's view of the store's identity
    capacity: views.View | None = None  # of the store
    unknown: Sequence[str] = ()  # services whose address no process that was asked knows


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replicas")(replicas)


def replicas(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the processes of each service with their state, leadership term and release.

    REVISION is the store revision up to which a follower has replicated the leader's writes. One address is enough:
    its process asks the others that it knows. With an address for each service, as in
    `--endpoint 'queue=a:7070|b:7070,…'`, each process is asked itself, and found even if the others do not know it.

    \b
    Examples:
      cotenant replicas
      cotenant --endpoint 'queue=a:7070|b:7070' replicas --json
    """
    found = with_mesh(Flags.of(context), look).processes
    if as_json:
        views.print_json(found)
        return
    print_table(COLUMNS, [_row(view) for view in found], nothing="no replicas")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A process that is asked: its address, the services expected there, and the address that passes the call on."""

    address: str
    called: str  # the name of its certificate, if that is another
    services: Sequence[str]
    through: str = ""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A process's answer with the local wall-clock times of request and response."""

    asked: _Asked
    answer: GetProcessResponse
    begin: float
    end: float


_Outcome = _Answered | tuple[_Asked, grpc.aio.AioRpcError]


async def look(mesh: Mesh) -> MeshReport:
    """Return the reports of all processes: at every given address, and at those that these processes know.

    Raises:
        AioRpcError: a process refused the call.
    """
    given = [_Asked(address, called, services) for address, called, services in mesh.entries()]
    outcomes = await asyncio.gather(*(_ask(mesh, one) for one in given))
    known = [one for one in outcomes if isinstance(one, _Answered)]
    others = _others(mesh, known)
    outcomes += await asyncio.gather(*(_ask(mesh, one) for one in others))
    return _report(outcomes)


def _others(mesh: Mesh, known: Sequence[_Answered]) -> list[_Asked]:
    """Return the processes of services without an address of their own, as the known processes know them."""
    found: dict[str, _Asked] = {}
    for one in known:
        for endpoint in one.answer.endpoints:
            if not mesh.is_given(endpoint.service):
                through = one.asked
                found.setdefault(
                    f"{endpoint.service} {endpoint.address}",
                    _Asked(endpoint.address, through.called, [endpoint.service], through.address),
                )
    return list(found.values())


async def _ask(mesh: Mesh, asked: _Asked) -> _Outcome:
    """Return a process's answer, or why there is none."""
    direct = mesh.process_stub(asked.address, asked.called)
    stub = mesh.process_stub(asked.through, asked.called, asked.address) if asked.through else direct
    begin, clock = time.time(), time.monotonic()
    try:
        answer = await stub.GetProcess(GetProcessRequest(), timeout=ANSWER_SECONDS_MAX)
    except grpc.aio.AioRpcError as error:
        return asked, error
    return _Answered(asked, answer, begin, begin + time.monotonic() - clock)


def _report(outcomes: Sequence[_Outcome]) -> MeshReport:
    """Return the answers as one report; a process that several addresses reach counts once."""
    processes: dict[tuple[str, str], views.View] = {}
    members: list[tuple[str, StoreMember]] = []
    capacities: list[StoreCapacity] = []
    trusts: dict[str, views.View] = {}
    seen: set[str] = set()
    for outcome in outcomes:
        if not isinstance(outcome, _Answered):
            asked, error = outcome
            for service in asked.services:
                processes.setdefault((service, asked.address), _missing(service, asked.address, error))
            continue
        answer, address = outcome.answer, outcome.asked.address
        if answer.process.id and answer.process.id in seen:
            continue
        seen.add(answer.process.id)
        own = answer.process.services or ([] if answer.replicas else outcome.asked.services)
        parts = {name: _serving(name, address) for name in own} | {one.service: _view(one) for one in answer.replicas}
        process = _process(answer, outcome.begin, outcome.end)
        processes |= {(name, address): part | process for name, part in parts.items()}
        members += [(address, one) for one in answer.store_members]
        capacities += [answer.store_capacity] if answer.HasField("store_capacity") else []
        if answer.HasField("store_trust"):
            trusts[address] = trust_view(address, answer.store_trust)
    return MeshReport(
        [view for _, view in sorted(processes.items())],
        _merged(members),
        list(trusts.values()),
        _fullest_store(capacities),
        _unknown(outcomes, {service for service, _ in processes}),
    )


def _unknown(outcomes: Sequence[_Outcome], found: Collection[str]) -> list[str]:
    """Return the services that nobody knows; none if a process of an older release does not say what it serves."""
    answers = [one.answer for one in outcomes if isinstance(one, _Answered)]
    if not answers or not all(answer.process.services for answer in answers):
        return []
    return [service for service in SERVICES if service not in found]


def _fullest_store(capacities: Sequence[StoreCapacity]) -> views.View | None:
    """Return the capacity of the fullest store: processes may have separate stores."""
    if not capacities:
        return None
    one = max(capacities, key=lambda one: (bool(one.problem), one.size_bytes / max(1, one.limit_bytes)))
    return {
        "size_bytes": one.size_bytes,
        "in_use_bytes": one.in_use_bytes,
        "limit_bytes": one.limit_bytes,
        "admits_below_bytes": one.admits_below_bytes,
        "problem": one.problem or None,
        "remedy": one.remedy or None,
        "commands": list(one.commands),
    }


def trust_view(address: str, trust: StoreTrust) -> views.View:
    """Return a process's view of the store's identity, as `--json` prints it."""
    return {
        "address": address,
        "store_id": trust.store_id,
        "generation": trust.generation,
        "revision": trust.revision,
        "reason": trust.reason or None,
        "problem": trust.problem or None,
        "remedy": trust.remedy or None,
        "witnesses": [
            {
                "name": one.name,
                "store_id": one.store_id,
                "generation": one.generation or None,
                "revision": one.revision or None,
            }
            for one in trust.witnesses
        ],
    }


def _view(replica: Replica) -> views.View:
    follows = "follows" if replica.leader_address else "waits"
    return {
        "service": replica.service,
        "address": replica.address,
        "state": "leads" if replica.leads else follows,
        "term": replica.term or None,
        "revision": replica.revision or None,
        "leader": replica.leader_address or None,
        "problem": None,
    }


def _serving(service: str, address: str, state: str = "serves", problem: str | None = None) -> views.View:
    """Return the view of a process without elections, or of an address that did not answer."""
    return {
        "service": service,
        "address": address,
        "state": state,
        "term": None,
        "revision": None,
        "leader": None,
        "problem": problem,
        "release": None,
        "start_time": None,
        "certificate": None,
        "problems": [],
        **EMPTY_PROCESS_VIEW,
    }


def _process(answer: GetProcessResponse, asked: float, answered: float) -> views.View:
    """Return the process's own fields; older releases do not report them."""
    return {
        "release": answer.process.version or None,
        "start_time": views.time_of(answer.process, "start_time"),
        "certificate": views.certificate_view(answer.process.certificate),
        "problems": [{"reason": one.reason, "remedy": one.remedy} for one in answer.process.problems],
        **process_view(answer.process, asked, answered),
    }


def _missing(service: str, address: str, error: grpc.aio.AioRpcError) -> views.View:
    """Return the view of an address that did not answer, or of an older process without elections."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return _serving(service, address)
    if not is_unreachable(error.code()):
        raise error
    return _serving(service, address, "away", command_error(from_error(error)).message)


def _merged(capacities: Sequence[tuple[str, StoreMember]]) -> list[views.View]:
    """Return reports merged by endpoint: a member that any process reaches is up; processes that cannot are named."""
    by_endpoint: dict[str, list[tuple[str, StoreMember]]] = {}
    for reporter, one in capacities:
        by_endpoint.setdefault(one.endpoint, []).append((reporter, one))
    found = []
    for endpoint, reports in sorted(by_endpoint.items()):
        healthy = [one for _, one in reports if not one.problem]
        unhealthy = sorted(reporter for reporter, one in reports if one.problem)
        best = (healthy or sorted((one for _, one in reports), key=lambda one: not one.version))[0]
        problem = (
            best.problem
            if not healthy
            else f"unreachable for {', '.join(dict.fromkeys(unhealthy))}"
            if unhealthy
            else ""
        )
        found.append(
            {
                "endpoint": endpoint,
                "leads": best.leads,
                "problem": problem or None,
                "release": best.version or None,
                "size_bytes": best.size_bytes or None,
            }
        )
    return found


def _row(view: views.View) -> list[str]:
    return [
        view["service"],
        view["address"],
        view["state"],
        str(view["term"] or "-"),
        str(view["revision"] or "-"),
        view["release"] or "-",
        view["leader"] or view["problem"] or "-",
    ]
