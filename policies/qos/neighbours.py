"""Who suffers from whom on a node: what neighbours leave of a newcomer's speed, and how many more of them are borne.

Theory of operation. By `core.placing.interference` what others leave of a gang's speed on a server depends on how many
of the server's other GPUs gangs hold. So a promise that needs a share of the full speed bears so many GPUs in the hands
of other gangs, and no more: a number by node, the least over all who are there. The same holds for GPUs that are
shared, where it is the jobs on one GPU that count. Both are kept by node and worked out anew only where the ledger has
changed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import UNLIMITED, Counts, Ledger
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.placement import interference
from cotenant.core.placement.interference import GANG_MILLI_MIN, SHARED_GPU
from cotenant.core.policy.cluster_view import NOBODY, Resident, Scene
from cotenant.policies.qos.speed_bounds import ROUNDING, outlook, promises

Shares = NDArray[np.float64]


class Neighbours:
    """What is known of those who hold something on the nodes of one ledger, by node.

    `gangs_milli` are GPUs that gangs hold, `spare_milli` how many more they may take before somebody's promise breaks;
    below 0 one is broken. For nodes that share GPUs `sharers` counts by GPU the jobs that have a part of it, and
    `needed` is the largest share of its speed that one of them needs.
    """

    def __init__(self, ledger: Ledger) -> None:
        count, wide = len(ledger), ledger.parts_on(np.arange(len(ledger))).shape[1]
        self.gangs_milli: Counts = np.zeros(count, dtype=np.int64)
        self.spare_milli: Counts = np.full(count, UNLIMITED)
        self.sharers: Counts = np.zeros((count, wide), dtype=np.int64)
        self.needed: Shares = np.zeros((count, wide))
        self.ledger = ledger
        self._mark = -1
        self._shares: dict[str, tuple[Resident, float]] = {}

    def follow(self, scene: Scene) -> None:
        """Look again at the nodes on which something has changed since."""
        mark = self.ledger.mark
        if mark == self._mark:
            return
        changed = self.ledger.changed_since(self._mark) if self._mark >= 0 else None
        if not mark:
            scene, changed = NOBODY, np.zeros(0, dtype=np.int64)  # nothing was ever taken
        for node in range(len(self.ledger)) if changed is None else changed.tolist():
            self._look(node, scene)
        self._mark = mark

    def broken_by(self, scene: Scene, own_milli: dict[int, int]) -> list[str]:
        """Name those who would not bear so many GPUs more in the hands of another gang, by node."""
        return sorted(
            {
                one.gang.job_id
                for node, milli in own_milli.items()
                for one in scene.on(node)
                if self._bears(one, node) < milli
            }
        )

    def shared_with(self, scene: Scene, nodes: list[int]) -> list[str]:
        """Name those with a promise who have parts of GPUs on some nodes."""
        return sorted(
            {
                one.gang.job_id
                for node in nodes
                for one in scene.on(node)
                if self.share(one, scene.now) and any(held.shares for held in one.holdings if held.node == node)
            }
        )

    def share(self, resident: Resident, now: float) -> float:
        """The share of its speed that a resident needs; 0 where it promises nothing, or cannot keep it anyway."""
        if not promises(resident.gang.spec):
            return 0.0
        known = self._shares.get(resident.gang.job_id)
        if known and known[0].since_seconds == resident.since_seconds and known[0].gang.spec == resident.gang.spec:
            return known[1]
        needed = share_of(resident, now, self.ledger)
        if len(self._shares) > 2 * len(self.ledger) * WHOLE_GPU_MILLI // 100:
            self._shares.clear()
        self._shares[resident.gang.job_id] = resident, needed
        return needed

    def _look(self, node: int, scene: Scene) -> None:
        gangs, binding, sharing = 0, [], []
        for one in scene.on(node):
            gangs += _milli(one, node) if one.gang.gpu_milli >= GANG_MILLI_MIN else 0
            if needed := self.share(one, scene.now):
                binding.append(one)
            for held in one.holdings:
                if held.node == node and held.shares:
                    sharing += [(gpu, needed) for gpu, milli in set(held.shares) if milli < WHOLE_GPU_MILLI]
        self.gangs_milli[node] = gangs
        self.spare_milli[node] = min([self._bears(one, node) for one in binding], default=int(UNLIMITED))
        self.sharers[node], self.needed[node] = 0, 0.0
        for gpu, needed in sharing:
            self.sharers[node, gpu] += 1
            self.needed[node, gpu] = max(self.needed[node, gpu], needed)

    def _bears(self, one: Resident, node: int) -> int:
        """How many GPUs more, in thousandths, gangs may take on a node before a resident's promise breaks."""
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


def share_of(resident: Resident, now: float, ledger: Ledger) -> float:
    """The share of its undisturbed speed that a resident needs where it is; 0: none, for it cannot be kept anyway."""
    gang, ran = resident.gang, max(0.0, now - resident.since_seconds)
    told = gang.estimate.remaining_seconds
    if told is not None and ran:  # what is left now and what was done since are what there was to do when it began
        gang = replace(gang, estimate=replace(gang.estimate, remaining_seconds=told + ran))
    view = outlook(gang, resident.since_seconds)
    nodes = sorted({held.node for held in resident.holdings if held.gpus or held.shares})
    needed = view.share(max(1, len(nodes))) / across_racks(nodes, gang.gpu_milli, ledger)
    return 0.0 if needed > 1 + ROUNDING else min(1.0, needed)


def across_racks(nodes: list[int], gpu_milli: int, ledger: Ledger) -> float:
    """What is left of a gang's speed where it is in more racks than would have to be: as much as across servers [R]."""
    racks = {int(ledger.rack_numbers[node]) for node in nodes}
    if len(racks) < 2:
        return 1.0
    most = int(np.bincount(ledger.rack_numbers, ledger.total_gpus).max()) * WHOLE_GPU_MILLI
    return interference.TWO_SERVERS if len(racks) > max(1, -(-gpu_milli // most)) else 1.0


def servers_of(resident: Resident) -> int:
    """Over how many servers its GPUs are."""
    return len({held.node for held in resident.holdings if held.gpus or held.shares})


def _milli(resident: Resident, node: int) -> int:
    return sum(
        held.gpus * WHOLE_GPU_MILLI + sum(milli for _, milli in held.shares)
        for held in resident.holdings
        if held.node == node
    )


def shareable(neighbours: Neighbours, needed: float, *, own: bool, kind: bool) -> NDArray[np.bool_]:
    """Mark the GPUs that one job more may share, by node: neither its promise (`own`) nor theirs (`kind`) breaks."""
    left = SHARED_GPU ** neighbours.sharers.astype(np.float64)
    allowed = np.ones_like(left, dtype=np.bool_)
    if own:
        allowed &= left >= needed - ROUNDING
    if kind:
        allowed &= left >= neighbours.needed - ROUNDING
    return allowed
