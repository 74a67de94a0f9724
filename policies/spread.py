"""Placement as far apart as possible."""

from __future__ import annotations

import heapq

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.assembly import Places, assemble
from cotenant.core.placement.scores import Candidates, Weights, share_taken


class Spread:
    """Place each replica where the most is free, and so has the fewest neighbors: worst fit.

    No paper: a baseline that is common for services, which should share as little as possible, memory bandwidth and
    fate included. It counts shares of a node: GPUs for replicas that request GPUs; cores for the others, which go to
    nodes without GPUs first, as long as there is room. A gang with locality `server` gets the emptiest server. Other
    gangs are placed replica by replica, because each raises the share that is taken of its node.

    >>> from cotenant.core.model.gang import Demand
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=4, cores=8), NodeShape(gpus=4, cores=8)])
    >>> gang = Gang("a", (Part("worker", 3, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in Spread().place(gang, ledger, np.random.default_rng(0))]
    [(0, 2), (1, 1)]
    """

    name = "spread"
    api_version = 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer the emptiest nodes; refuse only if there is no room."""
        whole: Weights | None = {share_taken: 1} if gang.locality is Locality.SERVER else None
        return assemble(gang, ledger, lambda part, room: _apart(gang, part, room, ledger), whole)


def _apart(gang: Gang, part: Part, room: Counts, ledger: Ledger) -> Places | None:
    """Return places for one replica after another, each on the node with the smallest share taken by then."""
    nodes = np.flatnonzero(room)
    if int(np.minimum(room[nodes], part.replicas).sum()) < part.replicas:
        return None
    demand = part.demand
    of_gpus = demand.gpu_milli > 0
    one, whole = (
        (demand.gpu_milli, 1000 * ledger.total_gpus[nodes]) if of_gpus else (demand.cores, ledger.total_cores[nodes])
    )
    each = (one / np.maximum(1, whole)).tolist()
    numbers, left = nodes.tolist(), room[nodes].tolist()
    now = share_taken(Candidates(gang, ledger, room, part))[nodes].tolist()
    heap = list(zip(now, numbers, range(len(numbers)), strict=True))
    heapq.heapify(heap)
    placed: dict[int, int] = {}
    for _ in range(part.replicas):
        taken, node, at = heap[0]
        placed[node] = placed.get(node, 0) + 1
        if placed[node] < left[at]:
            heapq.heapreplace(heap, (taken + each[at], node, at))
        else:
            heapq.heappop(heap)
    return sorted(placed.items())
