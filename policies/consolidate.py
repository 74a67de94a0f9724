"""Keeps gangs close together."""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.assembly import place_on_best, place_on_fewest
from cotenant.core.placement.packing import able_to_hold, could_hold_all
from cotenant.core.placement.unschedulable import no_place, quick_shortage


class Consolidate:
    """Keep a gang on one node if a node could hold it, else on the fewest nodes.

    A 16-GPU job used 43.7 % of its GPUs on 2 servers and 28.6 % on 8 (Philly, Jeon et al., ATC 2019 [P]). Locality is
    worth a wait: a gang that would fit on an empty node waits for a node with room, unless its locality is `anywhere`.
    Best fit leaves the largest gaps for other jobs [R]: the node with the fewest GPUs left, then the fewest cores, then
    the lowest number. A larger gang takes whole nodes first and best fit for the rest; racks are ignored.

    Gangs without GPUs avoid GPUs that could still be used: they go to nodes without GPUs, then to nodes whose GPUs are
    taken; they do not wait to be together unless their locality is `server`.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=8, cores=24), NodeShape(gpus=4, cores=24), NodeShape(gpus=0, cores=24)])
    >>> gang = Gang("a", (Part("worker", 4, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in Consolidate().place(gang, ledger, np.random.default_rng(0))]
    [(1, 4)]
    >>> gang = Gang("b", (Part("worker", 2, Demand(cores=4)),))
    >>> [(share.node, share.replicas) for share in Consolidate().place(gang, ledger, np.random.default_rng(0))]
    [(2, 2)]
    """

    name = "consolidate"
    api_version = 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer one node, or the fewest; refuse to spread a gang that one node could hold."""
        together = gang.locality is Locality.SERVER
        if refusal := quick_shortage(gang, ledger, within=Locality.SERVER if together else Locality.ANYWHERE):
            return refusal
        if gang.gpu_milli or together:
            if (offer := place_on_best(gang, ledger, able_to_hold(gang, ledger))) is not None:
                return offer
            if together or (gang.locality is not Locality.ANYWHERE and could_hold_all(gang, ledger)):
                return no_place(gang, ledger, within=Locality.SERVER)
        spread = place_on_fewest(gang, ledger)
        return no_place(gang, ledger) if spread is None else spread
