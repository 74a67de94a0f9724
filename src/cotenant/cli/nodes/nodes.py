"""Commands for nodes: list, drain, cordon, uncordon, release, forget."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from cotenant.cli import options, units, views
from cotenant.cli.connection import Mesh, reach
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.slowness import lateness
from cotenant.cli.name_lookup import all_nodes, find_node
from cotenant.cli.nodes.node_card import show_node
from cotenant.cli.outcome import note, usage
from cotenant.cli.render import Column, print_table
from cotenant.v1.node_service_pb2 import (
    CordonNodeRequest,
    DrainNodeRequest,
    ForgetNodeRequest,
    Node,
    ReleaseGpuRequest,
    UncordonNodeRequest,
)

COLUMNS = (
    Column("NODE"),
    Column("STATE", styled=True),
    Column("GPUS", right=True),
    Column("CORES", right=True),
    Column("MEMORY", right=True),
    Column("MODEL", elastic=True),
    Column("JOBS", right=True),
    Column("NOTES", elastic=True),
)
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for those who look.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("nodes")(nodes)
    app.command("drain")(drain)
    app.command("cordon")(cordon)
    app.command("uncordon")(uncordon)
    app.command("release")(release)
    app.command("forget")(forget)


def nodes(
    context: typer.Context,
    node_id: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="Show all that is known of this one.", autocompletion=options.complete_node
        ),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """List nodes: their state, and what is used of what they have; or show one, with its GPUs and what ails it.

    \b
    Examples:
      cotenant nodes
      cotenant nodes gpu-7
      cotenant nodes --json
    """
    if node_id:
        show_node(reach(Flags.of(context), lambda mesh: find_node(mesh, node_id)), as_json)
        return

    async def work(mesh: Mesh) -> list[Node]:
        return [node async for node in all_nodes(mesh)]

    now = time.time()
    rows = [views.node_view(node, now) for node in reach(Flags.of(context), work)]
    if as_json:
        views.print_json(rows)
        return
    print_table(COLUMNS, [row(view) for view in rows], nothing="no node has registered yet")
    for view in rows:
        for sentence in view["not_enforced"]:
            note(f"{view['id']}: not enforced: {sentence}")
        for problem in view["problems"]:
            where = f" {problem['gpu_uuid']}" if problem["gpu_uuid"] else ""
            note(f"{view['id']}{where}: {problem['action']}: {problem['reason']}; {problem['remedy']}")


def drain(
    context: typer.Context, node_id: options.NodeId, reason: Reason = "", as_json: options.AsJson = False
) -> None:
    """Empty a node: it gets no new work, and what runs there is stopped with its grace and queued again.

    \b
    Example:
      cotenant drain gpu-7 --reason "new power supply"
    """
    request = DrainNodeRequest(reason=reason)
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.DrainNode(_to(request, node)))


def cordon(
    context: typer.Context, node_id: options.NodeId, reason: Reason = "", as_json: options.AsJson = False
) -> None:
    """Give a node no new work; what runs there runs on.

    \b
    Example:
      cotenant cordon gpu-7 --reason "noisy fan"
    """
    request = CordonNodeRequest(reason=reason)
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.CordonNode(_to(request, node)))


def uncordon(context: typer.Context, node_id: options.NodeId, as_json: options.AsJson = False) -> None:
    """Take back a cordon or a drain.

    \b
    Example:
      cotenant uncordon gpu-7
    """
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.UncordonNode(UncordonNodeRequest(id=node.id)))


def release(
    context: typer.Context,
    node_id: options.NodeId,
    gpu: Annotated[str, typer.Argument(help="Its UUID, or the beginning or the end of it.", metavar="GPU")],
    as_json: options.AsJson = False,
) -> None:
    """End what holds a GPU back from work, once it has been seen to; what is still wrong with it is found again.

    \b
    Example:
      cotenant release gpu-7 GPU-5c2b
    """

    async def act(mesh: Mesh, node: Node) -> Any:
        return await mesh.nodes.ReleaseGpu(ReleaseGpuRequest(id=node.id, gpu_uuid=_gpu_of(node, gpu)))

    _act(context, node_id, as_json, act)


def forget(
    context: typer.Context,
    node_id: options.NodeId,
    reason: Reason = "",
    powered_off: Annotated[
        bool,
        typer.Option("--powered-off", help="Nothing runs there: also give up jobs that must never run twice at once."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Take a node whose agent is away as gone: what it had is started elsewhere at once, and the node is not listed.

    If it comes back, it is a new node, and what still runs there from before is stopped.

    \b
    Examples:
      cotenant forget gpu-7 --reason "sent back to the vendor"
      cotenant forget gpu-7 --powered-off
    """
    request = ForgetNodeRequest(reason=reason, powered_off=powered_off)

    async def work(mesh: Mesh) -> Node:
        node: Node = (await mesh.nodes.ForgetNode(_to(request, await find_node(mesh, node_id)))).node
        return node

    view = views.node_view(reach(Flags.of(context), work), time.time())
    if as_json:
        views.print_json(view)
    elif kept := view["attempts"]:
        print(f"{view['id']} is forgotten once these have gone: {', '.join(kept)}")
        note("who must never run twice at once is waited for, unless with --powered-off, and so is who stops elsewhere")
    else:
        print(f"{view['id']} is forgotten")


