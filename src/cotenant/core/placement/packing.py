"""Packing gangs onto nodes: the steps that placement policies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted, Share
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.capacity_shortage import could_hold

FIELD_BITS = 20  # no node has more GPUs or cores
UNLIMITED_LOSS = np.int64(2**62)
FEW_NODES = 8  # up to this many nodes are found one by one
Nodes = NDArray[np.int64]
Marks = NDArray[np.bool_]
Placer = Callable[[Part, Counts], list[tuple[int, int]] | None]


def hardest_first(gang: Gang) -> list[int]:
    """Return the parts of a gang, those that fit on the fewest nodes first: GPUs, then a type, then cores.

    >>> ps, worker = Part("ps", 1, Demand(cores=4)), Part("worker", 2, Demand(gpu_milli=1000, cores=2))
    >>> hardest_first(Gang("a", (ps, worker)))
    [1, 0]
    """

    def hardness(number: int) -> tuple[int, bool, int, int, int]:
        demand = gang.parts[number].demand
        return -demand.gpu_milli, not demand.gpu_type, -demand.cores, -demand.memory_bytes, number

    return sorted(range(len(gang.parts)), key=hardness)


def part_orders(gang: Gang) -> list[list[int]]:
    """Return the orders in which to try the parts of a gang: hardest first, then those with a GPU type first.

    The second helps if a large part that may have any GPU would take the only ones of the type that a smaller part
    needs.

    >>> ps, worker = Part("ps", 1, Demand(1000)), Part("worker", 2, Demand(500, gpu_type="a100"))
    >>> part_orders(Gang("a", (ps, worker)))
    [[0, 1], [1, 0]]
    """
    hardest = hardest_first(gang)
    typed = sorted(hardest, key=lambda number: not gang.parts[number].demand.gpu_type)
    return [hardest] if typed == hardest else [hardest, typed]


def room_for_all(gang: Gang, ledger: Ledger, *, empty: bool = False, everywhere: bool = False) -> Nodes:
    """Return the nodes that could hold all of a gang now, or if they were `empty`; `everywhere`: closed ones too."""
    return np.flatnonzero(able_to_hold(gang, ledger, empty=empty, everywhere=everywhere))


def able_to_hold(gang: Gang, ledger: Ledger, *, empty: bool = False, everywhere: bool = False) -> Marks:
    """Return which nodes could hold all of a gang now, or if they were `empty`; `everywhere`: closed ones too.

    Exact, except for shares of GPUs in several sizes: only `place_on_node` can tell whether those fit.
    """
    asked = [(part.demand, part.replicas) for part in gang.parts]
    if len(asked) > 1:
        asked.append((_together(gang), 1))
    able = np.ones(len(ledger), dtype=np.bool_)
    for demand, replicas in asked:
        if empty or everywhere or not replicas or demand.gpu_milli % WHOLE_GPU_MILLI:
            able &= ledger.room(demand, empty=empty, everywhere=everywhere) >= replicas
        else:
            _leave_able(able, demand, replicas, ledger)
    return able


def _leave_able(nodes: Marks, demand: Demand, replicas: int, ledger: Ledger) -> None:
    """Unmark nodes that do not fit this many replicas now, as `Ledger.room` counts, but without slow division."""
    nodes &= ledger.open
    there = (ledger.free_gpus, ledger.free_cores, ledger.free_memory)
    for free, need in zip(there, (demand.gpu_milli // WHOLE_GPU_MILLI, demand.cores, demand.memory_bytes), strict=True):
        if need:
            nodes &= free >= need * replicas
    if demand.gpu_milli and demand.gpu_type:
        nodes &= ledger.of_type(demand.gpu_type)


def _together(gang: Gang) -> Demand:
    """Return a gang's total as if it were one replica; shares of GPUs are left to be tried."""
    whole = sum(part.replicas * (part.demand.gpu_milli // WHOLE_GPU_MILLI) for part in gang.parts)
    return Demand(whole * WHOLE_GPU_MILLI, gang.cores, gang.memory_bytes)


def could_hold_all(gang: Gang, ledger: Ledger) -> bool:
    """Return whether a node that takes work could hold all of a gang if it were empty."""
    if len(gang.parts) == 1:
        return could_hold(gang.parts[0], ledger, alone=True)
    nodes = room_for_all(gang, ledger, empty=True)
    shapes = {ledger.shapes[node] for node in nodes.tolist()}
    return any(place_on_node(gang, empty_node(shape), 0) is not None for shape in shapes)


def empty_node(shape: NodeShape) -> Ledger:
    """Return a ledger of one empty node."""
    return Ledger([shape])


def place_on_node(gang: Gang, ledger: Ledger, node: int) -> Offer | None:
    """Place all of a gang on one node, where `room_for_all` sees room; None if shares of GPUs do not fit after all."""
    offer = tuple(Share(node, number, gang.parts[number].replicas) for number in hardest_first(gang))
    if len(gang.parts) > 1 and ledger.parts_of(node):
        with ledger.transaction() as transaction:
            try:
                for share in offer:
                    transaction.take(node, gang.parts[share.part].demand, share.replicas)
            except Overcommitted:
                return None
    return offer


def best_place(gang: Gang, ledger: Ledger, able: Marks, crowded: Marks | None = None) -> Offer | None:
    """Place all of a gang on the node that loses least, of those marked as `able_to_hold` it."""
    while (best := best_of(ledger, able, crowded)) is not None:
        if (offer := place_on_node(gang, ledger, best)) is not None:
            return offer
        able[best] = False
    return None


def best_of(ledger: Ledger, able: Marks, crowded: Marks | None = None) -> int | None:
    """Return the best of the marked nodes, by the criteria of `best_fit`; None if no node is marked.

    All criteria are packed into one number here: with many marked nodes, numbering and filtering them is what costs
    most.
    """
    if not able.any():
        return None
    loses: Counts = (ledger.free_gpus << FIELD_BITS) + ledger.free_cores
    for rank, mark in ((2, ledger.has_gpus if ledger.mixed else None), (1, crowded)):
        if mark is not None:
            loses += mark.astype(np.int64) << (2 * FIELD_BITS + rank)
    return int(np.where(able, loses, UNLIMITED_LOSS).argmin())


def place_parts(gang: Gang, ledger: Ledger, place: Placer, order: Sequence[int] | None = None) -> Offer | None:
    """Place a gang's parts where `place` says, in order, by default hardest first; None if one does not fit."""
    offer: list[Share] = []
    with ledger.transaction() as transaction:
        numbers = hardest_first(gang) if order is None else order
        for number in numbers:
            part = gang.parts[number]
            placed = place(part, ledger.room(part.demand))
            if placed is None:
                return None
            offer += [Share(node, number, replicas) for node, replicas in placed]
            if number != numbers[-1]:
                for node, replicas in placed:
                    transaction.take(node, part.demand, replicas)
    return tuple(offer)


def place_parts_anywhere(gang: Gang, ledger: Ledger, place: Placer) -> Offer | None:
    """Place a gang's parts where `place` says or, if they get in each other's way there, on the fewest nodes.

    `place` sees one part at a time, and may give it the room that another part needs.
    """
    offer = place_parts(gang, ledger, place)
    return place_on_fewest(gang, ledger) if offer is None and len(gang.parts) > 1 else offer


def fill(room: Counts, nodes: Sequence[int] | Counts, replicas: int) -> list[tuple[int, int]] | None:
    """Place replicas on nodes in the given order, as many on each as fit; None if they do not all fit.

    >>> fill(np.array([2, 0, 3]), [0, 1, 2], 4)
    [(0, 2), (2, 2)]
    """
    order = np.asarray(nodes, dtype=np.int64)
    order = order[room[order] > 0]
    reach = np.cumsum(np.minimum(room[order], replicas))
    if not replicas:
        return []
    if not len(reach) or reach[-1] < replicas:
        return None
    last = int(np.searchsorted(reach, replicas))
    placed = [(int(node), int(room[node])) for node in order[:last]]
    before = int(reach[last - 1]) if last else 0
    return [*placed, (int(order[last]), replicas - before)]


def in_node_order(room: Counts, replicas: int) -> list[tuple[int, int]] | None:
    """Fill nodes from the first on."""
    return fill(room, np.flatnonzero(room > 0), replicas)


def place_on_fewest(gang: Gang, ledger: Ledger, where: Marks | None = None) -> Offer | None:
    """Place a gang on the fewest nodes, or the fewest of some; parts go where others of the gang are."""
    for order in part_orders(gang):
        used: set[int] = set()

        def place(part: Part, room: Counts, used: set[int] = used) -> list[tuple[int, int]] | None:
            placed = fewest(part, room if where is None else np.where(where, room, 0), ledger, used)
            used.update(node for node, _ in placed or ())
            return placed

        if (offer := place_parts(gang, ledger, place, order)) is not None:
            return offer
    return None


def best_fit(ledger: Ledger, nodes: Nodes, crowded: Marks | None = None) -> int:
    """Return the node that loses least: no GPUs, then the fewest free, then the fewest free cores, then the first.

    `crowded` nodes come after all others that have GPUs.
    """
    for left in (ledger.has_gpus, crowded, ledger.free_gpus, ledger.free_cores):
        if left is not None and len(nodes) > 1:
            here = left[nodes]
            least = here.min()
            if least != here.max():  # checking is cheaper than selecting all
                nodes = nodes[here == least]
    return int(nodes[0])


def fewest(part: Part, room: Counts, ledger: Ledger, used: set[int]) -> list[tuple[int, int]] | None:
    """Place a part on the fewest nodes: where its gang is already, then most room first, the rest best fit."""
    room = np.minimum(room, part.replicas)
    if not part.replicas:
        return []
    if room.sum() < part.replicas:
        return None
    placed = _first(part, room, _order(part, room, ledger, used))
    if not part.demand.gpu_milli:
        return placed
    *whole, (_, rest) = placed
    able = room >= rest
    able[[node for node, _ in whole]] = False
    best = best_of(ledger, able)
    assert best is not None, "the last of them is a candidate"
    return [*whole, (best, rest)]


def _order(part: Part, room: Counts, ledger: Ledger, used: set[int]) -> Counts:
    """Return the rank of nodes as one number, the least first; of equals the first comes first.

    Nodes that the gang is on come first; for a part without GPUs, those where it may strand the fewest GPUs; then those
    with the most room, the fewest free GPUs, and the fewest free cores.
    """
    order = -room
    if not part.demand.gpu_milli:  # GPUs may be stranded
        at_stake = np.where(ledger.has_gpus, 1 + ledger.free_gpus, 0) if ledger.mixed else ledger.free_gpus
        order += at_stake << FIELD_BITS
    else:
        order = (order << FIELD_BITS) + ledger.free_gpus
    order = (order << FIELD_BITS) + ledger.free_cores
    if used:
        order[list(used)] -= UNLIMITED_LOSS // 2
    return np.where(room > 0, order, UNLIMITED_LOSS)


def _first(part: Part, room: Counts, order: Counts) -> list[tuple[int, int]]:
    """Fill the nodes in their order, one by one while they are few. There must be enough room."""
    placed: list[tuple[int, int]] = []
    left = part.replicas
    for _ in range(FEW_NODES):
        node = int(order.argmin())
        count = min(int(room[node]), left)
        placed.append((node, count))
        left -= count
        if not left:
            return placed
        order[node] = UNLIMITED_LOSS
    nodes = np.flatnonzero(order < UNLIMITED_LOSS)
    if left < len(nodes):  # each has room for at least one
        last = np.partition(order[nodes], left - 1)[left - 1]
        nodes = nodes[order[nodes] <= last]
    nodes = nodes[np.argsort(order[nodes], kind="stable")]
    return [*placed, *(fill(room, nodes, left) or ())]
