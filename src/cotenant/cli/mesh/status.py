"""`cotenant status`: the whole mesh at one look, what is wrong with it, and what helps."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TypeVar

import grpc.aio
import typer

from cotenant.cli import options, units, views
from cotenant.cli.connection import Mesh, access_of, away, reach, told
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.problems import Wrong, certificate_wrong, wrongs
from cotenant.cli.mesh.replicas import look as look_at_processes
from cotenant.cli.mesh.slowness import slow_parts
from cotenant.cli.name_lookup import all_nodes
from cotenant.cli.outcome import ExitCode
from cotenant.cli.render import print_card
from cotenant.cli.views import validity_of
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.refusal import gpus as gpus_in_words
from cotenant.core.model.refusal import plural
from cotenant.rpc.access import NoAccess
from cotenant.rpc.endpoints import SERVICES
from cotenant.security.grpc_tls import load
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest

T = TypeVar("T")
SERVING = frozenset({"leads", "follows", "serves"})
LISTED = tuple(phase for phase in Phase if phase not in ENDED)


@dataclass(frozen=True, slots=True)
class Picture:
    """What one look shows; `nodes` and `jobs` are None where nobody tells of them, which `wrong` says."""

    processes: list[views.View]
    members: list[views.View]
    nodes: list[views.View] | None
    jobs: dict[str, int] | None
    wrong: list[Wrong]
    capacity: views.View | None = None  # of the store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


def status(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Tell how the mesh is: services, store, nodes, jobs, releases and certificates; what is wrong, and what helps.

    The exit code is 0 if nothing is wrong, 1 if something is, and 3 if no service answers. It asks every address that
    it knows of, so name all of them: `--endpoint 'queue=a:7070|b:7070,…'`.

    \b
    Examples:
      cotenant status
      cotenant status --json
    """
    picture = reach(Flags.of(context), look)
    own = _own_certificate(Flags.of(context))
    wrong = [*picture.wrong, *([own] if own else [])]
    if as_json:
        views.print_json(
            {
                "well": not wrong,
                "problems": [asdict(one) for one in wrong],
                "processes": picture.processes,
                "store": picture.members,
                "store_capacity": picture.capacity,
                "nodes": None if picture.nodes is None else Counter(one["state"] for one in picture.nodes),
                "jobs": picture.jobs,
            }
        )
    else:
        print_card([*_card(picture, datetime.now(UTC)), *_problems(wrong)])
    if all(one["state"] == "away" for one in picture.processes):
        raise typer.Exit(ExitCode.UNREACHABLE)
    if wrong:
        raise typer.Exit(ExitCode.FAILED)


async def look(mesh: Mesh) -> Picture:
    """Ask everybody, all at once."""
    processes, nodes, jobs = await asyncio.gather(
        look_at_processes(mesh), _unless_away(_nodes(mesh)), _unless_away(_jobs(mesh))
    )
    wrong = wrongs(
        processes.processes,
        processes.members,
        nodes[0] or [],
        datetime.now(UTC),
        processes.trusts,
        processes.capacity,
    )
    wrong += slow_parts(processes.processes, nodes[0] or [])
    for what, why in (("nodes", nodes[1]), ("jobs", jobs[1])):
        if why:
            wrong.append(Wrong(what, why, "nothing is known of them until that is mended"))
    return Picture(processes.processes, processes.members, nodes[0], jobs[0], wrong, processes.capacity)


async def _unless_away(asked: Awaitable[T]) -> tuple[T | None, str]:
    """Take an answer, or why there is none."""
    try:
        return await asked, ""
    except NoAccess as error:
        return None, str(error)
    except grpc.aio.AioRpcError as error:
        if not away(error.code()):
            raise
        return None, told(from_error(error)).message


async def _nodes(mesh: Mesh) -> list[views.View]:
    now = time.time()
    return [views.node_view(node, now) async for node in all_nodes(mesh)]


async def _jobs(mesh: Mesh) -> dict[str, int]:
    """Count jobs that have not ended, by phase."""
    requests = (ListJobsRequest(filter=JobFilter(phases=[PHASES.to_wire(one)]), page_size=1) for one in LISTED)
    pages = await asyncio.gather(*(mesh.jobs.ListJobs(request) for request in requests))
    return {str(phase): page.total_size for phase, page in zip(LISTED, pages, strict=True) if page.total_size}


def _own_certificate(flags: Flags) -> Wrong | None:
    """Tell of the certificate that the one who asks shows."""
    tls = access_of(flags).tls
    validity = load(tls).validity if tls else None
    return certificate_wrong(str(tls.cert), "", validity, datetime.now(UTC)) if tls and validity else None


def _card(picture: Picture, now: datetime) -> Iterator[tuple[str, str]]:
    for service in SERVICES:
        if of_it := [one for one in picture.processes if one["service"] == service]:
            serving = sum(one["state"] in SERVING for one in of_it)
            leads = next((f", {one['address']} leads" for one in of_it if one["state"] == "leads"), "")
            yield service, f"{serving} of {len(of_it)} serve{leads}"
    if members := picture.members:
        leads = next((f", {one['endpoint']} leads" for one in members if one["leads"]), "")
        there = sum(one["release"] is not None for one in members)
        yield "store", f"{there} of {len(members)} members{leads}{_size(picture.capacity, members)}"
    if picture.nodes is not None:
        yield "nodes", _nodes_in_words(picture.nodes)
        yield from (("identity", sentence) for sentence in _identities(picture.nodes))
    if picture.jobs is not None:
        yield "jobs", ", ".join(f"{count} {phase}" for phase, count in picture.jobs.items()) or "none"
    yield "release", ", ".join(sorted({one["release"] for one in picture.processes if one["release"]}))
    shown = [validity for one in (*picture.processes, *(picture.nodes or ())) if (validity := validity_of(one))]
    if shown:
        yield "certificates", f"the next {min(shown, key=lambda one: one.ends).in_words(now)}"


def _size(capacity: views.View | None, members: list[views.View]) -> str:
    """Return how large the store is, in words."""
    if capacity:
        return f", {units.short_bytes(capacity['size_bytes'])} of {units.short_bytes(capacity['limit_bytes'])}"
    size = max(one["size_bytes"] or 0 for one in members)
    return f", {units.short_bytes(size)}" if size else ""


def _problems(wrong: list[Wrong]) -> Iterator[tuple[str, str]]:
    if not wrong:
        yield "problems", "none"
    for one in wrong:
        yield "problem", f"{one.where}: {one.what}"
        yield "", one.remedy
        for command in one.commands:
            yield "", f"  {command}"


def _identities(nodes: list[views.View]) -> list[str]:
    """Say where all jobs share one user, and what that means there, as the nodes say it."""
    said = {
        sentence: [one["id"] for one in nodes if sentence in one["not_enforced"]]
        for node in nodes
        for sentence in node["not_enforced"]
        if node["shared_user"] and sentence.startswith(f"every job runs as {node['shared_user']!r}")
    }
    return [f"{', '.join(ids)}: {sentence}" for sentence, ids in sorted(said.items())]


def _nodes_in_words(nodes: list[views.View]) -> str:
    if not nodes:
        return "none has registered yet"
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(one["state"] for one in nodes).items()))
    held, there = (sum(one[name] for one in nodes) for name in ("gpus_used", "gpus"))
    cores_held, cores = (sum(one[name] for one in nodes) for name in ("cores_used", "cores"))
    devices = f"{held:g} of {gpus_in_words(1000 * there)} and " if there else ""
    return f"{states}; {devices}{cores_held} of {plural(cores, 'core')} held"
