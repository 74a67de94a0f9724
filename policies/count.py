"""Placement by counting alone."""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.assembly import assemble, in_node_order


class Count:
    """Place replicas anywhere: a gang of single GPUs starts as soon as the cluster has enough free GPUs.

    No paper: a baseline, and the bound that no locality-aware policy can beat. Nodes are filled in order; a gang's
    requested locality is ignored.

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
        """Offer the first free places in node order."""
        return assemble(gang, ledger, in_node_order)
