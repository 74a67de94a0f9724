"""Assembly of gangs: places for all replicas, on nodes in the order of their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Share, Transaction
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.constraint import apart, constraints_of, replicas_together
from cotenant.core.placement.packing import able_to_hold, hardest_first, part_orders, place_on_node
from cotenant.core.placement.scores import (
    BEST_FIT,
    EXCLUDED,
    FEWEST,
    FEWEST_STRANDED,
    Candidates,
    Marks,
    Scores,
    Weights,
    lowest,
    weigh,
)
from cotenant.core.placement.unschedulable import no_place

FEW_NODES = 8  # up to this many nodes are found one by one
Places = list[tuple[int, int]]  # nodes, and how many replicas go there
Placer = Callable[[Part, Counts], Places | None]


def assemble(gang: Gang, ledger: Ledger, place: Placer, whole: Weights | None = None) -> Offer | Refusal:
    """Place a gang on the node with the lowest score that holds all of it, else its parts where `place` says.

    `whole` are the weights for that node; None: the gang is not kept on one node, whatever its locality.
    """
    if whole is not None:
        if (offer := place_on_best(gang, ledger, able_to_hold(gang, ledger), whole)) is not None:
            return offer
        if gang.locality is Locality.SERVER:
            return no_place(gang, ledger, within=Locality.SERVER)
    found = place_parts_anywhere(gang, ledger, place)
    return no_place(gang, ledger) if found is None else found


def place_on_best(gang: Gang, ledger: Ledger, able: Marks, weights: Weights = BEST_FIT) -> Offer | None:
    """Place all of a gang on the node with the lowest score, of those marked as `able_to_hold` it."""
    if not able.any():
        return None
    scores = np.where(able, weigh(weights, Candidates(gang, ledger, able)), EXCLUDED)
    while scores[best := int(scores.argmin())] < EXCLUDED:
        if (offer := place_on_node(gang, ledger, best)) is not None:
            return offer
        scores[best] = EXCLUDED
    return None


# Parts ---------------------------------------------------------------------------------------------------------------


def place_parts(gang: Gang, ledger: Ledger, place: Placer, order: Sequence[int] | None = None) -> Offer | None:
    """Place a gang's parts where `place` says, in order, by default hardest first; None if one does not fit.

    If a constraint of the job wants replicas apart, as many as may be together are placed first, then single ones.
    """
    offer: list[Share] = []
    with ledger.transaction() as transaction:
        numbers = hardest_first(gang) if order is None else order
        for number in numbers:
            part = gang.parts[number]
            if gang.constraints:
                shares = _place_apart(number, gang, place, transaction, {share.node for share in offer})
                if shares is None:
                    return None
                offer += shares
                continue
            placed = place(part, ledger.room(part.demand))
            if placed is None:
                return None
            offer += [Share(node, number, replicas) for node, replicas in placed]
            if number != numbers[-1]:
                for node, replicas in placed:
                    transaction.take(node, part.demand, replicas)
    found = tuple(offer)
    met = not gang.constraints or all(constraint.is_met(found, ledger) for constraint in constraints_of(gang))
    return found if met else None


def _place_apart(
    number: int, gang: Gang, place: Placer, transaction: Transaction, used: set[int]
) -> list[Share] | None:
    """Take places for a part: for as many replicas as may be together, for single ones apart, and for the rest.

    If a single replica has no place apart from others, one of another part may have.
    """
    ledger, part, there = transaction.ledger, gang.parts[number], Counter[int]()

    def taken(replicas: int, where: Marks | None = None) -> bool:
        room = ledger.room(part.demand)
        placed = place(replace(part, replicas=replicas), room if where is None else np.where(where, room, 0))
        for node, count in placed or ():
            transaction.take(node, part.demand, count)
            there[node] += count
        return placed is not None

    if (together := replicas_together(gang, part, used, ledger)) and not taken(together):
        return None
    while there.total() < part.replicas and (bound := apart(gang, used.union(there), ledger)):
        if not taken(1, bound[1]):
            break
    if (rest := part.replicas - there.total()) and not taken(rest):
        return None
    return [Share(node, number, replicas) for node, replicas in sorted(there.items())]


def place_parts_anywhere(gang: Gang, ledger: Ledger, place: Placer) -> Offer | None:
    """Place a gang's parts where `place` says or, if they get in each other's way there, on the fewest nodes.

    `place` sees one part at a time, and may give it the room that another part needs.
    """
    offer = place_parts(gang, ledger, place)
    return place_on_fewest(gang, ledger) if offer is None and len(gang.parts) > 1 else offer


def place_on_fewest(gang: Gang, ledger: Ledger, where: Marks | None = None) -> Offer | None:
    """Place a gang on the fewest nodes, or the fewest of some; parts go where others of the gang are."""
    for order in part_orders(gang):
        used: set[int] = set()

        def place(part: Part, room: Counts, used: set[int] = used) -> Places | None:
            placed = fewest(gang, part, room if where is None else np.where(where, room, 0), ledger, used)
            used.update(node for node, _ in placed or ())
            return placed

        if (offer := place_parts(gang, ledger, place, order)) is not None:
            return offer
    return None


# One part ------------------------------------------------------------------------------------------------------------


def in_node_order(part: Part, room: Counts) -> Places | None:
    """Place a part on the first nodes with room."""
    return fill(room, np.flatnonzero(room > 0), part.replicas)


def in_score_order(gang: Gang, ledger: Ledger, weights: Weights) -> Placer:
    """Return a function that places each part on the nodes with the lowest scores, as many replicas on each as fit."""
    used: set[int] = set()

    def place(part: Part, room: Counts) -> Places | None:
        room = np.minimum(room, part.replicas)
        if not part.replicas:
            return []
        if room.sum() < part.replicas:
            return None
        placed = _fill_by_score(part, room, weigh(weights, Candidates(gang, ledger, room, part, used)))
        used.update(node for node, _ in placed)
        return placed

    return place if weights else in_node_order


def fewest(gang: Gang, part: Part, room: Counts, ledger: Ledger, used: set[int]) -> Places | None:
    """Place a part on the fewest nodes: where its gang is already, then most room first, the rest best fit."""
    room = np.minimum(room, part.replicas)
    if not part.replicas:
        return []
    if room.sum() < part.replicas:
        return None
    candidates = Candidates(gang, ledger, room, part, used)
    if not part.demand.gpu_milli:
        return _fill_by_score(part, room, weigh(FEWEST_STRANDED, candidates))
    *whole, (_, rest) = _fill_by_score(part, room, weigh(FEWEST, candidates))
    able = room >= rest
    able[[node for node, _ in whole]] = False
    return [*whole, (lowest(weigh(BEST_FIT, candidates), able), rest)]


def _fill_by_score(part: Part, room: Counts, scores: Scores) -> Places:
    """Fill nodes in the order of their scores, one by one while they are few. There must be enough room."""
    order = np.where(room > 0, scores, EXCLUDED)
    placed: Places = []
    left = part.replicas
    for _ in range(FEW_NODES):
        node = int(order.argmin())
        count = min(int(room[node]), left)
        placed.append((node, count))
        left -= count
        if not left:
            return placed
        order[node] = EXCLUDED
    nodes = np.flatnonzero(order < EXCLUDED)
    if left < len(nodes):  # each has room for at least one
        last = np.partition(order[nodes], left - 1)[left - 1]
        nodes = nodes[order[nodes] <= last]
    nodes = nodes[np.argsort(order[nodes], kind="stable")]
    return [*placed, *(fill(room, nodes, left) or ())]


def fill(room: Counts, nodes: Sequence[int] | Counts, replicas: int) -> Places | None:
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
