"""Gangs close together, for as long as that is worth waiting for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.validation import Violation
from cotenant.core.placement.gang_allocation import take
from cotenant.core.placement.packing import able_to_hold, best_place, could_hold_all, on_fewest, on_one, room_for_all
from cotenant.core.placement.unschedulable import fits, no_place, plain_shortage
from cotenant.core.policy.cluster_view import NOBODY, Rearrangement, Resident, Scene

MOVES_MAX = 4  # of one gang
MOVABLE_MAX, DOMAINS_MAX = 12, 8  # so many residents of so many servers or racks are tried


@dataclass(frozen=True, slots=True)
class Stand:
    """At which level a gang waits: from and until which wait, in seconds, and at which level after that."""

    level: Locality
    since: float = 0.0
    until: float = math.inf
    then: Locality | None = None


class WaitsForLocality:
    """Keep a gang on one server, then in one rack, then anywhere: it waits at a level, and relaxes by time-outs.

    That is how Philly schedules (Jeon et al., ATC 2019, sections 2.3 and 5 [P]): a 16-GPU job used 43.7 % of its GPUs
    on 2 servers and 28.6 % on 8, so locality is worth a wait, but not any wait. A gang of several replicas with GPUs
    waits at each level for its time-out. The time counts in which it found no place at that level although as much as
    it needs was free: waits for capacity, for a turn or for a fair share say nothing of locality. One that a level
    could not hold even if it were empty begins at the next. A gang that wishes for `server` or `rack` never relaxes,
    one that wishes for `anywhere` does not wait, nor does one without GPUs. At each level the closer ones are tried
    first. Where all nodes are in one rack there are two levels.

    The server is the one with the fewest GPUs left, so that single GPUs come from servers that are in use and the empty
    ones are left to gangs. A gang of two GPUs or more that takes a large part of a server (`dedicated_share`) rather
    has an empty one, for neighbours cost a 2-GPU job a third of its speed (114.8 to 75.6 images/s [P]). The rack is the
    smallest that suffices, by free GPUs, and in it the fewest servers [R].

    Where what is free lies in fragments, up to `moves_max` running jobs are moved to where there is room for them, if
    that lets a gang start at its level: migration to defragment is Philly's second guideline [P], the rule is ours [R].
    Moved are jobs that may be preempted, are on that server or in that rack alone, have run for `settled_seconds` and
    will not be done before the gang would relax. The cheapest set is taken, by what a stop costs times GPUs, and only
    if `gain_min` times that is less than the wait that the gang is spared times its GPUs.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(8, 24)] * 4, ["a", "a", "b", "b"])
    >>> for node, taken in enumerate((4, 4, 2, 3)):
    ...     _ = ledger.take(node, Demand(1000), taken)
    >>> gang = Gang("a", (Part("worker", 8, Demand(gpu_milli=1000)),), fragmented_seconds=60)
    >>> print(WaitsForLocality().place(gang, ledger, np.random.default_rng(0)))
    FRAGMENTED: needs 8 replicas of 1 GPU on one server; the best has room for 6, 4 servers together for 8 or more; \
