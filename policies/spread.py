"""Placement as far apart as possible."""

from __future__ import annotations

import heapq

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.packing import place_on_node, place_parts_anywhere, room_for_all
from cotenant.core.placement.unschedulable import no_place


class Spread:
    """Place each replica where the most is free, and so has the fewest neighbors: worst fit.

    No paper: a baseline that is common for services, which should share as little as possible, memory bandwidth and
    fate included. It counts shares of a node: GPUs for replicas that request GPUs; cores for the others, which go to
    nodes without GPUs first, as long as there is room. A gang with locality `server` gets the emptiest server.

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
        if gang.locality is Locality.SERVER:
            nodes = room_for_all(gang, ledger)
            taken = _taken(ledger, of_gpus=gang.gpu_milli > 0)[nodes]
            for node in nodes[np.lexsort((nodes, taken))].tolist():
                if (whole := place_on_node(gang, ledger, node)) is not None:
                    return whole
            return no_place(gang, ledger, within=Locality.SERVER)
        offer = place_parts_anywhere(gang, ledger, lambda part, room: _apart(part, room, ledger))
        return no_place(gang, ledger) if offer is None else offer


def _taken(ledger: Ledger, *, of_gpus: bool) -> np.ndarray:
    """Return the share of each node that is taken: GPUs, or cores with GPUs counting as a whole node."""
    if of_gpus:
        return 1 - ledger.free_milli / 1000 / np.maximum(1, ledger.total_gpus)
    return (ledger.total_gpus > 0) + 1 - ledger.free_cores / np.maximum(1, ledger.total_cores)


def _apart(part: Part, room: Counts, ledger: Ledger) -> list[tuple[int, int]] | None:
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
