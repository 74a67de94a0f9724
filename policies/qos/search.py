"""The placements of a gang that keep every promise: on one node, on several, and on parts of GPUs.

Theory of operation. What neighbours leave of a gang's speed takes few values, for it depends on how many of a server's
GPUs others hold. For each of them, the largest first, a gang goes to the fewest nodes that leave it as much: that way
every placement is looked at that is not slower than another one on as many nodes. How much of a gang a node may hold is
exact: so many that what is left of its speed is enough, and that nobody there falls below its own promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.free_totals import open_by_kind
from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Share
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI, Locality
from cotenant.core.placement import interference
from cotenant.core.placement.interference import GANG_MILLI_MIN
from cotenant.core.placement.packing import (
    Nodes,
    Placer,
    able_to_hold,
    best_fit,
    best_place,
    fewest,
    on_many,
    on_one,
    part_orders,
    room_for_all,
)
from cotenant.policies.qos.neighbours import Neighbours, across_racks, shareable
from cotenant.policies.qos.speed_bounds import ROUNDING, Outlook


@dataclass(frozen=True, slots=True)
class Found:
    """An offer, on how many nodes it is, and how fast the gang would be there; None where that is unknown."""

    offer: Offer
    nodes: int
    left: float
    speed: float | None

    def beats(self, other: Found | None, *, packed: bool = False) -> bool:
        """Whether it takes fewer GPU-seconds; `packed`, or where that is unknown: whether it is on fewer nodes."""
        if other is None:
            return True
        if self.speed is None or other.speed is None or (packed and self.nodes != other.nodes):
            return self.nodes < other.nodes
        return self.speed > other.speed * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class Heeded:
    """What a search heeds: the gang's own promise, those of its neighbours, and on how many nodes it may be."""

    own: bool = True
    kind: bool = True
    near: bool = True


ALL = Heeded()


