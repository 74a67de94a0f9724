"""Placements of a gang that meet every objective: on one node, on several, and on shares of GPUs.

Theory of operation. What neighbors leave of a gang's speed takes few values, because it depends on how many of a
server's GPUs they hold. For each value, the largest first, a gang goes to the fewest nodes that leave it as much: that
way every placement is considered that is not slower than another on as many nodes. The part of a gang that a node may
hold is exact: as much as leaves the gang enough speed, and no job there falls below its own objective.

This is a search of its own, not a scorer of nodes: how fast a gang is depends on all of its nodes together. Each
attempt of the search is assembled from scored nodes (`cotenant.core.placement.assembly`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.free_totals import open_nodes_by_kind
from cotenant.core.capacity.ledger import Counts, Ledger, Offer, Share
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI, Locality
from cotenant.core.placement import interference
from cotenant.core.placement.assembly import Placer, Places, fewest, place_on_best, place_parts
from cotenant.core.placement.constraint import constraints_of, nodes_min
from cotenant.core.placement.interference import GANG_MILLI_MIN
from cotenant.core.placement.packing import Nodes, able_to_hold, part_orders, place_on_node, room_for_all
from cotenant.core.placement.scores import BEST_FIT, Candidates, Scores, lowest, weigh
from cotenant.policies.qos.neighbours import Neighbours, across_racks, shareable
from cotenant.policies.qos.speed_bounds import ROUNDING, SpeedBounds


@dataclass(frozen=True, slots=True)
class Found:
    """An offer, its number of nodes, and the gang's speed there; None if unknown."""

    offer: Offer
    nodes: int
    left: float
    speed: float | None

    def beats(self, other: Found | None, *, packed: bool) -> bool:
        """Return whether it takes fewer GPU-seconds; if `packed`, or if those are unknown, fewer nodes."""
        if other is None:
            return True
        if self.speed is None or other.speed is None or (packed and self.nodes != other.nodes):
            return self.nodes < other.nodes
        return self.speed > other.speed * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints of a search: the gang's own objective, those of its neighbors, and the number of nodes."""

    own: bool = True
    neighbors: bool = True
    nodes_limit: bool = True


ALL_CONSTRAINTS = Constraints()


