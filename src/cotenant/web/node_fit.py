"""Which nodes cannot take a replica of a waiting job, and what rules each of them out: facts about nodes, by name.

The scheduler's own answer is the job's reason. This tells for each node the first thing that speaks against it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cotenant.cli import views
from cotenant.core.model.refusal import gpus as gpus_in_words
from cotenant.core.model.refusal import plural
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.resources_pb2 import ResourceRequest

STATES: Mapping[str, str] = {
    "cordoned": "takes no new work", "draining": "is being drained", "away": "is disconnected", "lost": "is lost",
}  # fmt: skip


class Fit(NamedTuple):
    """A node and what rules it out; `constraint` is empty if a replica would fit there now."""

    node: str
    constraint: str
    detail: str


def node_fits(job: Job, nodes: Sequence[Node]) -> list[Fit]:
    """Return the nodes with what rules each out for the smallest replica of a job; those that are ruled out first."""
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
