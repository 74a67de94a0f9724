"""The first place that fits."""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.packing import in_node_order, place_on_node, place_parts_anywhere, room_for_all
from cotenant.core.placement.unschedulable import no_place


class FirstFit:
    """Place a gang on the first node with room for all of it, else let its replicas fill nodes in order.

    No paper: a baseline, the quickest rule that keeps small gangs together. A gang never waits for a better place,
    unless its locality is `server`.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=1, cores=8), NodeShape(gpus=2, cores=8)])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in FirstFit().place(gang, ledger, np.random.default_rng(0))]
    [(1, 2)]
    """

    name = "first-fit"
    api_version = 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer the first node that holds the whole gang, or the first nodes that together do."""
        for node in room_for_all(gang, ledger).tolist():
            if (whole := place_on_node(gang, ledger, node)) is not None:
                return whole
        if gang.locality is Locality.SERVER:
            return no_place(gang, ledger, within=Locality.SERVER)
        offer = place_parts_anywhere(gang, ledger, lambda part, room: in_node_order(room, part.replicas))
        return no_place(gang, ledger) if offer is None else offer
