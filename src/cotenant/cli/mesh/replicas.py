"""`cotenant replicas`: which processes there are of each service, and which of them leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.condition_views import NOTHING_TOLD, process_view
from cotenant.cli.connection import Mesh, away, reach, told
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
    Column("SEEN", right=True),
    Column("RELEASE"),
    Column("LEADER, OR WHAT IS WRONG", elastic=True),
)
ANSWER_SECONDS_MAX = 5.0  # for one process; whoever looks wants to see the others soon


@dataclass(frozen=True, slots=True)
class Told:
    """What all processes told: of themselves, and of the members of their store."""

    processes: list[views.View]
    members: list[views.View]
    trusts: list[views.View]  # what each process knows of the store
    capacity: views.View | None = None  # of the store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replicas")(replicas)


def replicas(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the processes of each service, which of them leads, since which term, and which release each runs.

    Of one that follows, SEEN is the store's revision up to which it knows what the leader has written. It asks every
    address that it knows of, so name all of them: `--endpoint 'queue=a:7070|b:7070,…'`.

    \b
    Examples:
      cotenant replicas
      cotenant --endpoint 'queue=a:7070|b:7070' replicas --json
    """
    found = reach(Flags.of(context), look).processes
    if as_json:
        views.print_json(found)
        return
    print_table(COLUMNS, [_row(view) for view in found], nothing="no replicas")


async def look(mesh: Mesh) -> Told:
    """Ask every address of every service.

    Raises:
        AioRpcError: one refused to tell.
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
    return Told(
        [view for _, view in sorted(processes.items())], _merged(members), list(trusts.values()), _fullest(capacities)
    )


async def _asked(stub: Any) -> tuple[ListReplicasResponse, float, float]:
    """Return a process's answer, and when it was asked and had answered, by this machine's wall clock."""
    asked, begin = time.time(), time.monotonic()
    answer = await stub.ListReplicas(ListReplicasRequest(), timeout=ANSWER_SECONDS_MAX)
    return answer, asked, asked + time.monotonic() - begin


def _fullest(told_of: Sequence[StoreCapacity]) -> views.View | None:
    """Return what is told of the store that has the least space: processes may have stores of their own."""
    if not told_of:
        return None
    one = max(told_of, key=lambda one: (bool(one.problem), one.size_bytes / max(1, one.limit_bytes)))
    return {
        "size_bytes": one.size_bytes,
        "in_use_bytes": one.in_use_bytes,
        "limit_bytes": one.limit_bytes,
        "admits_below_bytes": one.admits_below_bytes,
        "problem": one.problem or None,
        "remedy": one.remedy or None,
        "commands": list(one.commands),
    }


def trust_view(address: str, told: StoreTrust) -> views.View:
    """Return what a process knows of the store, as `--json` prints it."""
    return {
        "address": address,
        "store_id": told.store_id,
        "generation": told.generation,
        "revision": told.revision,
        "reason": told.reason or None,
        "problem": told.problem or None,
        "remedy": told.remedy or None,
        "witnesses": [
            {
                "name": one.name,
                "store_id": one.store_id,
                "generation": one.generation or None,
                "revision": one.revision or None,
            }
            for one in told.witnesses
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
    """Tell of a process that elects nobody, or of an address that did not answer."""
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
        **NOTHING_TOLD,
    }


def _process(answer: ListReplicasResponse, asked: float, answered: float) -> views.View:
    """Tell of the process itself; one of an older release says nothing of it."""
    return {
        "release": answer.process.version or None,
        "start_time": views.time_of(answer.process, "start_time"),
        "certificate": views.certificate_view(answer.process.certificate),
        "problems": [{"reason": one.reason, "remedy": one.remedy} for one in answer.process.problems],
        **process_view(answer.process, asked, answered),
    }


def _missing(service: str, address: str, error: grpc.aio.AioRpcError) -> views.View:
    """Tell of an address that did not answer, or of an older process that elects nobody."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return _serving(service, address)
    if not away(error.code()):
        raise error
    return _serving(service, address, "away", told(from_error(error)).message)


def _merged(told_of: Sequence[tuple[str, StoreMember]]) -> list[views.View]:
    """Take members of one endpoint together: one that any process can use is there, and who cannot is named."""
    by_endpoint: dict[str, list[tuple[str, StoreMember]]] = {}
    for teller, one in told_of:
        by_endpoint.setdefault(one.endpoint, []).append((teller, one))
    found = []
    for endpoint, tellings in sorted(by_endpoint.items()):
        well = [one for _, one in tellings if not one.problem]
        ill = sorted(teller for teller, one in tellings if one.problem)
        best = (well or sorted((one for _, one in tellings), key=lambda one: not one.version))[0]
        problem = best.problem if not well else f"not for {', '.join(dict.fromkeys(ill))}" if ill else ""
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
