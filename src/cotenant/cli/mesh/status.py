"""`cotenant status`: the health of the whole mesh, its problems and their remedies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TypeVar

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, access_of, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.problems import MeshProblem, certificate_problem, find_problems
from cotenant.cli.mesh.replicas import look as look_at_processes
from cotenant.cli.mesh.slowness import slowness_problems
from cotenant.cli.name_lookup import all_nodes
from cotenant.cli.outcome import Exit, ExitCode
from cotenant.cli.render import print_card
from cotenant.cli.views import validity_of
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.refusal import gpus as gpus_in_words
from cotenant.core.model.refusal import plural
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.access import AccessError
from cotenant.rpc.endpoints import SERVICES
from cotenant.security.grpc_tls import load
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest

T = TypeVar("T")
SERVING = frozenset({"leads", "follows", "serves"})
ADDRESS_UNKNOWN = (
    "no process that was asked knows its address",
    "start every service with the --endpoints of all four, or list it in --endpoint",
)
LISTED = tuple(phase for phase in Phase if phase not in ENDED)


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The state of the mesh; `nodes` and `jobs` are None if unavailable, which `problems` explains."""

    processes: list[views.View]
    members: list[views.View]
    nodes: list[views.View] | None
    jobs: dict[str, int] | None
    problems: list[MeshProblem]
    capacity: views.View | None = None  # of the store


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


def status(context: typer.Context, as_json: options.AsJson = False) -> None:
    """Show the state of services, store, nodes, jobs and certificates, with problems and their remedies.

    The exit code is 0 without problems, 1 with problems, and 3 if no service answers. One address is enough: its
    process asks the others that it knows. If it may be down, list the others too:
    `--endpoint 'queue=a:7070|b:7070,…'`.

    \b
    Examples:
      cotenant status
      cotenant status --json
    """
    mesh_status = with_mesh(Flags.of(context), look)
    own = _own_certificate(Flags.of(context))
    problems = [*mesh_status.problems, *([own] if own else [])]
    if as_json:
        views.print_json(
            {
                "well": not problems,
                "problems": [asdict(one) for one in problems],
                "processes": mesh_status.processes,
                "store": mesh_status.members,
                "store_capacity": mesh_status.capacity,
                "nodes": None if mesh_status.nodes is None else Counter(one["state"] for one in mesh_status.nodes),
                "jobs": mesh_status.jobs,
            }
        )
    else:
        print_card([*_card(mesh_status, datetime.now(UTC)), *_problems(problems)])
    if all(one["state"] == "away" for one in mesh_status.processes):
        raise Exit(ExitCode.UNREACHABLE)
    if problems:
        raise Exit(ExitCode.FAILED)


async def look(mesh: Mesh) -> MeshStatus:
    """Return the state of the mesh, queried concurrently."""
    processes, nodes, jobs = await asyncio.gather(
        look_at_processes(mesh), _unless_unreachable(_nodes(mesh)), _unless_unreachable(_jobs(mesh))
    )
    problems = find_problems(
        processes.processes,
        processes.members,
        nodes[0] or [],
        datetime.now(UTC),
        processes.trusts,
        processes.capacity,
    )
    problems += slowness_problems(processes.processes, nodes[0] or [])
    problems += [MeshProblem(service, *ADDRESS_UNKNOWN) for service in processes.unknown]
    for what, why in (("nodes", nodes[1]), ("jobs", jobs[1])):
        if why:
            problems.append(MeshProblem(what, why, "they are unknown until that is fixed"))
    return MeshStatus(processes.processes, processes.members, nodes[0], jobs[0], problems, processes.capacity)


async def _unless_unreachable(asked: Awaitable[T]) -> tuple[T | None, str]:
    """Return an answer and "", or None and why there is none."""
    try:
        return await asked, ""
    except AccessError as error:
        return None, str(error)
    except grpc.aio.AioRpcError as error:
        if not is_unreachable(error.code()):
            raise
        return None, command_error(from_error(error)).message


