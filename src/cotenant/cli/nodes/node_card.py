"""One node with everything known about it: `cotenant nodes NODE`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

from cotenant.cli import units, views
from cotenant.cli.jobs.show import ranges
from cotenant.cli.render import print_card
from cotenant.core.model.refusal import plural
from cotenant.v1.node_service_pb2 import Node

Pairs = Iterator[tuple[str, str]]


def show_node(node: Node, as_json: bool) -> None:
    """Print a node."""
    view = {**views.node_view(node, time.time()), **hardware_view(node)}
    if as_json:
        views.print_json(view)
    else:
        print_card(_card(view))


def hardware_view(node: Node) -> views.View:
    """Return a node's hardware: each GPU, and the cores of each NUMA node."""
    cores: dict[int, list[int]] = defaultdict(list)
    for core in node.inventory.cores:
        cores[core.numa_node].append(core.id)
    return {
        "gpu_list": [
            {
                "uuid": gpu.uuid,
                "model": gpu.model,
                "memory_bytes": gpu.memory_bytes,
                "numa_node": gpu.numa_node,
                "declared": gpu.declared,
                "shareable": gpu.shareable,
                "unhealthy_reason": gpu.unhealthy_reason or None,
            }
            for gpu in node.inventory.gpus
        ],
        "numa_nodes": [{"id": number, "cores": sorted(ids)} for number, ids in sorted(cores.items())],
    }


def _card(view: views.View) -> Pairs:
    yield "id", view["id"]
    why = f": {view['state_reason']}" if view["state_reason"] else ""
    owner = f" (by {view['state_owner']})" if view["state_owner"] else ""
    yield "state", f"{view['state']}{why}{owner}"
    yield "last seen", "" if view["seen_seconds"] is None else f"{units.short_seconds(view['seen_seconds'])} ago"
    yield "first seen", view["create_time"] or ""
    yield "address, rack", ", ".join(filter(None, (view["address"], view["rack"])))
    yield "agent release", view["agent_version"]
    if view["outer_job"]:
        until = f", available until {view['available_until']}" if view["available_until"] else ""
        yield "outer job", f"{view['outer_job']}{until}"
    if valid := views.validity_of(view):
        yield "certificate", valid.in_words(datetime.now(UTC))
    yield "GPUs used", f"{view['gpus_used']:g} of {view['gpus']}" if view["gpus"] else ""
    yield "cores used", f"{view['cores_used']} of {view['cores']}"
    for kind in views.amounts_shown([view]):
        used = units.short_bytes(view[views.used_key(kind)])
        yield f"{kind.noun} used", f"{used} of {units.short_bytes(view[kind.name])}"
    for one in view["numa_nodes"]:
        yield f"NUMA node {one['id']}", f"{plural(len(one['cores']), 'core')}: {ranges(one['cores'])}"
    for gpu in view["gpu_list"]:
        yield "GPU", _gpu(gpu)
    yield "jobs", ", ".join(view["attempts"]) or "none"
    if limits := view["capabilities"]["limits"]:
        yield "executor", limits
    for sentence in view["not_enforced"]:
        yield "not enforced", sentence
    for problem in view["problems"]:
        where = f"{problem['gpu_uuid']}: " if problem["gpu_uuid"] else ""
        since = f", since {problem['since']}" if problem["since"] else ""
        yield "problem", f"{where}{problem['action']}: {problem['reason']}{since}"
        yield "", problem["remedy"]


def _gpu(gpu: views.View) -> str:
    declared = f"{gpu['model']} (declared)".strip() if gpu["declared"] else gpu["model"]
    memory = units.short_bytes(gpu["memory_bytes"]) if gpu["memory_bytes"] else ""
    health = f"unhealthy: {gpu['unhealthy_reason']}" if gpu["unhealthy_reason"] else ""
    place = f"NUMA node {gpu['numa_node']}" if gpu["numa_node"] >= 0 else ""
    return ", ".join(filter(None, (gpu["uuid"], declared, memory, place, "shareable" * gpu["shareable"], health)))
