"""Nodes of a waiting job: what the scheduler's reason says of them, and what each has for a replica, by its own report.

The scheduler's reason counts nodes and does not name them. The facts about each node show what it may have counted;
they are no reason. Where the reason is another one, such as a quota, it holds although a replica would fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cotenant.cli import views
from cotenant.core.model.refusal import Code, plural
from cotenant.core.model.refusal import gpus as gpus_in_words
from cotenant.v1.job_pb2 import Job, JobSpec, Refusal
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.resources_pb2 import ResourceRequest

STATES: Mapping[str, str] = {
    "cordoned": "takes no new work", "draining": "is being drained", "away": "is disconnected", "lost": "is lost",
}  # fmt: skip


OF_NODES = frozenset(
    {Code.CAPACITY, Code.FRAGMENTED, Code.NEVER_FITS, Code.NO_NODES, Code.NODES_HELD, Code.QOS, Code.RESERVED}
)


def scheduler_words(refusal: Refusal) -> list[str]:
    """Return what the scheduler's reason says of nodes, by its numbers, in sentences.

    >>> scheduler_words(Refusal(code="QUOTA"))
    ["The scheduler's reason (QUOTA) is not about nodes: it holds although a replica may fit."]
    >>> numbers = {"room_replicas": 1, "wanted_replicas": 2, "nodes_with_room": 1, "avoided_nodes": 2}
    >>> scheduler_words(Refusal(code="FRAGMENTED", numbers=numbers))
    ['The scheduler found room for 1 of 2 replicas, on 1 node.', 'It avoids 2 nodes.']
    """
    if refusal.code not in OF_NODES:
        return [f"The scheduler's reason ({refusal.code}) is not about nodes: it holds although a replica may fit."]
    numbers = {name: int(value) for name, value in refusal.numbers.items()}
    found = []
    if "room_replicas" in numbers and "wanted_replicas" in numbers:
        on = f", on {plural(numbers['nodes_with_room'], 'node')}" if numbers.get("nodes_with_room") else ""
        wanted = plural(numbers["wanted_replicas"], "replica")
        found.append(
            f"The scheduler found room for {min(numbers['room_replicas'], numbers['wanted_replicas'])} of {wanted}{on}."
        )
    found += [text.format(plural(numbers[name], what)) for name, (what, text) in SENTENCES.items() if numbers.get(name)]
    return found or ["The scheduler counts what is free on all nodes together, and names none."]


SENTENCES: Mapping[str, tuple[str, str]] = {
    "closed_nodes": ("node", "The scheduler counts {} out: no new work there."),
    "unhealthy_nodes": ("node", "The scheduler counts {} as unhealthy."),
    "unhealthy_gpus": ("GPU", "The scheduler counts {} as unhealthy."),
    "held_nodes": ("node", "The scheduler holds {} that could run it, because launches fail there."),
    "kept_nodes": ("node", "The scheduler keeps {} for a reservation of another job."),
    "reserved_nodes": ("node", "The scheduler has reserved places on {} for it."),
    "avoided_nodes": ("node", "It avoids {}."),
    "yielded_nodes": ("node", "It would avoid {} more, but no other could hold it."),
}  # fmt: skip


class Fit(NamedTuple):
    """A node and the first fact that speaks against it; `constraint` is empty if a replica would fit there now."""

    node: str
    constraint: str
    detail: str


def node_fits(job: Job, nodes: Sequence[Node]) -> list[Fit]:
    """Return the nodes with what speaks against each for the smallest replica of a job; those without room first."""
    needed = smallest(job.spec)
    avoided = {one.node_id: one.reason for one in job.avoided_nodes}
    fits = [_fit(node, needed, avoided) for node in nodes]
    return sorted(fits, key=lambda fit: (not fit.constraint, fit.node))


def smallest(spec: JobSpec) -> ResourceRequest:
    """Return the request of the role that asks for least."""
    requests = [role.resources for role in spec.roles if role.replicas or role.HasField("open")]
    return min(requests, key=lambda one: (one.gpu_milli, one.cores, one.memory_bytes), default=ResourceRequest())


def _fit(node: Node, needed: ResourceRequest, avoided: Mapping[str, str]) -> Fit:
    state = views.node_state(node)
    if state != "ready":
        reason = f": {node.state_reason}" if node.state_reason else ""
        return Fit(node.id, state, f"{STATES.get(state, state)}{reason}")
    if node.id in avoided:
        return Fit(node.id, "avoided", avoided[node.id])
    healthy = [gpu for gpu in node.inventory.gpus if not gpu.unhealthy_reason]
    if needed.gpu_type and (healthy or needed.gpu_milli):
        typed = [gpu for gpu in healthy if needed.gpu_type.lower() in gpu.model.lower()]
        if not typed:
            models = ", ".join(sorted({gpu.model or "unnamed" for gpu in healthy})) or "none"
            return Fit(node.id, "gpu type", f"needs {needed.gpu_type}; has {models}")
    return _capacity_fit(node, needed, len(healthy))


def _capacity_fit(node: Node, needed: ResourceRequest, healthy: int) -> Fit:
    cores = len(node.inventory.cores)
    free_gpus = 1000 * healthy - node.used_gpu_milli
    if needed.gpu_milli > 1000 * healthy:
        return Fit(node.id, "too small", f"a replica needs {gpus_in_words(needed.gpu_milli)}; it has {healthy}")
    if needed.cores > cores:
        return Fit(node.id, "too small", f"a replica needs {plural(needed.cores, 'core')}; it has {cores}")
    if needed.gpu_milli > free_gpus:
        words = f"a replica needs {gpus_in_words(needed.gpu_milli)}; {views.gpus(max(0, free_gpus))} free"
        return Fit(node.id, "full", words)
    if needed.cores > cores - node.used_cores:
        words = f"a replica needs {plural(needed.cores, 'core')}; {cores - node.used_cores} free"
        return Fit(node.id, "full", words)
    return Fit(node.id, "", "a replica fits there")
