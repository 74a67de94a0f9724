"""Interference on a node: what neighbors leave of a new gang's speed, and how many more the present jobs tolerate.

Theory of operation. In `cotenant.core.placement.interference`, what other gangs leave of a gang's speed on a server
depends on how many of the server's other GPUs they hold. So an objective that needs a share of the full speed tolerates
a certain number of GPUs held by other gangs, and no more: one number for each node, the minimum over all jobs there.
The same holds for shared GPUs, where the jobs on one GPU count. Both are kept by node and updated only where the ledger
has changed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import UNLIMITED, Counts, Ledger
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.placement import interference
from cotenant.core.placement.interference import GANG_MILLI_MIN, SHARED_GPU
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView, RunningJob
from cotenant.policies.qos.speed_bounds import ROUNDING, has_objective, speed_bounds

Shares = NDArray[np.float64]


class Neighbours:
    """The jobs on the nodes of one ledger, summarized by node.

    `gangs_milli` are GPUs held by gangs, `spare_milli` how many more they may take before an objective is violated;
    below 0 one is. For nodes with shared GPUs `sharers` counts for each GPU the jobs with a share, and `needed` is the
    largest share of its speed that one of them needs.
    """

    def __init__(self, ledger: Ledger) -> None:
        count, wide = len(ledger), ledger.parts_on(np.arange(len(ledger))).shape[1]
        self.gangs_milli: Counts = np.zeros(count, dtype=np.int64)
        self.spare_milli: Counts = np.full(count, UNLIMITED)
        self.sharers: Counts = np.zeros((count, wide), dtype=np.int64)
        self.needed: Shares = np.zeros((count, wide))
        self.ledger = ledger
        self._mark = -1
        self._shares: dict[str, tuple[RunningJob, float]] = {}

    def update(self, cluster_view: ClusterView) -> None:
        """Update the nodes on which something has changed."""
        mark = self.ledger.mark
        if mark == self._mark:
            return
        changed = self.ledger.changed_since(self._mark) if self._mark >= 0 else None
        if not mark:
            cluster_view, changed = EMPTY_CLUSTER, np.zeros(0, dtype=np.int64)  # nothing was ever taken
        for node in range(len(self.ledger)) if changed is None else changed.tolist():
            self._look(node, cluster_view)
        self._mark = mark

    def violated_by(self, cluster_view: ClusterView, own_milli: dict[int, int]) -> list[str]:
        """Return the jobs that do not tolerate this many more GPUs of another gang, by node."""
        return sorted(
            {
                one.gang.job_id
                for node, milli in own_milli.items()
                for one in cluster_view.jobs_on(node)
                if self._headroom_milli(one, node) < milli
            }
        )

    def shared_with(self, cluster_view: ClusterView, nodes: list[int]) -> list[str]:
        """Return the jobs with an objective that hold shares of GPUs on some nodes."""
        return sorted(
            {
                one.gang.job_id
                for node in nodes
                for one in cluster_view.jobs_on(node)
                if self.share(one, cluster_view.now) and any(held.shares for held in one.holdings if held.node == node)
            }
        )

    def share(self, running_job: RunningJob, now: float) -> float:
        """Return the share of its speed that a running job needs; 0 without an objective that it can meet."""
        if not has_objective(running_job.gang.spec):
            return 0.0
        known = self._shares.get(running_job.gang.job_id)
        if (
            known
            and known[0].since_seconds == running_job.since_seconds
            and known[0].gang.spec == running_job.gang.spec
        ):
            return known[1]
        needed = share_of(running_job, now, self.ledger)
        if len(self._shares) > 2 * len(self.ledger) * WHOLE_GPU_MILLI // 100:
            self._shares.clear()
        self._shares[running_job.gang.job_id] = running_job, needed
        return needed

    def _look(self, node: int, cluster_view: ClusterView) -> None:
        gangs, binding, sharing = 0, [], []
        for one in cluster_view.jobs_on(node):
            gangs += _milli(one, node) if one.gang.gpu_milli >= GANG_MILLI_MIN else 0
            if needed := self.share(one, cluster_view.now):
                binding.append(one)
            for held in one.holdings:
                if held.node == node and held.shares:
                    sharing += [(gpu, needed) for gpu, milli in set(held.shares) if milli < WHOLE_GPU_MILLI]
        self.gangs_milli[node] = gangs
        self.spare_milli[node] = min([self._headroom_milli(one, node) for one in binding], default=int(UNLIMITED))
        self.sharers[node], self.needed[node] = 0, 0.0
        for gpu, needed in sharing:
            self.sharers[node, gpu] += 1
            self.needed[node, gpu] = max(self.needed[node, gpu], needed)

    def _headroom_milli(self, one: RunningJob, node: int) -> int:
        """Return how many more GPUs, in thousandths, gangs may take on a node before a job's objective is violated."""
        needed = self._shares[one.gang.job_id][1] if one.gang.job_id in self._shares else 0.0
        if not needed or one.gang.gpu_milli < GANG_MILLI_MIN:
            return int(UNLIMITED)
        servers = servers_of(one)
        if needed <= interference.worst(servers) + ROUNDING:
            return int(UNLIMITED)
        own = _milli(one, node)
        if not own:
            return int(UNLIMITED)
        rest = int(self.ledger.total_gpus[node]) * WHOLE_GPU_MILLI - own
        borne = rest * (1 - needed) / (1 - interference.worst(servers))
        return int(borne + WHOLE_GPU_MILLI * ROUNDING) - (int(self.gangs_milli[node]) - own)


