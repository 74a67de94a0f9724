"""`cotenant replicas`: the processes of each service and their leaders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.condition_views import EMPTY_PROCESS_VIEW, process_view
from cotenant.cli.connection import Mesh, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.render import Column, print_table
from cotenant.codec.errors import from_error
from cotenant.v1.replica_service_pb2 import (
    ListReplicasRequest,
    ListReplicasResponse,
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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replicas")(replicas)


def replicas(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the processes of each service with their state, leadership term and release.

    REVISION is the store revision up to which a follower has replicated the leader's writes. Only known addresses are
    asked, so list all of them: `--endpoint 'queue=a:7070|b:7070,…'`.

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


async def look(mesh: Mesh) -> MeshReport:
    """Return the reports of all processes, at every address of every service.

    Raises:
        AioRpcError: a process refused the call.
    """
    known = mesh.replicas()
    answers = await asyncio.gather(*(_asked(stub) for _, _, stub in known), return_exceptions=True)
    processes: dict[tuple[str, str], views.View] = {}
    members: list[tuple[str, StoreMember]] = []
    capacities: list[StoreCapacity] = []
    trusts: dict[str, views.View] = {}
    for (service, address, _), outcome in zip(known, answers, strict=True):
        if isinstance(outcome, tuple):
            answer, asked, answered = outcome
            parts = {one.service: _view(one) for one in answer.replicas} or {service: _serving(service, address)}
            processes |= {(name, address): part | _process(answer, asked, answered) for name, part in parts.items()}
            members += [(address, one) for one in answer.store_members]
            capacities += [answer.store_capacity] if answer.HasField("store_capacity") else []
            if answer.HasField("store_trust"):
                trusts[address] = trust_view(address, answer.store_trust)
        elif isinstance(outcome, grpc.aio.AioRpcError):
            processes.setdefault((service, address), _missing(service, address, outcome))
        else:
            raise outcome
    return MeshReport(
        [view for _, view in sorted(processes.items())],
        _merged(members),
        list(trusts.values()),
        _fullest_store(capacities),
    )


async def _asked(stub: Any) -> tuple[ListReplicasResponse, float, float]:
    """Return a process's answer with the local wall-clock times of request and response."""
    asked, begin = time.time(), time.monotonic()
    answer = await stub.ListReplicas(ListReplicasRequest(), timeout=ANSWER_SECONDS_MAX)
    return answer, asked, asked + time.monotonic() - begin


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


def _process(answer: ListReplicasResponse, asked: float, answered: float) -> views.View:
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