def _gpu_of(node: Node, text: str) -> str:
    """Find the GPU that is meant. Raises `CommandError` where none is, or more than one."""
    uuids = [one.uuid for one in node.inventory.gpus]
    meant = [uuid for uuid in uuids if text and (uuid.startswith(text) or uuid.endswith(text))]
    if text in uuids or len(meant) == 1:
        return text if text in uuids else meant[0]
    has = ", ".join(uuids) or "none"
    raise usage(
        f"{text!r} may be any of {len(meant)} GPUs" if meant else f"{node.id} has no GPU {text!r}; it has {has}"
    )


def _to(request: Any, node: Node) -> Any:
    request.id = node.id
    return request


def _act(context: typer.Context, text: str, as_json: bool, act: Callable[[Mesh, Node], Awaitable[Any]]) -> None:
    async def work(mesh: Mesh) -> Node:
        node: Node = (await act(mesh, await find_node(mesh, text))).node
        return node

    view = views.node_view(reach(Flags.of(context), work), time.time())
    if as_json:
        views.print_json(view)
        return
    running = f", {len(view['attempts'])} still there" if view["attempts"] else ""
    print(f"{view['id']} {view['state']}{running}")


def row(view: views.View) -> list[str]:
    """Write a node for a table: used of all."""
    return [
        view["id"],
        view["state"],
        f"{view['gpus_used']:g}/{view['gpus']}" if view["gpus"] else "-",
        f"{view['cores_used']}/{view['cores']}",
        f"{units.short_bytes(view['memory_used_bytes'])}/{units.short_bytes(view['memory_bytes'])}",
        _model(view),
        str(len(view["attempts"])),
        _notes(view),
    ]


def _model(view: views.View) -> str:
    """Name the GPUs; declared ones as what they are."""
    names = ", ".join(model for model in view["gpu_models"] if model)
    if not view["gpus_declared"]:
        return names
    what = "declared" if view["gpus_declared"] == view["gpus"] else f"{view['gpus_declared']} declared"
    return f"{names} ({what})".strip()


def _notes(view: views.View) -> str:
    told = [view["state_reason"]] if view["state_reason"] else []
    if view["gpus_unhealthy"]:
        told.append(f"{len(view['gpus_unhealthy'])} GPUs ill: {next(iter(view['gpus_unhealthy'].values()))}")
    if view["state"] in ("away", "lost") and view["seen_seconds"] is not None:
        told.append(f"last seen {units.short_seconds(view['seen_seconds'])} ago")
    if late := lateness(view):
        told.append(late)
    if (valid := views.validity_of(view)) and valid.is_due(now := datetime.now(UTC)):
        told.append(f"its certificate {valid.in_words(now)}")
    return "; ".join(told)