relaxes to rack in 4 min
    >>> gang = replace(gang, fragmented_seconds=300)
    >>> [(share.node, share.replicas) for share in WaitsForLocality().place(gang, ledger, np.random.default_rng(0))]
    [(0, 4), (1, 4)]
    """

    name = "locality"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How long gangs wait, and who has a server of its own.

        server_seconds: a gang waits so long for one server.
        rack_seconds: then it waits so long for one rack.
        dedicated_share: a gang that takes this share of a server's GPUs rather has an empty one; above 1: none does.
        moves_max: so many running jobs may be moved for one gang; at most 4.
        settled_seconds: a job is moved no sooner than this after it last started.
        gain_min: the GPU time that a gang is spared must be this many times what the moves cost.
        """

        server_seconds: float = 300.0
        rack_seconds: float = 300.0
        dedicated_share: float = 0.5
        moves_max: int = 2
        settled_seconds: float = 1800.0
        gain_min: float = 2.0

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("server_seconds", "rack_seconds", "dedicated_share", "settled_seconds", "gain_min"):
                if getattr(self, name) < 0:
                    yield Violation(name, f"must be 0 or more, not {getattr(self, name):g}")
            if not 0 <= self.moves_max <= MOVES_MAX:
                yield Violation("moves_max", f"must be from 0 to {MOVES_MAX}, not {self.moves_max}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        server, rack = self.options.server_seconds, self.options.rack_seconds
        self._scene: Scene = NOBODY
        self._turns = sorted({server, rack, server + rack})  # the waits at which the level of a gang may change

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer one server, or what the gang's level allows; else say why not, and when it will relax."""
        if refusal := plain_shortage(gang, ledger, within=gang.locality or Locality.ANYWHERE):
            return refusal  # a level is for what is free in sum
        if (gang.gpu_milli or gang.locality is Locality.SERVER) and (offer := self._on_server(gang, ledger)):
            return offer
        stand = self._stand(gang, ledger)
        apart = stand.level is not Locality.SERVER and (gang.gpu_milli or gang.locality is Locality.RACK)
        if apart and (offer := _in_rack(gang, ledger)):
            return offer
        if stand.level is Locality.ANYWHERE and (offer := on_fewest(gang, ledger)):
            return offer
        refusal = no_place(gang, ledger, within=stand.level)
        if refusal.code is not Code.FRAGMENTED:
            return refusal
        waited = gang.fragmented_seconds
        return replace(
            refusal, holds_seconds=stand.until - waited, held_seconds=waited - stand.since, relaxes_to=stand.then
        )

    def alike(self, gang: Gang) -> Hashable:
        """Gangs with the same needs whose waits lie between the same turns."""
        return gang.parts, gang.locality, bisect_right(self._turns, gang.fragmented_seconds) if _relaxes(gang) else 0

    def alike_seconds(self, gang: Gang) -> float:
        """The time until the next turn."""
        turn = bisect_right(self._turns, gang.fragmented_seconds)
        return self._turns[turn] - gang.fragmented_seconds if _relaxes(gang) and turn < len(self._turns) else math.inf

    def see(self, scene: Scene) -> None:
        """Know who might be moved."""
        self._scene = scene

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Let as few and cheap jobs as suffice go elsewhere, where that spares the gang more than it costs."""
        if not self.options.moves_max or refusal.locality not in (Locality.SERVER, Locality.RACK):
            return None
        spared_seconds = min(refusal.holds_seconds, self.options.server_seconds + self.options.rack_seconds)
        worth = spared_seconds * gang.gpu_milli / WHOLE_GPU_MILLI
        candidates: list[tuple[float, list[int], tuple[Resident, ...]]] = []
        for nodes in _domains(gang, ledger, refusal.locality):
            movable = sorted(self._movable(nodes, fixed, spared_seconds), key=lambda one: (_cost(one), one.gang.job_id))
            lacking = gang.gpu_milli - WHOLE_GPU_MILLI * int(ledger.free_gpus[nodes].sum())
            for size in range(1, self.options.moves_max + 1):
                for some in combinations(movable[:MOVABLE_MAX], size):
                    cost = sum(map(_cost, some))
                    if cost * self.options.gain_min <= worth and lacking <= sum(one.gang.gpu_milli for one in some):
                        candidates.append((cost, nodes, some))
        for _, nodes, some in sorted(candidates, key=lambda candidate: candidate[0]):
            if found := self._moving(some, gang, nodes, ledger, rng):
                return found
        return None

    def _movable(self, nodes: Sequence[int], fixed: Collection[str], spared_seconds: float) -> Iterator[Resident]:
        """Give those who run on these nodes alone, and may be moved."""
        now, seen = self._scene.now, set(fixed)
        for resident in (resident for node in nodes for resident in self._scene.on(node)):
            gang, rest = resident.gang, resident.gang.estimate.remaining_seconds
            stays = gang.job_id in seen or not resident.preemptible or gang.kind is JobKind.INFERENCE
            seen.add(gang.job_id)
            if stays or now - resident.since_seconds < self.options.settled_seconds:
                continue
            leaves = gang.estimate.predictable and rest is not None and rest <= spared_seconds
            if not leaves and all(holding.node in nodes for holding in resident.holdings):
                yield resident

    def _moving(
        self, some: Sequence[Resident], gang: Gang, nodes: Sequence[int], ledger: Ledger, rng: np.random.Generator
    ) -> Rearrangement | None:
        """Try a gang in place of some residents, and those elsewhere."""
        here = np.isin(np.arange(len(ledger)), nodes)
        with ledger.undone():
            for holding in (holding for resident in some for holding in resident.holdings):
                ledger.release(holding)
            one = len(nodes) == 1
            if one and nodes[0] not in room_for_all(gang, ledger):
                return None
            offer = on_one(gang, ledger, nodes[0]) if one else on_fewest(gang, ledger, here)
            if offer is None:
                return None
            take(ledger, gang, offer)
            moves: list[tuple[Resident, Offer]] = []
            for resident in some:
                place = self.place(replace(resident.gang, fragmented_seconds=0.0), ledger, rng)
                if isinstance(place, Refusal):
                    return None
                take(ledger, resident.gang, place)
                moves.append((resident, place))
        return Rearrangement(offer, tuple(moves))

    def _stand(self, gang: Gang, ledger: Ledger) -> Stand:
        """Find the level at which a gang waits; those that could never hold it take no time."""
        if not _relaxes(gang):
            alone = gang.gpu_milli and gang.locality is None and could_hold_all(gang, ledger)
            return Stand(gang.locality or (Locality.SERVER if alone else Locality.ANYWHERE))
        levels = [Locality.SERVER] if could_hold_all(gang, ledger) else []
        if len(np.unique(ledger.rack_numbers[ledger.open])) > 1 and fits(
            gang, ledger, within=Locality.RACK, empty=True
        ):
            levels.append(Locality.RACK)
        since, waits = 0.0, {Locality.SERVER: self.options.server_seconds, Locality.RACK: self.options.rack_seconds}
        for level, then in pairwise([*levels, Locality.ANYWHERE]):
            until = since + waits[level]
            if gang.fragmented_seconds < until:
                return Stand(level, since, until, then)
            since = until
        return Stand(Locality.ANYWHERE, since)

    def _on_server(self, gang: Gang, ledger: Ledger) -> Offer | None:
        """Put a gang on the server that loses least."""
        able = able_to_hold(gang, ledger)
        return best_place(gang, ledger, able, self._crowded(gang, ledger)) if able.any() else None

    def _crowded(self, gang: Gang, ledger: Ledger) -> NDArray[np.bool_] | None:
        """Mark the servers on which a gang would rather not be, for others are there; None where it does not mind."""
        if gang.gpu_milli < 2 * WHOLE_GPU_MILLI:
            return None
        large = gang.gpu_milli >= self.options.dedicated_share * WHOLE_GPU_MILLI * ledger.total_gpus
        return large & (ledger.free_gpus < ledger.total_gpus)


def _relaxes(gang: Gang) -> bool:
    """Tell whether a gang waits to be together, and for how long is not its own wish to say."""
    return gang.locality is None and gang.gpu_milli > 0 and sum(part.replicas for part in gang.parts) > 1


def _cost(resident: Resident) -> float:
    """GPU-seconds that a move costs; a job without GPUs counts as if it had one."""
    return resident.stop_cost_seconds * max(1.0, resident.gang.gpu_milli / WHOLE_GPU_MILLI)


def _domains(gang: Gang, ledger: Ledger, level: Locality) -> list[list[int]]:
    """Name the servers, or the racks, that could hold a gang if they were empty, those that lack least first."""
    if level is Locality.SERVER:
        nodes = room_for_all(gang, ledger, empty=True)
        order = np.lexsort((nodes, -ledger.free_gpus[nodes]))[:DOMAINS_MAX]
        return [[node] for node in nodes[order].tolist()]
    numbers = np.where(ledger.open, ledger.rack_numbers, -1)
    free = {rack: int(ledger.free_gpus[numbers == rack].sum()) for rack in np.unique(numbers[ledger.open]).tolist()}
    racks = sorted(free, key=lambda rack: (-free[rack], rack))[:DOMAINS_MAX]
    return [np.flatnonzero(numbers == rack).tolist() for rack in racks]


def _in_rack(gang: Gang, ledger: Ledger) -> Offer | None:
    """Put a gang on the fewest servers of the rack with the least that is free, among those that suffice."""
    numbers = ledger.rack_numbers
    roomy = np.ones(int(numbers.max(initial=0)) + 1, dtype=np.bool_)
    for part in gang.parts:
        room = np.minimum(ledger.room(part.demand), part.replicas)
        roomy &= np.bincount(numbers, room, len(roomy)) >= part.replicas
    free = np.bincount(numbers, np.where(ledger.open, ledger.free_gpus if gang.gpu_milli else ledger.free_cores, 0))
    racks = np.flatnonzero(roomy)
    for rack in racks[np.argsort(free[racks], kind="stable")].tolist():
        if (offer := on_fewest(gang, ledger, numbers == rack)) is not None:
            return offer
    return None