async def _nodes(mesh: Mesh) -> list[views.View]:
    now = time.time()
    return [views.node_view(node, now) async for node in all_nodes(mesh)]


async def _jobs(mesh: Mesh) -> dict[str, int]:
    """Return the number of live jobs by phase."""
    requests = (ListJobsRequest(filter=JobFilter(phases=[PHASES.to_wire(one)]), page_size=1) for one in LISTED)
    pages = await asyncio.gather(*(mesh.jobs.ListJobs(request) for request in requests))
    return {str(phase): page.total_size for phase, page in zip(LISTED, pages, strict=True) if page.total_size}


def _own_certificate(flags: Flags) -> MeshProblem | None:
    """Return a problem if the caller's own certificate is due for renewal."""
    tls = access_of(flags).tls
    validity = load(tls).validity if tls else None
    return certificate_problem(str(tls.cert), "", validity, datetime.now(UTC)) if tls and validity else None


def _card(mesh_status: MeshStatus, now: datetime) -> Iterator[tuple[str, str]]:
    for service in SERVICES:
        if of_it := [one for one in mesh_status.processes if one["service"] == service]:
            serving = sum(one["state"] in SERVING for one in of_it)
            leads = next((f", leader {one['address']}" for one in of_it if one["state"] == "leads"), "")
            yield service, f"{serving} of {len(of_it)} serving{leads}"
    if members := mesh_status.members:
        leads = next((f", leader {one['endpoint']}" for one in members if one["leads"]), "")
        there = sum(one["release"] is not None for one in members)
        yield "store", f"{there} of {len(members)} members up{leads}{_size(mesh_status.capacity, members)}"
    if mesh_status.nodes is not None:
        yield "nodes", _nodes_in_words(mesh_status.nodes)
        yield from (("identity", sentence) for sentence in _identities(mesh_status.nodes))
    if mesh_status.jobs is not None:
        yield "jobs", ", ".join(f"{count} {phase}" for phase, count in mesh_status.jobs.items()) or "none"
    yield "release", ", ".join(sorted({one["release"] for one in mesh_status.processes if one["release"]}))
    shown = [validity for one in (*mesh_status.processes, *(mesh_status.nodes or ())) if (validity := validity_of(one))]
    if shown:
        yield "certificates", f"first {min(shown, key=lambda one: one.ends).in_words(now)}"


def _size(capacity: views.View | None, members: list[views.View]) -> str:
    """Return the size of the store as text."""
    if capacity:
        return f", {units.short_bytes(capacity['size_bytes'])} of {units.short_bytes(capacity['limit_bytes'])}"
    size = max(one["size_bytes"] or 0 for one in members)
    return f", {units.short_bytes(size)}" if size else ""


def _problems(problems: list[MeshProblem]) -> Iterator[tuple[str, str]]:
    if not problems:
        yield "problems", "none"
    for one in problems:
        yield "problem", f"{one.where}: {one.what}"
        yield "", one.remedy
        for command in one.commands:
            yield "", f"  {command}"


def _identities(nodes: list[views.View]) -> list[str]:
    """Return sentences about nodes on which all jobs share one user."""
    identities = {
        sentence: [one["id"] for one in nodes if sentence in one["not_enforced"]]
        for node in nodes
        for sentence in node["not_enforced"]
        if node["shared_user"] and sentence.startswith(f"every job runs as {node['shared_user']!r}")
    }
    return [f"{', '.join(ids)}: {sentence}" for sentence, ids in sorted(identities.items())]


def _nodes_in_words(nodes: list[views.View]) -> str:
    if not nodes:
        return "none registered yet"
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(one["state"] for one in nodes).items()))
    held, there = (sum(one[name] for one in nodes) for name in ("gpus_used", "gpus"))
    cores_held, cores = (sum(one[name] for one in nodes) for name in ("cores_used", "cores"))
    devices = f"{held:g} of {gpus_in_words(1000 * there)} and " if there else ""
    return f"{states}; {devices}{cores_held} of {plural(cores, 'core')} in use"
