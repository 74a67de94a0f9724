"""Commands for nodes: list, drain, cordon, uncordon, release, forget."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.slowness import heartbeat_delay
from cotenant.cli.name_lookup import all_nodes, find_node
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.core.model.resources import ResourceKind
from cotenant.v1.node_service_pb2 import (
    CordonNodeRequest,
    DrainNodeRequest,
    ForgetNodeRequest,
    Node,
    ReleaseGpuRequest,
    UncordonNodeRequest,
)

LEFT_COLUMNS = (
    Column("NODE"),
    Column("STATE", styled=True),
    Column("GPUS", right=True),
    Column("CORES", right=True),
)
RIGHT_COLUMNS = (
    Column("MODEL", elastic=True),
    Column("JOBS", right=True),
    Column("NOTES", elastic=True),
)


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
            metavar="NODE", help="Show everything known about this node.", autocompletion=options.complete_node
        ),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """List nodes with their state and used resources; or show one node with its GPUs and problems.

    \b
    Examples:
      cotenant nodes
      cotenant nodes gpu-7
      cotenant nodes --json
    """
    if node_id:
        from cotenant.cli.nodes.node_card import show_node

        show_node(with_mesh(Flags.of(context), lambda mesh: find_node(mesh, node_id), unary=True), as_json)
        return

    async def work(mesh: Mesh) -> list[Node]:
        return [node async for node in all_nodes(mesh)]

    now = time.time()
    rows = [views.node_view(node, now) for node in with_mesh(Flags.of(context), work, unary=True)]
    if as_json:
        views.print_json(rows)
        return
    kinds = views.amounts_shown(rows)
    print_table(columns(kinds), [row(view, kinds) for view in rows], nothing="no node has registered yet")
    for view in rows:
        if limits := view["capabilities"]["limits"]:
            note(f"{view['id']}: its executor: {limits}")
        for sentence in view["not_enforced"]:
            note(f"{view['id']}: not enforced: {sentence}")
        for problem in view["problems"]:
            where = f" {problem['gpu_uuid']}" if problem["gpu_uuid"] else ""
            note(f"{view['id']}{where}: {problem['action']}: {problem['reason']}; {problem['remedy']}")


def drain(
    context: typer.Context, node_id: options.NodeId, reason: options.Reason = "", as_json: options.AsJson = False
) -> None:
    """Drain a node: it gets no new work; running jobs are stopped gracefully and requeued.

    \b
    Example:
      cotenant drain gpu-7 --reason "new power supply"
    """
    request = DrainNodeRequest(reason=reason)
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.DrainNode(_to(request, node)))


def cordon(
    context: typer.Context, node_id: options.NodeId, reason: options.Reason = "", as_json: options.AsJson = False
) -> None:
    """Cordon a node: it gets no new work; running jobs continue.

    \b
    Example:
      cotenant cordon gpu-7 --reason "noisy fan"
    """
    request = CordonNodeRequest(reason=reason)
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.CordonNode(_to(request, node)))


def uncordon(context: typer.Context, node_id: options.NodeId, as_json: options.AsJson = False) -> None:
    """Undo a cordon or a drain.

    \b
    Example:
      cotenant uncordon gpu-7
    """
    _act(context, node_id, as_json, lambda mesh, node: mesh.nodes.UncordonNode(UncordonNodeRequest(id=node.id)))


def release(
    context: typer.Context,
    node_id: options.NodeId,
    gpu: Annotated[str, typer.Argument(help="GPU UUID, or a unique prefix or suffix of it.", metavar="GPU")],
    as_json: options.AsJson = False,
) -> None:
    """Return an unhealthy GPU to service after repair; problems that persist are detected again.

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
    reason: options.Reason = "",
    powered_off: Annotated[
        bool,
        typer.Option(
            "--powered-off", help="Nothing runs there any longer: also requeue jobs that must never run twice."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Remove a node that is permanently lost: its jobs are requeued at once and the node is no longer listed.

    If the node returns, it registers as a new node, and attempts from before are stopped.

    \b
    Examples:
      cotenant forget gpu-7 --reason "sent back to the vendor"
      cotenant forget gpu-7 --powered-off
    """
    request = ForgetNodeRequest(reason=reason, powered_off=powered_off)

    async def work(mesh: Mesh) -> Node:
        node: Node = (await mesh.nodes.ForgetNode(_to(request, await find_node(mesh, node_id)))).node
        return node

    view = views.node_view(with_mesh(Flags.of(context), work, unary=True), time.time())
    if as_json:
        views.print_json(view)
    elif kept := view["attempts"]:
        print(f"{view['id']} will be removed once these attempts have ended: {', '.join(kept)}")
        note(
            "waiting for attempts stopping on other nodes, and for jobs that must never run twice unless --powered-off"
        )
    else:
        print(f"{view['id']} removed")


def _gpu_of(node: Node, text: str) -> str:
    """Return the UUID of the matching GPU.

    Raises:
        CommandError: no GPU matches, or more than one.
    """
    uuids = [one.uuid for one in node.inventory.gpus]
    matching = [uuid for uuid in uuids if text and (uuid.startswith(text) or uuid.endswith(text))]
    if text in uuids or len(matching) == 1:
        return text if text in uuids else matching[0]
    has = ", ".join(uuids) or "none"
    raise usage_error(
        f"{text!r} matches {len(matching)} GPUs" if matching else f"{node.id} has no GPU {text!r}; it has {has}"
    )


def _to(request: Any, node: Node) -> Any:
    request.id = node.id
    return request


def _act(context: typer.Context, text: str, as_json: bool, act: Callable[[Mesh, Node], Awaitable[Any]]) -> None:
    async def work(mesh: Mesh) -> Node:
        node: Node = (await act(mesh, await find_node(mesh, text))).node
        return node

    view = views.node_view(with_mesh(Flags.of(context), work, unary=True), time.time())
    if as_json:
        views.print_json(view)
        return
    running = f", {len(view['attempts'])} attempts still running" if view["attempts"] else ""
    print(f"{view['id']} {view['state']}{running}")


def columns(kinds: Sequence[ResourceKind]) -> tuple[Column, ...]:
    """Return the columns of nodes with these amounts."""
    return (*LEFT_COLUMNS, *(Column(kind.noun.upper(), right=True) for kind in kinds), *RIGHT_COLUMNS)


def row(view: views.View, kinds: Sequence[ResourceKind]) -> list[str]:
    """Return a node's row, resources as used/total."""
    return [
        view["id"],
        view["state"],
        f"{view['gpus_used']:g}/{view['gpus']}" if view["gpus"] else "-",
        f"{view['cores_used']}/{view['cores']}",
        *(f"{units.short_bytes(view[views.used_key(kind)])}/{units.short_bytes(view[kind.name])}" for kind in kinds),
        _model(view),
        str(len(view["attempts"])),
        _notes(view),
    ]


def _model(view: views.View) -> str:
    """Return the GPU models, with declared GPUs marked."""
    names = ", ".join(model for model in view["gpu_models"] if model)
    if not view["gpus_declared"]:
        return names
    what = "declared" if view["gpus_declared"] == view["gpus"] else f"{view['gpus_declared']} declared"
    return f"{names} ({what})".strip()


def _notes(view: views.View) -> str:
    notes = [view["state_reason"]] if view["state_reason"] else []
    if view["gpus_unhealthy"]:
        notes.append(f"{len(view['gpus_unhealthy'])} GPUs unhealthy: {next(iter(view['gpus_unhealthy'].values()))}")
    if view["state"] in ("away", "lost") and view["seen_seconds"] is not None:
        notes.append(f"last seen {units.short_seconds(view['seen_seconds'])} ago")
    if late := heartbeat_delay(view):
        notes.append(late)
    if (valid := views.validity_of(view)) and valid.is_due(now := datetime.now(UTC)):
        notes.append(f"certificate {valid.in_words(now)}")
    return "; ".join(notes)
