"""Node avoidance: nodes that a job keeps away from for a while, in its record. No IO."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cotenant.codec import specs
from cotenant.v1 import job_pb2

AVOID_SECONDS = 3600.0
AVOIDED_MAX = 32  # only the newest are kept


def avoid(job: job_pb2.Job, node_ids: Iterable[str], seconds: float, reason: str, now: float) -> None:
    """Make a job avoid nodes for some seconds; an already avoided node becomes the newest entry."""
    named = dict.fromkeys(node_ids)
    if seconds <= 0 or not named:
        return
    kept = [one for one in active(job, now) if one.node_id not in named]
    for node_id in named:
        one = job_pb2.AvoidedNode(node_id=node_id, reason=reason)
        one.until.FromNanoseconds(int((now + seconds) * 1e9))
        kept.append(one)
    del job.avoided_nodes[:]
    job.avoided_nodes.extend(kept[-AVOIDED_MAX:])


def active(job: job_pb2.Job, now: float) -> list[job_pb2.AvoidedNode]:
    """Return the nodes that it still avoids, oldest first."""
    avoided = job.avoided_nodes
    return [one for one in avoided if specs.seconds(one.until) > now] if avoided else []


def expires_seconds(job: job_pb2.Job, now: float) -> float:
    """Return the seconds until the first avoidance expires; infinity if there is none."""
    return min((specs.seconds(one.until) - now for one in active(job, now)), default=math.inf)


def nodes_of(attempt: job_pb2.Attempt) -> list[str]:
    """Return the nodes of an attempt, past or present."""
    return [part.node_id for part in attempt.allocations]
