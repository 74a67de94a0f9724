"""`cotenant replicas`: which processes there are of each service, and which of them leads."""

from __future__ import annotations

import asyncio

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.flags import Flags
from cotenant.cli.mesh import Mesh, reach, told
from cotenant.cli.render import Column, print_table
from cotenant.rpc.errors import from_error
from cotenant.v1.replica_service_pb2 import ListReplicasRequest, Replica

COLUMNS = (
    Column("SERVICE"),
    Column("ADDRESS", elastic=True),
    Column("STATE"),
    Column("TERM", right=True),
    Column("REVISION SEEN", right=True),
    Column("LEADER, OR WHAT IS WRONG", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replicas")(replicas)


def replicas(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the processes of each service, which of them leads, and since which term.

    It asks every address that it knows of, so name all of them: `--endpoint 'queue=a:7070|b:7070,…'`.

    \b
    Examples:
      cotenant replicas
      cotenant --endpoint 'queue=a:7070|b:7070' replicas --json
    """
    found = reach(Flags.of(context), _asked)
    if as_json:
        views.print_json(found)
        return
    print_table(COLUMNS, [_row(view) for view in found], nothing="no replicas")


async def _asked(mesh: Mesh) -> list[views.View]:
    """Ask every address of every service."""
    known = mesh.replicas()
    answers = await asyncio.gather(
        *(stub.ListReplicas(ListReplicasRequest()) for _, _, stub in known), return_exceptions=True
    )
    views_by_place: dict[tuple[str, str], views.View] = {}
    for (service, address, _), answer in zip(known, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            views_by_place.setdefault((service, address), _missing(service, address, answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            views_by_place |= {(one.service, address): _view(one) for one in answer.replicas}
    return [view for _, view in sorted(views_by_place.items())]


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


def _missing(service: str, address: str, error: grpc.aio.AioRpcError) -> views.View:
    """Tell of an address that did not answer, or of a process that elects nobody."""
    alone = error.code() is grpc.StatusCode.UNIMPLEMENTED
    return {
        "service": service,
        "address": address,
        "state": "serves" if alone else "away",
        "term": None,
        "revision": None,
        "leader": None,
        "problem": None if alone else told(from_error(error)).message,
    }


def _row(view: views.View) -> list[str]:
    return [
        view["service"],
        view["address"],
        view["state"],
        str(view["term"] or "-"),
        str(view["revision"] or "-"),
        view["leader"] or view["problem"] or "-",
    ]