def share_of(running_job: RunningJob, now: float, ledger: Ledger) -> float:
    """Return the share of its undisturbed speed that a job needs in its place; 0 if its objective is lost anyway."""
    gang, ran = running_job.gang, max(0.0, now - running_job.since_seconds)
    told = gang.estimate.remaining_seconds
    if told is not None and ran:  # the remaining time plus the time since the start is the remaining time at the start
        gang = replace(gang, estimate=replace(gang.estimate, remaining_seconds=told + ran))
    view = speed_bounds(gang, running_job.since_seconds)
    nodes = sorted({held.node for held in running_job.holdings if held.gpus or held.shares})
    needed = view.share(max(1, len(nodes))) / across_racks(nodes, gang.gpu_milli, ledger)
    return 0.0 if needed > 1 + ROUNDING else min(1.0, needed)


def across_racks(nodes: list[int], gpu_milli: int, ledger: Ledger) -> float:
    """Return the speed left to a gang that spans more racks than necessary: as much as across servers [R]."""
    racks = {int(ledger.rack_numbers[node]) for node in nodes}
    if len(racks) < 2:
        return 1.0
    most = int(np.bincount(ledger.rack_numbers, ledger.total_gpus).max()) * WHOLE_GPU_MILLI
    return interference.TWO_SERVERS if len(racks) > max(1, -(-gpu_milli // most)) else 1.0


def servers_of(running_job: RunningJob) -> int:
    """Return the number of servers that hold its GPUs."""
    return len({held.node for held in running_job.holdings if held.gpus or held.shares})


def _milli(running_job: RunningJob, node: int) -> int:
    return sum(
        held.gpus * WHOLE_GPU_MILLI + sum(milli for _, milli in held.shares)
        for held in running_job.holdings
        if held.node == node
    )


def shareable(neighbours: Neighbours, needed: float, *, own: bool, neighbors: bool) -> NDArray[np.bool_]:
    """Mark the GPUs that one more job may share without violating its `own` or its `neighbors`' objectives."""
    left = SHARED_GPU ** neighbours.sharers.astype(np.float64)
    allowed = np.ones_like(left, dtype=np.bool_)
    if own:
        allowed &= left >= needed - ROUNDING
    if neighbors:
        allowed &= left >= neighbours.needed - ROUNDING
    return allowed
