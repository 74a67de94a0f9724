"""Putting gangs on nodes: the steps that placement policies have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Overcommitted, Share
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.capacity_shortage import could_hold

FIELD_BITS = 20  # more GPUs or cores no node has
UNLIMITED_LOSS = np.int64(2**62)
FEW_NODES = 8  # are found one after the other
Nodes = NDArray[np.int64]
Marks = NDArray[np.bool_]
Placer = Callable[[Part, Counts], list[tuple[int, int]] | None]


def hardest_first(gang: Gang) -> list[int]:
    """Number the parts of a gang, those that fit on the fewest nodes first: GPUs, then a type, then cores.

    >>> ps, worker = Part("ps", 1, Demand(cores=4)), Part("worker", 2, Demand(gpu_milli=1000, cores=2))
    >>> hardest_first(Gang("a", (ps, worker)))
    [1, 0]
    """

    def hardness(number: int) -> tuple[int, bool, int, int, int]:
        demand = gang.parts[number].demand
        return -demand.gpu_milli, not demand.gpu_type, -demand.cores, -demand.memory_bytes, number

    return sorted(range(len(gang.parts)), key=hardness)


def part_orders(gang: Gang) -> list[list[int]]:
    """Return the orders in which to try the parts of a gang: the hardest first, then those that need a GPU type first.

    The second helps where a large part that may have any GPU would take the only ones of the type that a smaller part
    needs.

    >>> ps, worker = Part("ps", 1, Demand(1000)), Part("worker", 2, Demand(500, gpu_type="a100"))
    >>> part_orders(Gang("a", (ps, worker)))
    [[0, 1], [1, 0]]
    """
    hardest = hardest_first(gang)
    typed = sorted(hardest, key=lambda number: not gang.parts[number].demand.gpu_type)
    return [hardest] if typed == hardest else [hardest, typed]


def room_for_all(gang: Gang, ledger: Ledger, *, empty: bool = False, everywhere: bool = False) -> Nodes:
    """Number the nodes that could take all of a gang now, or if they were `empty`; `everywhere`: closed ones too."""
    return np.flatnonzero(able_to_hold(gang, ledger, empty=empty, everywhere=everywhere))


def able_to_hold(gang: Gang, ledger: Ledger, *, empty: bool = False, everywhere: bool = False) -> Marks:
    """Mark the nodes that could take all of a gang now, or if they were `empty`; `everywhere`: closed ones too.

    Exact, save for shares of GPUs in several sizes: whether those fit only `on_one` tells.
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
    """Unmark nodes that do not take so many replicas now: as `Ledger.room` counts, without dividing, which is slow."""
    nodes &= ledger.open
    there = (ledger.free_gpus, ledger.free_cores, ledger.free_memory)
    for free, need in zip(there, (demand.gpu_milli // WHOLE_GPU_MILLI, demand.cores, demand.memory_bytes), strict=True):
        if need:
            nodes &= free >= need * replicas
    if demand.gpu_milli and demand.gpu_type:
        nodes &= ledger.of_type(demand.gpu_type)


def _together(gang: Gang) -> Demand:
    """Sum a gang up as if it were one replica; shares of GPUs are left to be tried."""
    whole = sum(part.replicas * (part.demand.gpu_milli // WHOLE_GPU_MILLI) for part in gang.parts)
    return Demand(whole * WHOLE_GPU_MILLI, gang.cores, gang.memory_bytes)


def could_hold_all(gang: Gang, ledger: Ledger) -> bool:
    """Tell whether some node that takes work could hold all of a gang if it were empty."""
    if len(gang.parts) == 1:
        return could_hold(gang.parts[0], ledger, alone=True)
    nodes = room_for_all(gang, ledger, empty=True)
    shapes = {ledger.shapes[node] for node in nodes.tolist()}
    return any(on_one(gang, empty_node(shape), 0) is not None for shape in shapes)


def empty_node(shape: NodeShape) -> Ledger:
    """Make a ledger of one empty node."""
    return Ledger([shape])


def on_one(gang: Gang, ledger: Ledger, node: int) -> Offer | None:
    """Put all of a gang on one node, where `room_for_all` sees room; None where shares of GPUs do not fit after all."""
    offer = tuple(Share(node, number, gang.parts[number].replicas) for number in hardest_first(gang))
    if len(gang.parts) > 1 and ledger.parts_of(node):
        with ledger.attempt() as attempt:
            try:
                for share in offer:
                    attempt.take(node, gang.parts[share.part].demand, share.replicas)
            except Overcommitted:
                return None
    return offer


def best_place(gang: Gang, ledger: Ledger, able: Marks, crowded: Marks | None = None) -> Offer | None:
    """Put all of a gang on the node that loses least, of those that are marked as `able_to_hold` it."""
    while (best := best_of(ledger, able, crowded)) is not None:
        if (offer := on_one(gang, ledger, best)) is not None:
            return offer
        able[best] = False
    return None


def best_of(ledger: Ledger, able: Marks, crowded: Marks | None = None) -> int | None:
    """Choose of the marked nodes as `best_fit` does; None where there are none.

    What it compares one after the other stands in one number here, for where many nodes are marked, to number and to
    sift them is what costs most.
    """
    if not able.any():
        return None
    loses: Counts = (ledger.free_gpus << FIELD_BITS) + ledger.free_cores
    for rank, mark in ((2, ledger.has_gpus if ledger.mixed else None), (1, crowded)):
        if mark is not None:
            loses += mark.astype(np.int64) << (2 * FIELD_BITS + rank)
    return int(np.where(able, loses, UNLIMITED_LOSS).argmin())


def on_many(gang: Gang, ledger: Ledger, place: Placer, order: Sequence[int] | None = None) -> Offer | None:
    """Put a gang's parts where `place` says, in order, by default the hardest first; None where one finds no room."""
    offer: list[Share] = []
    with ledger.attempt() as attempt:
        numbers = hardest_first(gang) if order is None else order
        for number in numbers:
            part = gang.parts[number]
            placed = place(part, ledger.room(part.demand))
            if placed is None:
                return None
            offer += [Share(node, number, replicas) for node, replicas in placed]
            if number != numbers[-1]:
                for node, replicas in placed:
                    attempt.take(node, part.demand, replicas)
    return tuple(offer)


def on_any(gang: Gang, ledger: Ledger, place: Placer) -> Offer | None:
    """Put a gang's parts where `place` says or, where they get in each other's way there, on the fewest nodes.

    `place` sees one part at a time, and may give it the room that another part needs.
    """
    offer = on_many(gang, ledger, place)
    return on_fewest(gang, ledger) if offer is None and len(gang.parts) > 1 else offer


def fill(room: Counts, nodes: Sequence[int] | Counts, replicas: int) -> list[tuple[int, int]] | None:
    """Put replicas on nodes in the given order, as many on each as it has room for; None where they do not all fit.

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


def on_fewest(gang: Gang, ledger: Ledger, where: Marks | None = None) -> Offer | None:
    """Put a gang on the fewest nodes, or the fewest of some; parts go where others of the gang are."""
    for order in part_orders(gang):
        used: set[int] = set()

        def place(part: Part, room: Counts, used: set[int] = used) -> list[tuple[int, int]] | None:
            placed = fewest(part, room if where is None else np.where(where, room, 0), ledger, used)
            used.update(node for node, _ in placed or ())
            return placed

        if (offer := on_many(gang, ledger, place, order)) is not None:
            return offer
    return None


def best_fit(ledger: Ledger, nodes: Nodes, crowded: Marks | None = None) -> int:
    """Choose the node that loses least: no GPUs, then the fewest free, then the fewest free cores, then the first.

    Those that are `crowded`, by node, come after all others that have GPUs.
    """
    for left in (ledger.has_gpus, crowded, ledger.free_gpus, ledger.free_cores):
        if left is not None and len(nodes) > 1:
            here = left[nodes]
            least = here.min()
            if least != here.max():  # to look once more is cheaper than to choose all
                nodes = nodes[here == least]
    return int(nodes[0])


def fewest(part: Part, room: Counts, ledger: Ledger, used: set[int]) -> list[tuple[int, int]] | None:
    """Put a part on the fewest nodes: where its gang is already, then the most room first, the rest best fit."""
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
    assert best is not None, "the last of them is able"
    return [*whole, (best, rest)]


def _order(part: Part, room: Counts, ledger: Ledger, used: set[int]) -> Counts:
    """Rank nodes by one number, the least first; of equals the first comes first.

    Those come first where the gang is already; for a part without GPUs, those where the fewest might be stranded; then
    those with the most room, the fewest free GPUs, and the fewest free cores.
    """
    order = -room
    if not part.demand.gpu_milli:  # GPUs are at stake
        at_stake = np.where(ledger.has_gpus, 1 + ledger.free_gpus, 0) if ledger.mixed else ledger.free_gpus
        order += at_stake << FIELD_BITS
    else:
        order = (order << FIELD_BITS) + ledger.free_gpus
    order = (order << FIELD_BITS) + ledger.free_cores
    if used:
        order[list(used)] -= UNLIMITED_LOSS // 2
    return np.where(room > 0, order, UNLIMITED_LOSS)


def _first(part: Part, room: Counts, order: Counts) -> list[tuple[int, int]]:
    """Fill the nodes in their order, one by one where they are few. There is enough room."""
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
    if left < len(nodes):  # for each has room for one at least
        last = np.partition(order[nodes], left - 1)[left - 1]
        nodes = nodes[order[nodes] <= last]
    nodes = nodes[np.argsort(order[nodes], kind="stable")]
    return [*placed, *(fill(room, nodes, left) or ())]
