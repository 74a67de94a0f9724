"""What placement knows of a running attempt beside its record: where its replicas are, and what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cotenant.codec import specs
from cotenant.core.capacity.ledger import Share
from cotenant.core.model.allocation import TaskAllocation
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.prediction.job_class_memory import Key
from cotenant.core.sizing.rate_history import Track, kind_of
from cotenant.core.sizing.resize import leading_role, node_share_of, resizable
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live


@dataclass(slots=True)
class Followed:
    """An attempt. Cores are per replica of its leading role, which has `on` each node some, by the node's id.

    `wish` is what it could make use of, 0 before its allocator was asked. `epoch` is that since which it is looked at,
    `measured_epoch` that of the last window. Times are monotonic.
    """

    number: int
    spec: JobSpec
    kind: Key
    resizable: bool
    role: str
    on: Mapping[str, int]
    shares: tuple[int, ...]  # by role: a replica's GPUs' share of its node's cores
    track: Track = field(default_factory=Track)
    estimate: Estimate | None = None  # the record's, in the core's words; None: it has changed
    rate_per_second: float | None = None
    wish: int = 0
    reason: str = ""
    epoch: int = 0
    measured_epoch: int = 0
    gap_seconds: float = 0.0
    due_seconds: float = math.inf
    profile_until_seconds: float = -math.inf

    @classmethod
    def begun(cls, cluster: Cluster, live: Live) -> Followed:
        """Begin to follow an attempt."""
        spec = specs.spec_from_wire(live.record.spec)
        role = spec.roles[leading_role(spec)].name
        counts = Counter((part.node_id, task.role) for part in live.allocation for task in part.tasks)
        on = {node_id: count for (node_id, name), count in counts.items() if name == role}
        roles = {one.name: number for number, one in enumerate(spec.roles)}
        nodes = {node_id: number for number, node_id in enumerate(live.nodes)}
        shapes = {nodes[node_id]: cluster.nodes[node_id].shape for node_id in live.nodes}
        places = [Share(nodes[node_id], roles[name], replicas) for (node_id, name), replicas in counts.items()]
        shares = node_share_of(spec, places, shapes)
        gpu_type = shapes[nodes[next(iter(on), live.nodes[0])]].gpu_type
        return cls(live.key[1], spec, kind_of(spec, gpu_type), resizable(spec), role, on, shares)

    def profiled(self, now: float) -> bool:
        """Whether it is being measured on fewer cores than it holds."""
        return now < self.profile_until_seconds


def least(live: Live, count: Callable[[TaskAllocation], int]) -> dict[str, int]:
    """Count something of each replica, by role: a gang changes in lock-step."""
    counts: dict[str, int] = {}
    for task in (task for part in live.allocation for task in part.tasks):
        counts[task.role] = min(counts.get(task.role, count(task)), count(task))
    return counts


def cores_of(live: Live, followed: Followed) -> int:
    """Cores that each replica of the leading role holds."""
    return least(live, lambda task: len(task.core_ids)).get(followed.role, 0)


def lent_of(live: Live, followed: Followed) -> int:
    """Of these, those that were lent."""
    return least(live, lambda task: task.lent).get(followed.role, 0)


def own_cores_of(live: Live, spec: JobSpec) -> tuple[int, ...]:
    """Cores that each replica has for good, by role."""
    own = least(live, lambda task: task.own_cores or len(task.core_ids))
    return tuple(own.get(role.name, 0) for role in spec.roles)