class Search:
    """The placements of one gang on a ledger as it stands."""

    def __init__(
        self,
        gang: Gang,
        view: Outlook,
        ledger: Ledger,
        neighbours: Neighbours,
        *,
        crowds: bool,
        packed: bool,
        nodes_max: float = math.inf,
    ) -> None:
        """`nodes_max`: on more nodes it would take too many GPU-seconds."""
        self.gang, self.view, self.ledger, self.neighbours = gang, view, ledger, neighbours
        self.nodes_max = nodes_max
        self._packed = packed
        self.crowds = crowds and gang.gpu_milli >= GANG_MILLI_MIN
        self._judged = bool(view.paces)
        self.parted = any(part.demand.gpu_milli % WHOLE_GPU_MILLI for part in gang.parts)

    def best(self, heeds: Heeded) -> Found | None:
        """Find the fastest placement that keeps what is heeded; the most consolidated where speeds are unknown."""
        if self.parted:
            return self._on_shared(heeds)
        alone = self._on_one(heeds) if self.gang.gpu_milli or self.gang.locality is Locality.SERVER else None
        if self.gang.locality is Locality.SERVER or (alone and (self._packed or not self._judged)):
            return alone
        if heeds.near and self.nodes_max < 2:
            return alone
        pace = self.view.on(2) if self._judged else None
        if alone and (pace is None or pace.speed <= (alone.speed or 0.0) * (1 + ROUNDING)):
            return alone
        best = alone
        for found in self._on_several(heeds, alone):
            if found.beats(best, packed=self._packed):
                best = found
        return best

    # One node ------------------------------------------------------------------------------------------------

    def _on_one(self, heeds: Heeded) -> Found | None:
        ledger, gang = self.ledger, self.gang
        able = able_to_hold(gang, ledger)
        if self.crowds and heeds.kind:
            able &= self.neighbours.spare_milli >= gang.gpu_milli
        if not self._judged:
            offer = best_place(gang, ledger, able)
            return Found(offer, 1, 1.0, None) if offer else None
        if (pace := self.view.on(1)) is None:
            return None
        groups = list(self._by_crowding(np.flatnonzero(able)))
        if self._packed and len(groups) > 1:
            groups = [(np.concatenate([some for some, _ in groups]), np.concatenate([left for _, left in groups]))]
        for some, left in groups:
            if heeds.own and self.view.bound:
                enough = left >= pace.share - ROUNDING
                some, left = some[enough], left[enough]
            while len(some):
                fastest = left >= (0.0 if self._packed else left.max() - ROUNDING)
                node = best_fit(ledger, some[fastest])
                if offer := on_one(gang, ledger, node):
                    share = float(left[some == node][0])
                    return Found(offer, 1, share, pace.speed * share)
                some, left = some[some != node], left[some != node]
        return None

    def _by_crowding(self, nodes: Nodes) -> Iterator[tuple[Nodes, NDArray[np.float64]]]:
        """Give nodes, and what others leave of the gang's speed, were all of it there; the quiet ones first."""
        if not self.crowds:
            yield nodes, np.ones(len(nodes))
            return
        others = self.neighbours.gangs_milli[nodes]
        quiet = nodes[others == 0]
        if len(quiet):
            yield quiet, np.ones(len(quiet))
        nodes, others = nodes[others > 0], others[others > 0]
        if len(nodes):
            rest = self.ledger.total_gpus[nodes] * WHOLE_GPU_MILLI - self.gang.gpu_milli
            yield nodes, interference.speeds(others, rest, servers=1)

    # Several nodes -------------------------------------------------------------------------------------------

    def _on_several(self, heeds: Heeded, best: Found | None) -> Iterator[Found]:
        """Give placements on several nodes, those that neighbours leave the most first."""
        most = pace.speed if (pace := self.view.on(2)) else math.inf
        for where in self._scopes():
            levels = self._levels(heeds, where)
            for left in sorted(levels) if self._packed else levels:
                if best and best.speed and most * left <= best.speed * (1 + ROUNDING) and not self._packed:
                    break
                for split in (True,) if len(self.gang.parts) == 1 else (False, True):
                    if found := self._spread(heeds, left, where, split=split):
                        yield found
                        best = found if found.beats(best, packed=self._packed) else best
                        if found.speed is None or self._packed:
                            return  # what leaves a gang less of its speed is on as few nodes or on fewer

    def _scopes(self) -> Iterator[NDArray[np.bool_] | None]:
        """Give racks that have room, the fullest first, then all nodes."""
        numbers = self.ledger.rack_numbers
        count = int(numbers.max(initial=0)) + 1
        if count > 1:
            roomy = np.ones(count, dtype=np.bool_)
            for part in self.gang.parts:
                room = np.minimum(self.ledger.room(part.demand), part.replicas)
                roomy &= np.bincount(numbers, room, count) >= part.replicas
            free = np.bincount(numbers, np.where(self.ledger.open, self.ledger.free_gpus, 0))
            racks = np.flatnonzero(roomy)
            for rack in racks[np.argsort(free[racks], kind="stable")].tolist():
                yield numbers == rack
        if count == 1 or self.gang.locality is not Locality.RACK:
            yield None

    def _levels(self, heeds: Heeded, where: NDArray[np.bool_] | None) -> Iterator[float]:
        """The shares of its speed that neighbours may leave a gang on several nodes, the largest first."""
        bound = heeds.own and self.view.bound
        if not self._judged or (self._packed and not bound):
            yield 0.0
            return
        yield 1.0
        if not self.crowds:
            return
        usable = self.ledger.open & (self.ledger.free_gpus > 0)
        usable = usable if where is None else usable & where
        total, others = self.ledger.total_gpus[usable], self.neighbours.gangs_milli[usable]
        width = int(others.max(initial=0)) + 1
        pairs = np.flatnonzero(np.bincount(total * width + others)) if len(total) else total
        found: set[float] = set()
        for pair in pairs.tolist():
            gpus, held = divmod(pair, width)
            for own in range(1, gpus + 1):
                found.add(round(interference.speed(held, (gpus - own) * WHOLE_GPU_MILLI, servers=2), 9))
        least = self.view.paces[0].share - ROUNDING if bound else 0.0
        yield from sorted((left for left in found if least <= left < 1), reverse=True)

    def _spread(
        self, heeds: Heeded, left: float, where: NDArray[np.bool_] | None, *, split: bool = False
    ) -> Found | None:
        """Put the gang on the fewest nodes that leave it as much as that; `split`: on two at least."""
        for order in part_orders(self.gang):
            place = self._placer(self._caps(heeds, left, split=split), where)
            if (offer := on_many(self.gang, self.ledger, place, order)) is not None:
                return self._judge(offer, heeds)
        return None

    def _placer(self, caps: Counts | None, where: NDArray[np.bool_] | None) -> Placer:
        """Return what puts one part after the other on the fewest nodes, within what the gang may have on each."""
        used: set[int] = set()

        def place(part: Part, room: Counts) -> list[tuple[int, int]] | None:
            if where is not None:
                room = np.where(where, room, 0)
            if caps is not None and part.demand.gpu_milli:
                room = np.minimum(room, np.maximum(caps, 0) // part.demand.gpu_milli)
            placed = fewest(part, room, self.ledger, used)
            for node, replicas in placed or ():
                used.add(node)
                if caps is not None:
                    caps[node] -= replicas * part.demand.gpu_milli
            return placed

        return place

    def _caps(self, heeds: Heeded, left: float, *, split: bool) -> Counts | None:
        """The most of the gang that may be on each node, in thousandths of GPUs; None: there is no bound."""
        if not self.crowds:
            return None
        near = self.neighbours
        caps = near.spare_milli.copy() if heeds.kind else np.full_like(near.spare_milli, 2**40)
        if split:  # one server is judged otherwise than one of several
            least = min(part.demand.gpu_milli for part in self.gang.parts if part.demand.gpu_milli)
            np.minimum(caps, self.gang.gpu_milli - least, out=caps)
        worst = interference.ACROSS_SERVERS
        if self._judged and left > worst + ROUNDING:
            lost = max(1 - left, ROUNDING)
            total = self.ledger.total_gpus * WHOLE_GPU_MILLI
            room = total - np.ceil(near.gangs_milli * (1 - worst) / lost - WHOLE_GPU_MILLI * ROUNDING).astype(np.int64)
            np.minimum(caps, np.where(near.gangs_milli > 0, room, caps), out=caps)
        return caps

    def _judge(self, offer: Offer, heeds: Heeded) -> Found | None:
        """Tell how fast a gang would be in its places; None where it would break its promise, if that is heeded."""
        own = self.own_milli(offer)
        nodes = max(1, len(own or {share.node for share in offer}))
        if heeds.near and nodes > self.nodes_max:
            return None
        if not self._judged:
            return Found(offer, nodes, 1.0, None)
        pace = self.view.on(nodes)
        if pace is None:
            return Found(offer, nodes, 0.0, 0.0) if not (heeds.own and self.view.bound) else None
        left = across_racks(list(own), self.gang.gpu_milli, self.ledger)
        if self.crowds:
            left *= min(self._crowding(node, milli, nodes) for node, milli in own.items())
        if heeds.own and self.view.bound and left < pace.share - ROUNDING:
            return None
        return Found(offer, nodes, left, pace.speed * left)

    def _crowding(self, node: int, own: int, nodes: int) -> float:
        others = float(self.neighbours.gangs_milli[node])
        return interference.speed(others, int(self.ledger.total_gpus[node]) * WHOLE_GPU_MILLI - own, servers=nodes)

    def own_milli(self, offer: Offer) -> dict[int, int]:
        """Sum up by node the GPUs that an offer gives to the gang, in thousandths."""
        own: dict[int, int] = {}
        for share in offer:
            if milli := share.replicas * self.gang.parts[share.part].demand.gpu_milli:
                own[share.node] = own.get(share.node, 0) + milli
        return own

    # Parts of GPUs -------------------------------------------------------------------------------------------

    def _on_shared(self, heeds: Heeded) -> Found | None:
        """Put a gang on parts of GPUs that nobody minds sharing, by best fit; what is shared is not sped up."""
        needed = self.view.share(1) if heeds.own else 0.0
        allowed = shareable(self.neighbours, needed, own=heeds.own and self.view.bound, kind=heeds.kind)
        if len(self.gang.parts) > 1 or self.gang.gpu_milli >= GANG_MILLI_MIN:
            return self._where_all_may_be_shared(heeds, np.asarray(allowed.all(axis=1)))
        (part,) = self.gang.parts
        parts = self.ledger.parts_on(np.arange(len(self.ledger)))
        room = ((parts // part.demand.gpu_milli) * allowed).sum(axis=1)
        room = np.minimum(room, self.ledger.room(part.demand))
        nodes = np.flatnonzero(room >= part.replicas)
        if len(nodes):
            counts = [(best_fit(self.ledger, nodes), part.replicas)]
        elif self.gang.locality is Locality.SERVER or self.view.share(2) > 1:
            return None
        else:
            counts = fewest(part, room, self.ledger, set()) or []
        offer = tuple(
            Share(node, 0, replicas, _fullest(parts[node], allowed[node], part.demand.gpu_milli, replicas))
            for node, replicas in counts
        )
        return Found(offer, len(offer), 1.0, None) if offer else None

    def _where_all_may_be_shared(self, heeds: Heeded, where: NDArray[np.bool_]) -> Found | None:
        nodes = room_for_all(self.gang, self.ledger)
        for node in nodes[where[nodes]].tolist():
            if (offer := on_one(self.gang, self.ledger, node)) and (found := self._judge_all(offer, heeds)):
                return found
        return None if self.gang.locality is Locality.SERVER else self._spread(heeds, 0.0, where)

    def _judge_all(self, offer: Offer, heeds: Heeded) -> Found | None:
        bears = self.neighbours.spare_milli
        if heeds.kind and self.crowds and any(bears[node] < own for node, own in self.own_milli(offer).items()):
            return None
        return self._judge(offer, heeds)


def fewest_nodes(gang: Gang, ledger: Ledger) -> int:
    """On how few nodes a gang could be if all were empty, as far as counting tells; one more than all: on none."""
    counts = open_by_kind(ledger)
    with_gpus = [part for part in gang.parts if part.demand.gpu_milli]
    each = [_fewest_for(part, ledger.room_by_kind(part.demand), counts, len(ledger)) for part in with_gpus]
    return max(each, default=1)


def _fewest_for(part: Part, rooms: Sequence[int], counts: Sequence[int], most: int) -> int:
    """Fill the kinds of node with the most room first."""
    left, nodes = part.replicas, 0
    for room, count in sorted(zip(rooms, counts, strict=True), reverse=True):
        if room * count >= left:
            return nodes + math.ceil(left / room)
        left, nodes = left - room * count, nodes + count
    return most + 1


def _fullest(free: Counts, allowed: NDArray[np.bool_], milli: int, replicas: int) -> tuple[int, ...]:
    """Choose a GPU for each replica: the fullest that has room and may be shared."""
    left = np.where(allowed, free, 0)
    chosen: list[int] = []
    for _ in range(replicas):
        fitting = np.flatnonzero(left >= milli)
        gpu = int(fitting[np.argmin(left[fitting])])
        left[gpu] -= milli
        chosen.append(gpu)
    return tuple(chosen)
