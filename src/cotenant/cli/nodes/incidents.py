"""`cotenant incidents`: contention incidents with victim, suspect, actions and outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import find_job, find_node
from cotenant.cli.outcome import sanitize
from cotenant.cli.render import Column, console, plain_lines, print_table, styled
from cotenant.cli.stream_retry import StreamRetry
from cotenant.codec.specs import seconds
from cotenant.deferred import asyncio, grpc
from cotenant.v1.contention_service_pb2 import Incident, ListIncidentsRequest

if TYPE_CHECKING:
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub

LIMIT_DEFAULT = 50
PAGE_SIZE_MAX = 1000
POLL_SECONDS = 2.0

COLUMNS = (
    Column("STARTED", right=True),
    Column("DURATION", right=True),
    Column("NODE"),
    Column("VICTIM"),
    Column("SUSPECT"),
    Column("SLOWDOWN", right=True),
    Column("RECOVERED", right=True),
    Column("OUTCOME / LAST ACTION", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("incidents")(incidents)


def incidents(
    context: typer.Context,
    node: Annotated[
        str, typer.Option(metavar="NODE", help="Only incidents on this node.", autocompletion=options.complete_node)
    ] = "",
    job: Annotated[
        str,
        typer.Option(
            metavar="ID", help="Only incidents with this job as victim or suspect.", autocompletion=options.complete_job
        ),
    ] = "",
    only_open: Annotated[bool, typer.Option("--open", help="Only open incidents.")] = False,
    actions: Annotated[bool, typer.Option("--actions", help="Show every action on its own line.")] = False,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Show at most N incidents, newest first.")
    ] = LIMIT_DEFAULT,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing incidents as they change.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List contention incidents, newest first: victim, suspect, actions taken and their outcome.

    The contention service keeps the last 1,000 incidents in memory; a restart discards them.

    \b
    Examples:
      cotenant incidents --open
      cotenant incidents --job ID --actions
      cotenant incidents --node gpu-7 --watch
    """
    flags = Flags.of(context)
    wanted = ListIncidentsRequest(node_id=node, job_id=job, open_only=only_open)
    if watch:
        with suppress(KeyboardInterrupt):  # Ctrl-C ends watching
            with_mesh(flags, lambda mesh: _watch(mesh, wanted, limit, as_json))
        return
    found = with_mesh(flags, lambda mesh: recent_incidents(mesh, wanted, limit))
    now = time.time()
    if as_json:
        views.print_json([incident_view(one, now) for one in found])
    elif actions:
        print("\n\n".join("\n".join(_story(one, now)) for one in found) or "no incidents")
    else:
        print_table(COLUMNS, [_row(incident_view(one, now)) for one in found], nothing="no incidents")


async def recent_incidents(mesh: Mesh, wanted: ListIncidentsRequest, limit: int) -> list[Incident]:
    """Return matching incidents up to the limit, with the node and job resolved to full ids."""
    request = ListIncidentsRequest()
    request.CopyFrom(wanted)
    if wanted.node_id:
        request.node_id = (await find_node(mesh, wanted.node_id)).id
    if wanted.job_id:
        request.job_id = (await find_job(mesh, wanted.job_id)).id
    found = await mesh.call_contention_replicas(lambda contention: _listed(contention, request, limit))
    return sorted(found, key=lambda one: seconds(one.start_time), reverse=True)[:limit]


async def _listed(contention: ContentionServiceAsyncStub, wanted: ListIncidentsRequest, limit: int) -> list[Incident]:
    request = ListIncidentsRequest()
    request.CopyFrom(wanted)
    found: list[Incident] = []
    while len(found) < limit:
        request.page_size = min(PAGE_SIZE_MAX, limit - len(found))
        page = await contention.ListIncidents(request)
        found += page.incidents
        request.page_token = page.next_page_token
        if not page.next_page_token:
            break
    return found


def incident_view(incident: Incident, now: float) -> views.View:
    """Return everything known about an incident."""
    over = incident.HasField("end_time")
    began = seconds(incident.start_time)
    return {
        "id": incident.id,
        "node": incident.node_id,
        "victim": incident.victim_job_id or None,
        "suspect": incident.suspect_job_id,
        "open": not over,
        "start_time": views.time_of(incident, "start_time"),
        "end_time": views.time_of(incident, "end_time"),
        "began_seconds_ago": max(0.0, now - began),
        "seconds": max(0.0, (seconds(incident.end_time) if over else now) - began),
        "slowdown": incident.slowdown,
        "recovered": incident.recovered or None,
        "actions": list(incident.actions),
        "outcome": incident.outcome or None,
    }


def _row(view: views.View) -> list[str]:
    last = view["actions"][-1] if view["actions"] else ""
    return [
        f"{units.short_seconds(view['began_seconds_ago'])} ago",
        units.short_seconds(view["seconds"]) + ("…" if view["open"] else ""),
        view["node"],
        view["victim"] or "-",
        view["suspect"],
        f"{view['slowdown']:.0%}" if view["slowdown"] else "-",
        "-" if view["recovered"] is None else f"{view['recovered']:.0%}",
        view["outcome"] or last,
    ]


def _story(incident: Incident, now: float) -> list[str]:
    """Return an incident as lines: a headline, the actions, the outcome."""
    view = incident_view(incident, now)
    victim = f"{view['victim']} was slowed by {view['slowdown']:.0%}, " if view["victim"] else ""
    head = f"{view['start_time']} {view['node']}: {victim}{view['suspect']} throttled"
    rest = [*view["actions"], view["outcome"] or "still open"]
    return [sanitize(head), *(f"  {sanitize(line)}" for line in rest)]


async def _watch(mesh: Mesh, wanted: ListIncidentsRequest, limit: int, as_json: bool) -> None:
    """Poll incidents: a table updated in place on a terminal, otherwise one line per change."""
    known: dict[str, bytes] = {}
    retry = StreamRetry(mesh, "lost the connection to the contention service")
    if sys.stdout.isatty() and not as_json:
        await _watch_live(mesh, wanted, limit, retry)
        return
    while True:
        try:
            found = await recent_incidents(mesh, wanted, limit)
        except grpc.aio.AioRpcError as error:
            await retry.wait(error)
            continue
        retry.reset()
        fresh = [one for one in reversed(found) if known.get(one.id) != one.SerializeToString(deterministic=True)]
        known = {one.id: one.SerializeToString(deterministic=True) for one in found}
        _print_changes(fresh, as_json)
        await asyncio.sleep(POLL_SECONDS)


def _print_changes(fresh: Sequence[Incident], as_json: bool) -> None:
    now = time.time()
    for one in fresh:
        view = incident_view(one, now)
        if as_json:
            views.print_json_line(view)
        else:
            print(plain_lines(COLUMNS, [[sanitize(cell) for cell in _row(view)]])[1], flush=True)


async def _watch_live(mesh: Mesh, wanted: ListIncidentsRequest, limit: int, retry: StreamRetry) -> None:
    from rich.live import Live

    out = console()
    with Live(console=out, auto_refresh=False) as live:
        while True:
            try:
                found = await recent_incidents(mesh, wanted, limit)
            except grpc.aio.AioRpcError as error:
                await retry.wait(error)
                continue
            retry.reset()
            rows = [[sanitize(cell) for cell in _row(incident_view(one, time.time()))] for one in found]
            live.update(styled(COLUMNS, rows, out.width), refresh=True)
            await asyncio.sleep(POLL_SECONDS)