class Search:
    """The placements of one gang on a ledger as it is."""

    def __init__(
        self,
        gang: Gang,
        view: SpeedBounds,
        ledger: Ledger,
        neighbours: Neighbours,
        *,
        interferes: bool,
        packed: bool,
        nodes_max: float = math.inf,
    ) -> None:
        """Prepare a search; on more than `nodes_max` nodes the gang would take too many GPU-seconds."""
        self.gang, self.view, self.ledger, self.neighbours = gang, view, ledger, neighbours
        self.nodes_max = nodes_max
        self._packed = packed
        self.interferes = interferes and gang.gpu_milli >= GANG_MILLI_MIN
        self._judged = bool(view.paces)
        self.parted = any(part.demand.gpu_milli % WHOLE_GPU_MILLI for part in gang.parts)

    def best(self, constraints: Constraints) -> Found | None:
        """Return the fastest placement that meets the constraints; the most packed one if speeds are unknown."""
        if self.parted:
            return self._on_shared(constraints)
        alone = self._on_one(constraints) if self.gang.gpu_milli or self.gang.locality is Locality.SERVER else None
        if self.gang.locality is Locality.SERVER or (alone and (self._packed or not self._judged)):
            return alone
        if constraints.nodes_limit and self.nodes_max < 2:
            return alone
        pace = self.view.on(2) if self._judged else None
        if alone and (pace is None or pace.speed <= (alone.speed or 0.0) * (1 + ROUNDING)):
            return alone
        best = alone
        for found in self._on_several(constraints, alone):
            if found.beats(best, packed=self._packed):
                best = found
        return best

    # One node ------------------------------------------------------------------------------------------------

    def _on_one(self, constraints: Constraints) -> Found | None:
        ledger, gang = self.ledger, self.gang
        able = able_to_hold(gang, ledger)
        if self.interferes and constraints.neighbors:
            able &= self.neighbours.spare_milli >= gang.gpu_milli
        if not self._judged:
            offer = place_on_best(gang, ledger, able)
            return Found(offer, 1, 1.0, None) if offer else None
        if (pace := self.view.on(1)) is None:
            return None
        groups = list(self._by_interference(np.flatnonzero(able)))
        if self._packed and len(groups) > 1:
            groups = [(np.concatenate([some for some, _ in groups]), np.concatenate([left for _, left in groups]))]
        scores = weigh(BEST_FIT, Candidates(gang, ledger, able))
        for some, left in groups:
            if constraints.own and self.view.bound:
                enough = left >= pace.share - ROUNDING
                some, left = some[enough], left[enough]
            while len(some):
                fastest = left >= (0.0 if self._packed else left.max() - ROUNDING)
                node = _lowest_of(some[fastest], scores)
                if offer := place_on_node(gang, ledger, node):
                    share = float(left[some == node][0])
                    return Found(offer, 1, share, pace.speed * share)
                some, left = some[some != node], left[some != node]
        return None

    def _by_interference(self, nodes: Nodes) -> Iterator[tuple[Nodes, NDArray[np.float64]]]:
        """Yield nodes, and what neighbors leave of the speed of the whole gang there; quiet nodes first."""
        if not self.interferes:
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

    def _on_several(self, constraints: Constraints, best: Found | None) -> Iterator[Found]:
        """Yield placements on several nodes, those with the least interference first."""
        most = pace.speed if (pace := self.view.on(2)) else math.inf
        for where in self._scopes():
            levels = self._levels(constraints, where)
            for left in sorted(levels) if self._packed else levels:
                if best and best.speed and most * left <= best.speed * (1 + ROUNDING) and not self._packed:
                    break
                for split in (True,) if len(self.gang.parts) == 1 else (False, True):
                    if found := self._spread(constraints, left, where, split=split):
                        yield found
                        best = found if found.beats(best, packed=self._packed) else best
                        if found.speed is None or self._packed:
                            return  # a smaller share of the speed gives as few nodes or fewer

    def _scopes(self) -> Iterator[NDArray[np.bool_] | None]:
        """Yield racks with room, the fullest first, then all nodes."""
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

    def _levels(self, constraints: Constraints, where: NDArray[np.bool_] | None) -> Iterator[float]:
        """Yield the shares of its speed that neighbors may leave a gang on several nodes, the largest first."""
        bound = constraints.own and self.view.bound
        if not self._judged or (self._packed and not bound):
            yield 0.0
            return
        yield 1.0
        if not self.interferes:
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
        self, constraints: Constraints, left: float, where: NDArray[np.bool_] | None, *, split: bool = False
    ) -> Found | None:
        """Place the gang on the fewest nodes that leave it this share of its speed; `split`: on at least two."""
        for order in part_orders(self.gang):
            place = self._placer(self._caps(constraints, left, split=split), where)
            if (offer := place_parts(self.gang, self.ledger, place, order)) is not None:
                return self._judge(offer, constraints)
        return None

    def _placer(self, caps: Counts | None, where: NDArray[np.bool_] | None) -> Placer:
        """Return a function that places one part after another on the fewest nodes, within the caps of each."""
        used: set[int] = set()

        def place(part: Part, room: Counts) -> Places | None:
            if where is not None:
                room = np.where(where, room, 0)
            if caps is not None and part.demand.gpu_milli:
                room = np.minimum(room, np.maximum(caps, 0) // part.demand.gpu_milli)
            placed = fewest(self.gang, part, room, self.ledger, used)
            for node, replicas in placed or ():
                used.add(node)
                if caps is not None:
                    caps[node] -= replicas * part.demand.gpu_milli
            return placed

        return place

    def _caps(self, constraints: Constraints, left: float, *, split: bool) -> Counts | None:
        """Return the most of the gang that may be on each node, in thousandths of GPUs; None if unbounded."""
        if not self.interferes:
            return None
        near = self.neighbours
        caps = near.spare_milli.copy() if constraints.neighbors else np.full_like(near.spare_milli, 2**40)
        if split:  # one server is judged differently from one of several
            least = min(part.demand.gpu_milli for part in self.gang.parts if part.demand.gpu_milli)
            np.minimum(caps, self.gang.gpu_milli - least, out=caps)
        worst = interference.ACROSS_SERVERS
        if self._judged and left > worst + ROUNDING:
            lost = max(1 - left, ROUNDING)
            total = self.ledger.total_gpus * WHOLE_GPU_MILLI
            room = total - np.ceil(near.gangs_milli * (1 - worst) / lost - WHOLE_GPU_MILLI * ROUNDING).astype(np.int64)
            np.minimum(caps, np.where(near.gangs_milli > 0, room, caps), out=caps)
        return caps

    def _judge(self, offer: Offer, constraints: Constraints) -> Found | None:
        """Return the gang's speed in its places; None if a constraint is violated."""
        own = self.own_milli(offer)
        nodes = max(1, len(own or {share.node for share in offer}))
        if constraints.nodes_limit and nodes > self.nodes_max:
            return None
        if not self._judged:
            return Found(offer, nodes, 1.0, None)
        pace = self.view.on(nodes)
        if pace is None:
            return Found(offer, nodes, 0.0, 0.0) if not (constraints.own and self.view.bound) else None
        left = across_racks(list(own), self.gang.gpu_milli, self.ledger)
        if self.interferes:
            left *= min(self._interference(node, milli, nodes) for node, milli in own.items())
        if constraints.own and self.view.bound and left < pace.share - ROUNDING:
            return None
        return Found(offer, nodes, left, pace.speed * left)

    def _interference(self, node: int, own: int, nodes: int) -> float:
        others = float(self.neighbours.gangs_milli[node])
        return interference.speed(others, int(self.ledger.total_gpus[node]) * WHOLE_GPU_MILLI - own, servers=nodes)

    def own_milli(self, offer: Offer) -> dict[int, int]:
        """Return the GPUs that an offer gives to the gang by node, in thousandths."""
        own: dict[int, int] = {}
        for share in offer:
            if milli := share.replicas * self.gang.parts[share.part].demand.gpu_milli:
                own[share.node] = own.get(share.node, 0) + milli
        return own

    # Shares of GPUs -----------------------------------------------------------------------------------------------

    def _on_shared(self, constraints: Constraints) -> Found | None:
        """Place a gang on shares of GPUs that their jobs tolerate, by best fit; sharing never adds speed."""
        needed = self.view.share(1) if constraints.own else 0.0
        allowed = shareable(
            self.neighbours, needed, own=constraints.own and self.view.bound, neighbors=constraints.neighbors
        )
        if len(self.gang.parts) > 1 or self.gang.gpu_milli >= GANG_MILLI_MIN or self.gang.constraints:
            return self._where_all_may_be_shared(constraints, np.asarray(allowed.all(axis=1)))
        (part,) = self.gang.parts
        parts = self.ledger.parts_on(np.arange(len(self.ledger)))
        room = ((parts // part.demand.gpu_milli) * allowed).sum(axis=1)
        room = np.minimum(room, self.ledger.room(part.demand))
        able = room >= part.replicas
        counts: Places | None
        if able.any():
            scores = weigh(BEST_FIT, Candidates(self.gang, self.ledger, able))
            counts = [(lowest(scores, able), part.replicas)]
        elif self.gang.locality is Locality.SERVER or self.view.share(2) > 1:
            return None
        else:
            counts = fewest(self.gang, part, room, self.ledger, set()) or []
        offer = tuple(
            Share(node, 0, replicas, _fullest(parts[node], allowed[node], part.demand.gpu_milli, replicas))
            for node, replicas in counts
        )
        return Found(offer, len(offer), 1.0, None) if offer else None

    def _where_all_may_be_shared(self, constraints: Constraints, where: NDArray[np.bool_]) -> Found | None:
        nodes = room_for_all(self.gang, self.ledger)
        for node in nodes[where[nodes]].tolist():
            if (offer := place_on_node(self.gang, self.ledger, node)) and (
                found := self._judge_all(offer, constraints)
            ):
                return found
        return None if self.gang.locality is Locality.SERVER else self._spread(constraints, 0.0, where)

    def _judge_all(self, offer: Offer, constraints: Constraints) -> Found | None:
        bears = self.neighbours.spare_milli
        if (
            constraints.neighbors
            and self.interferes
            and any(bears[node] < own for node, own in self.own_milli(offer).items())
        ):
            return None
        return self._judge(offer, constraints)


def _lowest_of(nodes: Nodes, scores: Scores) -> int:
    """Return the first of some nodes with the lowest of the scores, which are given for all nodes."""
    return int(nodes[scores[nodes].argmin()])


def fewest_nodes(gang: Gang, ledger: Ledger) -> int:
    """Return the minimum number of nodes for a gang if all were empty, by counting; one more than all: none."""
    counts = open_nodes_by_kind(ledger)
    with_gpus = [part for part in gang.parts if part.demand.gpu_milli]
    each = [_fewest_for(part, ledger.room_by_kind(part.demand), counts, len(ledger)) for part in with_gpus]
    return max([*each, nodes_min(constraints_of(gang)) if gang.constraints else 1])


def _fewest_for(part: Part, rooms: Sequence[int], counts: Sequence[int], most: int) -> int:
    """Return the nodes needed, filling those with the most room first."""
    left, nodes = part.replicas, 0
    for room, count in sorted(zip(rooms, counts, strict=True), reverse=True):
        if room * count >= left:
            return nodes + math.ceil(left / room)
        left, nodes = left - room * count, nodes + count
    return most + 1


def _fullest(free: Counts, allowed: NDArray[np.bool_], milli: int, replicas: int) -> tuple[int, ...]:
    """Return a GPU for each replica: the fullest that has room and may be shared."""
    left = np.where(allowed, free, 0)
    chosen: list[int] = []
    for _ in range(replicas):
        fitting = np.flatnonzero(left >= milli)
        gpu = int(fitting[np.argmin(left[fitting])])
        left[gpu] -= milli
        chosen.append(gpu)
    return tuple(chosen)
