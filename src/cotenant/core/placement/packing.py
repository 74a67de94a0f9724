"""Packing: which nodes could hold a gang, and in which order its parts are placed."""

from __future__ import annotations

from operator import neg

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger, Offer, Overcommitted, Share
from cotenant.core.model.gang import Demand, Gang
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import WHOLE_GPU_MILLI, amounts_of, numbers_of
from cotenant.core.placement.capacity_shortage import could_hold
from cotenant.core.placement.constraint import may_be_on_one_node

Nodes = NDArray[np.int64]
Marks = NDArray[np.bool_]


def hardest_first(gang: Gang) -> list[int]:
    """Return the parts of a gang, those that fit on the fewest nodes first: GPUs, then a type, then cores.

    >>> from cotenant.core.model.gang import Part
    >>> ps, worker = Part("ps", 1, Demand(cores=4)), Part("worker", 2, Demand(gpu_milli=1000, cores=2))
    >>> hardest_first(Gang("a", (ps, worker)))
    [1, 0]
    """

    def hardness(number: int) -> tuple[int, ...]:
        demand = gang.parts[number].demand
        milli, *others = map(neg, numbers_of(demand))
        return milli, not demand.gpu_type, *others, number

    if len(gang.parts) == 1:
        return [0]
    return sorted(range(len(gang.parts)), key=hardness)


def part_orders(gang: Gang) -> list[list[int]]:
    """Return the orders in which to try the parts of a gang: hardest first, then those with a GPU type first.

    The second helps if a large part that may have any GPU would take the only ones of the type that a smaller part
    needs.

    >>> from cotenant.core.model.gang import Part
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
    if not may_be_on_one_node(gang):
        return np.zeros(len(ledger), dtype=np.bool_)
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
    milli, *others = numbers_of(demand)
    for free, need in zip(ledger.rows, (milli // WHOLE_GPU_MILLI, *others), strict=True):
        if need:
            nodes &= free >= need * replicas
    if demand.gpu_milli and demand.gpu_type:
        nodes &= ledger.of_type(demand.gpu_type)


def _together(gang: Gang) -> Demand:
    """Return a gang's total as if it were one replica; shares of GPUs are left to be tried."""
    whole = sum(part.replicas * (part.demand.gpu_milli // WHOLE_GPU_MILLI) for part in gang.parts)
    return Demand(whole * WHOLE_GPU_MILLI, gang.cores, **amounts_of(gang.needs))


def could_hold_all(gang: Gang, ledger: Ledger) -> bool:
    """Return whether a node that takes work could hold all of a gang if it were empty."""
    if len(gang.parts) == 1:
        return may_be_on_one_node(gang) and could_hold(gang.parts[0], ledger, alone=True)
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
