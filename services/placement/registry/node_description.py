"""Node messages for callers of the API: the record, usage, attempts, health and conditions of a node."""

from __future__ import annotations

import time
from collections.abc import Collection

from cotenant.codec import specs
from cotenant.core.model.resources import with_prefix
from cotenant.security.identity import caller
from cotenant.security.redaction import redact_others
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Node, used
from cotenant.services.placement.registry.node_claims import NodeClaims
from cotenant.v1 import node_service_pb2 as node_pb2


def describe(
    node: Node, cluster: Cluster, claims: NodeClaims, silence_seconds: float, heartbeat_seconds: float
) -> node_pb2.Node:
    """Return a node message with what the present caller may see."""
    message = node_pb2.Node()
    message.CopyFrom(node.record.node)
    lives = cluster.on_node(node.id)
    message.state, (message.state_owner, message.state_reason) = node.state, node.why
    message.inventory.problems.extend(claims.problems(node))
    if node.hold:
        message.inventory.problems.append(specs.problem_to_wire(node.hold))
    for name, amount in with_prefix("used_", used(node, lives)).items():
        setattr(message, name, amount)
    tenants = caller().tenants
    keys = [live.key for live in lives if tenants is None or live.record.spec.tenant in tenants]
    message.attempts.extend(f"{job_id}/{number}" for job_id, number in sorted(keys))
    if tenants is not None:
        _hide_others(message, cluster, tenants)
    if node.certificate is not None:
        message.certificate.CopyFrom(node.certificate)
    message.seen_time.FromNanoseconds(int((time.time() - (time.monotonic() - node.seen_seconds)) * 1e9))
    message.silence.FromMicroseconds(round(silence_seconds * 1e6))
    message.heartbeat_interval.FromMicroseconds(round(heartbeat_seconds * 1e6))
    if node.connected:
        node.condition.describe(message)
    return message


def _hide_others(message: node_pb2.Node, cluster: Cluster, tenants: Collection[str]) -> None:
    """Remove the names of other tenants' jobs from a node's health reasons."""

    def name_of(job_id: str) -> str | None:
        live = cluster.attempts.get(job_id)
        return None if live is None or live.record.spec.tenant in tenants else live.record.spec.name

    message.state_reason = redact_others(message.state_reason, name_of)
    for gpu in message.inventory.gpus:
        gpu.unhealthy_reason = redact_others(gpu.unhealthy_reason, name_of)
    for problem in message.inventory.problems:
        problem.reason = redact_others(problem.reason, name_of)
