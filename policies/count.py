"""Counting alone."""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.packing import in_node_order, on_any
from cotenant.core.placement.unschedulable import no_place


class Count:
    """Put replicas anywhere: a gang of single GPUs starts as soon as the cluster has so many free.

    No paper: a baseline, and the bound that no policy with an eye for locality can beat. Nodes are filled in their
    order, a gang's wish for locality is passed over.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=1, cores=8), NodeShape(gpus=2, cores=8)])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in Count().place(gang, ledger, np.random.default_rng(0))]
    [(0, 1), (1, 1)]
    """

    name = "count"
    api_version = 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer the first free places, whatever the nodes."""
        offer = on_any(gang, ledger, lambda part, room: in_node_order(room, part.replicas))
        return no_place(gang, ledger) if offer is None else offer
