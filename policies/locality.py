"""Keeps gangs close together for as long as that is worth the wait."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.validation import Violation
from cotenant.core.placement.assembly import place_on_best, place_on_fewest
from cotenant.core.placement.constraint import only_open
from cotenant.core.placement.gang_allocation import take
from cotenant.core.placement.gpu_types import TypePrices
from cotenant.core.placement.packing import able_to_hold, could_hold_all, place_on_node, room_for_all
from cotenant.core.placement.scores import (
    BALANCED_CORES,
    BEST_FIT,
    CROWDED,
    SLOW,
    Candidates,
    Scorer,
    Scores,
    Weights,
    marked,
)
from cotenant.core.placement.unschedulable import fits, no_place, quick_shortage
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView, Rearrangement, RunningJob

MOVES_MAX = 4  # per gang
MOVABLE_MAX, DOMAINS_MAX = 12, 8  # limits of the search: jobs, and servers or racks, that are tried


@dataclass(frozen=True, slots=True)
class WaitLevel:
    """The level at which a gang waits, from and until which wait in seconds, and the next level."""

    level: Locality
    since: float = 0.0
    until: float = math.inf
    then: Locality | None = None


class WaitsForLocality:
    """Keep a gang on one server, then in one rack, then anywhere; each level has a time-out.

    That is how Philly schedules (Jeon et al., ATC 2019, sections 2.3 and 5 [P]): a 16-GPU job used 43.7 % of its GPUs
    on 2 servers and 28.6 % on 8, so locality is worth a wait, but not any wait. A gang of several replicas with GPUs
    waits at each level for its time-out. Only the time counts in which it found no place at that level although enough
    was free in total: waits for capacity, for its turn or for a fair share are unrelated to locality. A gang that a
    level could not hold even if it were empty begins at the next level. A gang with locality `server` or `rack` never
    relaxes; with `anywhere`, or without GPUs, it does not wait. At each level the closer levels are tried first. If all
    nodes are in one rack there are two levels.

    The server is the one with the fewest GPUs left, so that single GPUs come from servers in use and empty servers are
    left to gangs. A gang of two or more GPUs that takes a large part of a server (`dedicated_share`) prefers an empty
    one, because neighbors cost a 2-GPU job a third of its speed (114.8 to 75.6 images/s [P]). The rack is the smallest
    that suffices, by free GPUs, and within it the fewest servers are used [R].

    If the free resources are fragmented, up to `moves_max` running jobs are moved to other places, if that lets a gang
    start at its level: migration to defragment is Philly's second guideline [P], the rule is ours [R]. A job may be
    moved if it is preemptible, is on that server or in that rack alone, has run for `settled_seconds` and will not
    finish before the gang would relax. The cheapest set is chosen, by stop cost × GPUs, and only if `gain_min` times
    that cost is less than the gang's saved wait × GPUs.

    Among several GPU types that a gang may have, `gpu_types` chooses by its predicted speed on each and by what each is
    worth to other jobs (`core.placement.gpu_types`), on one server as on several.

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
        """How long gangs wait, and which gangs get a server of their own.

        server_seconds: time-out of the wait for one server; may be infinite.
        rack_seconds: time-out of the following wait for one rack; may be infinite.
        dedicated_share: gangs with this share of a server's GPUs prefer an empty one; above 1: none; may be infinite.
        balance_cores: whether smaller gangs go where the largest share of the cores is free, instead of best fit.
        gpu_types: whether gangs choose among GPU types by speed; else, where they fit best.
        moves_max: maximum number of running jobs that are moved for one gang; at most 4.
        settled_seconds: a job is not moved until it has run this long since its last start; may be infinite.
        gain_min: minimum ratio of the GPU time saved for the gang to the cost of the moves; may be infinite.
        """

        server_seconds: float = 300.0
        rack_seconds: float = 300.0
        dedicated_share: float = 0.5
        balance_cores: bool = False
        gpu_types: bool = False
        moves_max: int = 2
        settled_seconds: float = 1800.0
        gain_min: float = 2.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name in ("server_seconds", "rack_seconds", "dedicated_share", "settled_seconds", "gain_min"):
                if getattr(self, name) < 0:
                    yield Violation(name, f"must be 0 or more, not {getattr(self, name):g}")
            if not 0 <= self.moves_max <= MOVES_MAX:
                yield Violation("moves_max", f"must be from 0 to {MOVES_MAX}, not {self.moves_max}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        server, rack = self.options.server_seconds, self.options.rack_seconds
        self._cluster_view: ClusterView = EMPTY_CLUSTER
        self._prices = TypePrices()
        self._timeouts = sorted({server, rack, server + rack})  # waits at which the level of a gang may change

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer one server, or what the gang's level allows; else refuse with the time until it relaxes."""
        if refusal := quick_shortage(gang, ledger, within=gang.locality or Locality.ANYWHERE):
            return refusal  # levels apply only to what is free in total
        by_type = self._type_scorer(gang, ledger)
        if (gang.gpu_milli or gang.locality is Locality.SERVER) and (offer := self._on_server(gang, ledger, by_type)):
            return offer
        wait = self._wait_level(gang, ledger)
        apart = wait.level is not Locality.SERVER and (gang.gpu_milli or gang.locality is Locality.RACK)
        if apart and (offer := _on_best_type(_in_rack, gang, ledger, by_type)):
            return offer
        if wait.level is Locality.ANYWHERE and (offer := _on_best_type(place_on_fewest, gang, ledger, by_type)):
            return offer
        refusal = no_place(gang, ledger, within=wait.level)
        if refusal.code is not Code.FRAGMENTED:
            return refusal
        waited = gang.fragmented_seconds
        return replace(
            refusal, holds_seconds=wait.until - waited, held_seconds=waited - wait.since, relaxes_to=wait.then
        )

    def equivalence_key(self, gang: Gang) -> Hashable:
        """Group gangs with the same needs whose waits lie between the same time-outs."""
        return gang.parts, gang.locality, bisect_right(self._timeouts, gang.fragmented_seconds) if _relaxes(gang) else 0

    def equivalence_seconds(self, gang: Gang) -> float:
        """Return the time until the next time-out."""
        turn = bisect_right(self._timeouts, gang.fragmented_seconds)
        return (
            self._timeouts[turn] - gang.fragmented_seconds
            if _relaxes(gang) and turn < len(self._timeouts)
            else math.inf
        )

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        """Note the running jobs, which may be moved."""
        self._cluster_view = cluster_view
        self._prices.begin_cycle(cluster_view)

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Move as few and cheap jobs as suffice, if that saves the gang more than it costs."""
        if not self.options.moves_max or refusal.locality not in (Locality.SERVER, Locality.RACK):
            return None
        spared_seconds = min(refusal.holds_seconds, self.options.server_seconds + self.options.rack_seconds)
        worth = spared_seconds * gang.gpu_milli / WHOLE_GPU_MILLI
        candidates: list[tuple[float, list[int], tuple[RunningJob, ...]]] = []
        for nodes in _domains(gang, ledger, refusal.locality):
            movable = sorted(self._movable(nodes, fixed, spared_seconds), key=lambda one: (_cost(one), one.gang.job_id))
            lacking = gang.gpu_milli - WHOLE_GPU_MILLI * int(ledger.free_gpus[nodes].sum())
            for size in range(1, self.options.moves_max + 1):
                for some in combinations(movable[:MOVABLE_MAX], size):
                    cost = sum(map(_cost, some))
                    if cost * self.options.gain_min <= worth and lacking <= sum(one.gang.gpu_milli for one in some):
                        candidates.append((cost, nodes, some))
        for _, nodes, some in sorted(candidates, key=lambda candidate: candidate[0]):
            if found := self._try_moves(some, gang, nodes, ledger, rng):
                return found
        return None

    def _movable(self, nodes: Sequence[int], fixed: Collection[str], spared_seconds: float) -> Iterator[RunningJob]:
        """Yield the movable jobs that run on these nodes alone."""
        now, seen = self._cluster_view.now, set(fixed)
        for running_job in (running_job for node in nodes for running_job in self._cluster_view.jobs_on(node)):
            gang, rest = running_job.gang, running_job.gang.estimate.remaining_seconds
            stays = gang.job_id in seen or not running_job.preemptible or gang.kind is JobKind.INFERENCE
            seen.add(gang.job_id)
            if stays or now - running_job.since_seconds < self.options.settled_seconds:
                continue
            leaves = gang.estimate.predictable and rest is not None and rest <= spared_seconds
            if not leaves and all(holding.node in nodes for holding in running_job.holdings):
                yield running_job

    def _try_moves(
        self, some: Sequence[RunningJob], gang: Gang, nodes: Sequence[int], ledger: Ledger, rng: np.random.Generator
    ) -> Rearrangement | None:
        """Try to place a gang instead of some running jobs, and those jobs elsewhere."""
        here = np.isin(np.arange(len(ledger)), nodes)
        with ledger.rolled_back():
            for holding in (holding for running_job in some for holding in running_job.holdings):
                ledger.release(holding)
            one = len(nodes) == 1
            if one and nodes[0] not in room_for_all(gang, ledger):
                return None
            offer = place_on_node(gang, ledger, nodes[0]) if one else place_on_fewest(gang, ledger, here)
            if offer is None:
                return None
            take(ledger, gang, offer)
            moves: list[tuple[RunningJob, Offer]] = []
            for running_job in some:
                place = self.place(replace(running_job.gang, fragmented_seconds=0.0), ledger, rng)
                if isinstance(place, Refusal):
                    return None
                take(ledger, running_job.gang, place)
                moves.append((running_job, place))
        return Rearrangement(offer, tuple(moves))

    def _wait_level(self, gang: Gang, ledger: Ledger) -> WaitLevel:
        """Return the level at which a gang waits; levels that could never hold it are skipped."""
        if not _relaxes(gang):
            alone = gang.gpu_milli and gang.locality is None and could_hold_all(gang, ledger)
            return WaitLevel(gang.locality or (Locality.SERVER if alone else Locality.ANYWHERE))
        levels = [Locality.SERVER] if could_hold_all(gang, ledger) else []
        if len(np.unique(ledger.rack_numbers[ledger.open])) > 1 and fits(
            gang, ledger, within=Locality.RACK, empty=True
        ):
            levels.append(Locality.RACK)
        since, waits = 0.0, {Locality.SERVER: self.options.server_seconds, Locality.RACK: self.options.rack_seconds}
        for level, then in pairwise([*levels, Locality.ANYWHERE]):
            until = since + waits[level]
            if gang.fragmented_seconds < until:
                return WaitLevel(level, since, until, then)
            since = until
        return WaitLevel(Locality.ANYWHERE, since)

    def _on_server(self, gang: Gang, ledger: Ledger, by_type: Scorer | None) -> Offer | None:
        """Place a gang on the server with the least left over."""
        able = able_to_hold(gang, ledger)
        if not able.any():
            return None
        weights = self._weights(gang, ledger)
        return place_on_best(gang, ledger, able, {**weights, by_type: SLOW} if by_type else weights)

    def _type_scorer(self, gang: Gang, ledger: Ledger) -> Scorer | None:
        """Return the scorer of GPU types; None if the gang cannot choose."""
        if not self.options.gpu_types or len(ledger.gpu_types) < 2 or not gang.gpu_milli:
            return None
        wanted = {part.demand.gpu_type for part in gang.parts if part.demand.gpu_milli}
        return self._prices.scorer(gang.estimate, sorted(wanted), ledger)

    def _weights(self, gang: Gang, ledger: Ledger) -> Weights:
        """Return best fit or core balance, after the servers that a gang avoids because other jobs are there."""
        large = gang.gpu_milli >= self.options.dedicated_share * WHOLE_GPU_MILLI * ledger.total_gpus
        if gang.gpu_milli < 2 * WHOLE_GPU_MILLI or not large.any():
            return BALANCED_CORES if self.options.balance_cores else BEST_FIT
        return {**BEST_FIT, marked(large & (ledger.free_gpus < ledger.total_gpus)): CROWDED}


def _relaxes(gang: Gang) -> bool:
    """Return whether a gang relaxes its locality: it has several replicas with GPUs and requested no locality."""
    return gang.locality is None and gang.gpu_milli > 0 and sum(part.replicas for part in gang.parts) > 1


def _cost(running_job: RunningJob) -> float:
    """Return the cost of a move in GPU-seconds; a job without GPUs counts as having one."""
    return running_job.stop_cost_seconds * max(1.0, running_job.gang.gpu_milli / WHOLE_GPU_MILLI)


def _domains(gang: Gang, ledger: Ledger, level: Locality) -> list[list[int]]:
    """Return the servers, or racks, that could hold a gang if they were empty, those that lack least first."""
    if level is Locality.SERVER:
        nodes = room_for_all(gang, ledger, empty=True)
        order = np.lexsort((nodes, -ledger.free_gpus[nodes]))[:DOMAINS_MAX]
        return [[node] for node in nodes[order].tolist()]
    numbers = np.where(ledger.open, ledger.rack_numbers, -1)
    free = {rack: int(ledger.free_gpus[numbers == rack].sum()) for rack in np.unique(numbers[ledger.open]).tolist()}
    racks = sorted(free, key=lambda rack: (-free[rack], rack))[:DOMAINS_MAX]
    return [np.flatnonzero(numbers == rack).tolist() for rack in racks]


def _on_best_type(
    place: Callable[[Gang, Ledger], Offer | None], gang: Gang, ledger: Ledger, by_type: Scorer | None
) -> Offer | None:
    """Place a gang on nodes of one GPU type, the best by score that has room; else on any nodes."""
    scores = by_type(Candidates(gang, ledger, ledger.open)) if by_type else None
    if scores is not None and all(part.demand.gpu_milli for part in gang.parts):
        for kind in _types_with_room(gang, ledger, scores):
            with only_open(ledger, ledger.open & (ledger.type_numbers == kind)):
                if (offer := place(gang, ledger)) is not None:
                    return offer
    return place(gang, ledger)


def _types_with_room(gang: Gang, ledger: Ledger, scores: Scores) -> list[int]:
    """Return the GPU types of which enough are free for a gang, by number, those that score best first."""
    numbers, count = ledger.type_numbers, len(ledger.gpu_types)
    enough = np.ones(count, dtype=np.bool_)
    for part in gang.parts:
        enough &= np.bincount(numbers, np.minimum(ledger.room(part.demand), part.replicas), count) >= part.replicas
    _, first = np.unique(numbers, return_index=True)  # any node of each type: types are numbered as they appear
    return sorted(np.flatnonzero(enough).tolist(), key=lambda kind: (float(scores[first[kind]]), kind))


def _in_rack(gang: Gang, ledger: Ledger) -> Offer | None:
    """Place a gang on the fewest servers of the smallest rack, by free GPUs, that suffices."""
    numbers = ledger.rack_numbers
    roomy = np.ones(int(numbers.max(initial=0)) + 1, dtype=np.bool_)
    for part in gang.parts:
        room = np.minimum(ledger.room(part.demand), part.replicas)
        roomy &= np.bincount(numbers, room, len(roomy)) >= part.replicas
    free = np.bincount(numbers, np.where(ledger.open, ledger.free_gpus if gang.gpu_milli else ledger.free_cores, 0))
    racks = np.flatnonzero(roomy)
    for rack in racks[np.argsort(free[racks], kind="stable")].tolist():
        if (offer := place_on_fewest(gang, ledger, numbers == rack)) is not None:
            return offer
    return None
