"""The first place that fits."""

from __future__ import annotations

from cotenant.core.placement.scored_policy import ScoredPolicy


class FirstFit(ScoredPolicy):
    """Place a gang on the first node with room for all of it, else let its replicas fill nodes in order.

    No paper: a baseline, the quickest rule that keeps small gangs together. A gang never waits for a better place,
    unless its locality is `server`. It has no scorers, so all nodes are equal.

    >>> import numpy as np
    >>> from cotenant.core.capacity.ledger import Ledger
    >>> from cotenant.core.model.gang import Demand, Gang, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=1, cores=8), NodeShape(gpus=2, cores=8)])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in FirstFit().place(gang, ledger, np.random.default_rng(0))]
    [(1, 2)]
    """

    name = "first-fit"
    api_version = 1

    def __init__(self) -> None:
        super().__init__({})
