"""Keeps a gang that requires one rack within one rack.

Few policies consider racks. If another policy's offer spans several racks, it is discarded, and the policy is asked
rack by rack while the other racks are closed, those with the least room first. A policy that considers racks itself is
asked once.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.node_avoidance import only_open
from cotenant.core.placement.unschedulable import fits, no_place
from cotenant.core.policy.protocols import PlacementPolicy


def place_in_one_rack(policy: PlacementPolicy, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
    """Return a policy's offer for a gang, within one rack if the gang requires that.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> from cotenant.policies.count import Count
    >>> ledger = Ledger([NodeShape(gpus=1, cores=2)] * 3, ["r0", "r1", "r1"])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),), Locality.RACK)
    >>> [(share.node, share.replicas) for share in place_in_one_rack(Count(), gang, ledger, np.random.default_rng(0))]
    [(1, 1), (2, 1)]
    """
    answer = policy.place(gang, ledger, rng)
    if gang.locality is not Locality.RACK:
        return answer
    if isinstance(answer, Refusal):  # the whole cluster might hold it, but no rack
        return answer if fits(gang, ledger, within=Locality.RACK, empty=True) else _nowhere(gang, ledger)
    racks, nodes = ledger.rack_numbers, [share.node for share in answer if 0 <= share.node < len(ledger)]
    if len(set(racks[nodes].tolist())) <= 1:
        return answer
    able, free = ledger.open.copy(), np.bincount(racks, ledger.free_milli)
    for rack in sorted(set(racks.tolist()), key=lambda rack: (free[rack], rack)):
        with only_open(ledger, able & (racks == rack)):
            if not fits(gang, ledger, within=Locality.RACK):
                continue
            answer = policy.place(gang, ledger, rng)
        if not isinstance(answer, Refusal):
            return answer
    return _nowhere(gang, ledger)


def _nowhere(gang: Gang, ledger: Ledger) -> Refusal:
    return no_place(gang, ledger, within=Locality.RACK)
