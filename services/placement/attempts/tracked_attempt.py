"""State of a running attempt that is not in its record: where its replicas run, and what was measured."""

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
from cotenant.core.sizing.rate_history import RateHistory, job_class_of
from cotenant.core.sizing.resize import leading_role, node_share_of, resizable
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt


@dataclass(slots=True)
class TrackedAttempt:
    """A tracked attempt. Cores are per replica of its leading role; `on` counts that role's replicas by node id.

    `wish` is the number of cores it could use, 0 before the allocator was asked. `epoch` is that of the allocation in
    use, `measured_epoch` that of the last window. Times are monotonic.
    """

    number: int
    spec: JobSpec
    kind: Key
    resizable: bool
    role: str
    on: Mapping[str, int]
    shares: tuple[int, ...]  # by role: the share of a node's cores that matches a replica's GPUs
    track: RateHistory = field(default_factory=RateHistory)
    estimate: Estimate | None = None  # decoded from the record; None after the record's estimate changed
    rate_per_second: float | None = None
    wish: int = 0
    reason: str = ""
    epoch: int = 0
    measured_epoch: int = 0
    gap_seconds: float = 0.0
    due_seconds: float = math.inf
    profile_until_seconds: float = -math.inf

    @classmethod
    def begun(cls, cluster: Cluster, live: LiveAttempt) -> TrackedAttempt:
        """Return the initial tracked state of an attempt."""
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
        return cls(live.key[1], spec, job_class_of(spec, gpu_type), resizable(spec), role, on, shares)

    def profiled(self, now: float) -> bool:
        """Return whether a profile is running, on fewer cores than it holds."""
        return now < self.profile_until_seconds


def least(live: LiveAttempt, count: Callable[[TaskAllocation], int]) -> dict[str, int]:
    """Return the minimum of a count over the replicas of each role; a gang's replicas change in lockstep."""
    counts: dict[str, int] = {}
    for task in (task for part in live.allocation for task in part.tasks):
        counts[task.role] = min(counts.get(task.role, count(task)), count(task))
    return counts


def cores_held(live: LiveAttempt, tracked: TrackedAttempt) -> int:
    """Return the cores that each replica of the leading role holds."""
    return least(live, lambda task: len(task.core_ids)).get(tracked.role, 0)


def cores_lent(live: LiveAttempt, tracked: TrackedAttempt) -> int:
    """Return how many of the cores of each replica of the leading role are lent."""
    return least(live, lambda task: task.lent).get(tracked.role, 0)


def own_cores_of(live: LiveAttempt, spec: JobSpec) -> tuple[int, ...]:
    """Return the cores that each replica owns (holds without loan), by role."""
    own = least(live, lambda task: task.own_cores or len(task.core_ids))
    return tuple(own.get(role.name, 0) for role in spec.roles)
