"""The queue page: the rules of the order, the tenants' shares, and the pieces in which resources are free."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cotenant.cli import views
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.explain import explanation_view
from cotenant.cli.mesh.tenant_usage import all_usages, usage_view
from cotenant.cli.name_lookup import all_nodes
from cotenant.v1.job_service_pb2 import ExplainJobResponse
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.tenant_service_pb2 import ListQueuesRequest
from cotenant.web.boards import Ask, BoardKind, part
from cotenant.web.rows import Row

SECONDS = 5.0


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the queues, the tenants' shares and what is free."""
    queues, shares, pieces_free = await asyncio.gather(part(ask(queue_rows)), part(ask(_shares)), part(ask(free)))
    found = {"queues": queues, "shares": shares, "free": pieces_free}
    return {name: {"rows": one.rows, "trouble": one.trouble} for name, one in found.items()}


KIND = BoardKind(read, SECONDS)


def place_of(answer: ExplainJobResponse, now: float) -> Row:
    """Return a waiting job's place in the order and what decides it."""
    view = explanation_view(answer, now)
    order = ("position", "waiting", "level", "score", "votes", "queue_policy")
    return {name: view[name] for name in (*order, "forecast", "outlook", "ahead", "ahead_count", "ending")}


async def queue_rows(mesh: Mesh) -> list[Row]:
    """Return the queues with their policies and rules, and how many jobs wait and run."""
    answer = await mesh.tenants.ListQueues(ListQueuesRequest())
    return [
        {
            "queue": one.id,
            "policy": one.policy,
            "options": dict(one.options),
            "rules": dict(one.rules),
            "waiting": one.waiting,
            "running": one.running,
        }
        for one in answer.queues
    ]


async def _shares(mesh: Mesh) -> list[Row]:
    return [usage_view(one, users=False) for one in await all_usages(mesh, users=False)]


async def free(mesh: Mesh) -> list[Row]:
    """Return one row: what is free, and in which pieces."""
    return [pieces([node async for node in all_nodes(mesh)])]


def pieces(nodes: Sequence[Node]) -> Row:
    """Return what nodes that take work have free, in sum and at most on one node."""
    free = [_free_of(node) for node in nodes if views.node_state(node) == "ready"]
    counts = [whole for _, whole, _ in free]
    return {
        "nodes": len(nodes),
        "nodes_ready": len(free),
        "gpus": sum(len(node.inventory.gpus) for node in nodes),
        "gpus_free": views.gpus(sum(milli for milli, _, _ in free)),
        "gpus_free_most": max(counts, default=0),
        "cores": sum(len(node.inventory.cores) for node in nodes),
        "cores_free": sum(cores for _, _, cores in free),
        "cores_free_most": max((cores for _, _, cores in free), default=0),
        "nodes_by_free_gpus": sorted(((count, counts.count(count)) for count in set(counts)), reverse=True),
    }


def _free_of(node: Node) -> tuple[int, int, int]:
    """Return a node's free GPUs in thousandths and whole ones at most, and its free cores; ill GPUs are not free."""
    healthy = sum(not gpu.unhealthy_reason for gpu in node.inventory.gpus)
    milli = max(0, 1000 * healthy - node.used_gpu_milli)
    return milli, milli // 1000, max(0, len(node.inventory.cores) - node.used_cores)
