"""As far apart as can be."""

from __future__ import annotations

import heapq

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.packing import on_any, on_one, room_for_all
from cotenant.core.placement.unschedulable import no_place


class Spread:
    """Put each replica where the most is free, and so the fewest neighbours are: worst fit.

    No paper: a baseline that is common for services, which share as little as they can, memory bandwidth and fate. It
    counts in shares of what a node has: GPUs for those who want some; cores for the others, who go to nodes without
    GPUs first, for as long as there is room. A gang that insists on one server gets the emptiest one.

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
        """Offer the emptiest nodes; refuses only what has no place."""
        if gang.locality is Locality.SERVER:
            nodes = room_for_all(gang, ledger)
            taken = _taken(ledger, of_gpus=gang.gpu_milli > 0)[nodes]
            for node in nodes[np.lexsort((nodes, taken))].tolist():
                if (whole := on_one(gang, ledger, node)) is not None:
                    return whole
            return no_place(gang, ledger, within=Locality.SERVER)
        offer = on_any(gang, ledger, lambda part, room: _apart(part, room, ledger))
        return no_place(gang, ledger) if offer is None else offer


def _taken(ledger: Ledger, *, of_gpus: bool) -> np.ndarray:
    """Say which share of each node is taken: of its GPUs, or of its cores with GPUs counting as all of a node."""
    if of_gpus:
        return 1 - ledger.free_milli / 1000 / np.maximum(1, ledger.total_gpus)
    return (ledger.total_gpus > 0) + 1 - ledger.free_cores / np.maximum(1, ledger.total_cores)


def _apart(part: Part, room: Counts, ledger: Ledger) -> list[tuple[int, int]] | None:
    """Put one replica after the other on the node of which the least is taken by then."""
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
    heap = list(zip(_taken(ledger, of_gpus=of_gpus)[nodes].tolist(), numbers, range(len(numbers)), strict=True))
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
