"""Reservations: the earliest places for a gang that starves, and what others may do meanwhile without breaking them.

Theory of operation. This is EASY backfilling (Lifka, The ANL/IBM SP scheduling system, JSSPP 1995 [P]) over a ledger
and any placement policy. The running jobs leave in the order in which they are expected to end; after which of them the
gang fits is found by bisection, for room only grows. That end is the reserved start, and what the policy offers then
are the reserved places. A job of which nothing is known is never assumed to end.

Of the reserved places a part becomes free by then; the rest is free now, and has to stay so or be free again. So those
who come later are placed as if that rest were taken, but for those who end before the reserved start. With that, all
else follows: nobody has to foresee how they are placed.

Where the ends that are known do not suffice there is no start to reserve. Then the gang's places are kept for it as
they become free, but only once it has waited for twice as long, and not for ever: see `keeps`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Flags, Floats, Ints
from cotenant.core.model.refusal import Code, Refusal, plural, span_in_words
from cotenant.core.policy.protocols import Discerns, PlacementPolicy
from cotenant.core.scheduling.earliest_start import Ask, Departure, earliest, ends_within_seconds, in_the_end, span

TRIES = 4  # for each reservation there may be
TOLD_ANEW_SECONDS = 60.0  # an estimated start is told anew after that
RELAXATIONS_MAX = 8  # of a gang while it waits, that are looked ahead to


@dataclass(frozen=True, slots=True)
class Reserving:
    """Who gets a reservation: gangs that have waited for so long, at most so many at a time; 0: nobody does."""

    after_seconds: float = math.inf
    most: int = 1

    def __bool__(self) -> bool:
        return self.after_seconds < math.inf and self.most > 0

    @property
    def tries(self) -> int:
        """Of so many gangs that starve it is looked whether they can be reserved anything: the first in the order."""
        return TRIES * self.most

    def starves(self, gang: Gang) -> bool:
        """Whether a gang has waited for long enough."""
        return gang.waited_seconds >= self.after_seconds

    def keeps(self, waited_seconds: float) -> tuple[bool, float]:
        """Whether places are kept for a gang of which nobody knows when it can start, and for how long that holds.

        They are once it has waited for twice as long as a reservation takes, until it has waited twice as long again;
        then they are given away for as long as it had waited, then kept for twice that, and so on. So any gang gets its
        places if others end at all, and one that never does holds up others from a third to two thirds of the time [C].

        >>> rule = Reserving(after_seconds=600)
        >>> [rule.keeps(minutes * 60) for minutes in (10, 20, 39, 40, 80)]
        [(False, 600), (True, 1200.0), (True, 60.0), (False, 2400.0), (True, 4800.0)]
        """
        first = max(2 * self.after_seconds, 1.0)
        if waited_seconds < first:
            return False, first - waited_seconds
        phase = math.floor(math.log2(waited_seconds / first))
        return phase % 2 == 0, first * 2.0 ** (phase + 1) - waited_seconds


NO_RESERVING = Reserving()


def starving_first(since: Floats, now: float, gangs: Flags, sequence: Ints, apart: Flags, rule: Reserving) -> Ints:
    """Order jobs so that the gangs that have waited longest, and for long enough, go before equals who came later.

    All columns are by place in the order of the queue: `since` when each waits, whether it is one of the `gangs`, its
    `sequence`; `apart` says of each but the first whether it is no equal of the one before. Gives places, in order.
    """
    starving = np.flatnonzero(gangs & (now - since >= rule.after_seconds))
    place = np.arange(len(since), dtype=np.float64)
    if not len(starving):
        return np.arange(len(since))
    chosen = starving[np.lexsort((sequence[starving], since[starving]))][: rule.tries]
    equals = np.concatenate([[0], np.cumsum(apart)])
    turn = np.full(len(since), len(since), dtype=np.int64)
    for number, at in enumerate(chosen.tolist()):
        first_later = int(np.argmax((equals == equals[at]) & ((since > since[at]) | (place == at))))
        place[at], turn[at] = min(place[at], first_later - 0.5), number
    return np.lexsort((turn, place))


@dataclass(slots=True)
class _Amounts:
    """What is held on one node, summed up."""

    gpus: int = 0
    cores: int = 0
    memory_bytes: int = 0
    shares: Counter[int] = field(default_factory=Counter)

    def add(self, holding: Holding) -> None:
        self.gpus += 0 if holding.shares else holding.gpus
        self.cores += holding.cores
        self.memory_bytes += holding.memory_bytes
        for index, milli in holding.shares:
            self.shares[index] += milli

    def free_without(self, back: _Amounts, node: int, ledger: Ledger) -> Holding:
        """Name what of this is free now and is not a part of what comes `back`."""
        parts = ledger.parts_of(node) if self.shares else ()
        shares = (
            (index, min(parts[index], milli - back.shares[index])) for index, milli in sorted(self.shares.items())
        )
        return Holding(
            node,
            _kept(self.gpus, back.gpus, int(ledger.free_gpus[node])),
            _kept(self.cores, back.cores, int(ledger.free_cores[node])),
            _kept(self.memory_bytes, back.memory_bytes, int(ledger.free_memory[node])),
            tuple((index, milli) for index, milli in shares if milli > 0),
        )


def _kept(wanted: int, back: int, free: int) -> int:
    return max(0, min(free, wanted - back))


def _by_node(holdings: Iterable[Holding]) -> dict[int, _Amounts]:
    amounts: dict[int, _Amounts] = {}
    for holding in holdings:
        amounts.setdefault(holding.node, _Amounts()).add(holding)
    return amounts


@dataclass(slots=True)
class Reservation:
    """Places that a gang will have, in so many seconds; infinity: nobody knows when, but they are kept for it.

    `back` are those who will have gone from these places by then, with what they hold there.
    """

    gang: Gang
    holdings: tuple[Holding, ...]
    start_seconds: float
    early_seconds: float
    late_seconds: float
    holds_seconds: float
    back: dict[str, tuple[Holding, ...]] = field(default_factory=dict)

    def binds(self, gang: Gang) -> bool:
        """Whether a gang that starts now may still be there at the reserved start."""
        return math.isinf(self.start_seconds) or ends_within_seconds(gang.estimate) > self.start_seconds

    def kept(self, ledger: Ledger, gone: Collection[str]) -> Iterator[Holding]:
        """Name what is free now and has to be at the start, when those in `gone` have left already."""
        back = _by_node(one for job_id, holdings in self.back.items() if job_id not in gone for one in holdings)
        for node, wanted in _by_node(self.holdings).items():
            kept = wanted.free_without(back.get(node, _Amounts()), node, ledger)
            if kept.gpus or kept.cores or kept.memory_bytes or kept.shares:
                yield kept

    @property
    def nodes(self) -> int:
        """On how many nodes its places are."""
        return len({holding.node for holding in self.holdings})

    @property
    def told(self) -> str:
        """When and where it will start, in words.

        >>> at = (Holding(0), Holding(1))
        >>> Reservation(Gang("a", ()), at, 720, 480, 1800, 60).told
        'reserved: estimated start in 12 min (8 min to 30 min) on 2 nodes'
        >>> Reservation(Gang("a", ()), at, 720, 720, 720, 60).told
        'reserved: estimated start in 12 min on 2 nodes'
        """
        nodes = plural(self.nodes, "node")
        if math.isinf(self.start_seconds):
            return (
                f"reserved: what becomes free on {nodes} is kept for it for {span_in_words(self.holds_seconds)}; too "
                "little is known of when others end to estimate its start"
            )
        likely, early = span_in_words(self.start_seconds), span_in_words(self.early_seconds)
        late = "" if math.isinf(self.late_seconds) else span_in_words(self.late_seconds)
        span = f" ({early} to {late})" if late else f" ({early} or later)"
        return f"reserved: estimated start in {likely}{span if {early, late} != {likely} else ''} on {nodes}"

    def tell(self, refusal: Refusal) -> Refusal:
        """Add to the reason why its gang waits that it has a reservation."""
        numbers = {"reserved_nodes": float(self.nodes)}
        if self.start_seconds < math.inf:
            numbers |= {"reserved_start_seconds": self.start_seconds, "reserved_early_seconds": self.early_seconds}
        if self.late_seconds < math.inf:
            numbers["reserved_late_seconds"] = self.late_seconds
        return replace(
            refusal,
            detail=f"{refusal.told}; {self.told}",
            numbers={**refusal.numbers, **numbers},
            holds_seconds=min(refusal.holds_seconds, self.holds_seconds),
            held_seconds=0.0,
            relaxes_to=None,
        )


def has_reservation(refusal: Refusal) -> bool:
    """Tell whether a gang that was refused so has a reservation."""
    return "reserved_nodes" in refusal.numbers


def held_back(gang: Gang, refusal: Refusal, reservations: Sequence[Reservation]) -> Refusal:
    """Say why a gang has to wait for which there would be room, were it not for those who wait for longer.

    `refusal` is what it was told about the room that is not reserved.
    """
    first = reservations[0]
    ends = ends_within_seconds(gang.estimate)
    expected = "nobody knows for how long it would run" if math.isinf(ends) else f"it may run for {span_in_words(ends)}"
    when = "" if math.isinf(first.start_seconds) else f" in {span_in_words(first.start_seconds)}"
    names = " and ".join(one.gang.job_id for one in reservations)
    numbers = {"kept_nodes": float(first.nodes), "other_waited_seconds": first.gang.waited_seconds}
    if first.start_seconds < math.inf:
        numbers["other_starts_in_seconds"] = first.start_seconds
    if ends < math.inf:
        numbers["ends_within_seconds"] = ends
    return Refusal(
        Code.RESERVED,
        f"the room that it would take on {plural(first.nodes, 'node')} is reserved for {names}, which has waited for "
        f"{span_in_words(first.gang.waited_seconds)} and is to start{when}; {expected}",
        f"{names} starts, or other jobs finish",
        numbers,
        holds_seconds=refusal.holds_seconds,
        held_seconds=refusal.held_seconds,
    )


def groups(departures: Iterable[Departure], nodes: Collection[int]) -> dict[str, tuple[Holding, ...]]:
    """Say what of some nodes each of those who go gives back."""
    back = {one.job_id: tuple(held for held in one.holdings if held.node in nodes) for one in departures}
    return {job_id: holdings for job_id, holdings in back.items() if holdings}


def reserve(
    gang: Gang,
    ledger: Ledger,
    ask: Ask,
    departures: Sequence[Departure],
    rule: Reserving,
    ages_seconds: Iterable[float] = (),
) -> Reservation | None:
    """Reserve the earliest places for a gang; None where nothing is to be kept for it now. The ledger stays as is."""
    if found := earliest(gang, ledger, ask, departures, ages_seconds):
        nodes = {holding.node for holding in found.holdings}
        early = late = found.seconds
        if found.gone:
            early = span(found.holdings, ledger, departures, lambda one: one.early_seconds)
            late = span(found.holdings, ledger, departures, lambda one: one.late_seconds)
        return Reservation(
            gang,
            found.holdings,
            found.seconds,
            min(early, found.seconds),
            max(late, found.seconds),
            TOLD_ANEW_SECONDS,
            groups(found.gone, nodes),
        )
    keeps, holds_seconds = rule.keeps(gang.waited_seconds)
    if not keeps or (found := in_the_end(gang, ledger, ask, departures)) is None:
        return None
    return Reservation(gang, found.holdings, math.inf, math.inf, math.inf, holds_seconds)


def relaxations(gang: Gang, policy: PlacementPolicy) -> list[float]:
    """Say after which times a policy would answer otherwise for the gang's wait alone."""
    times: list[float] = []
    if isinstance(policy, Discerns):
        while len(times) < RELAXATIONS_MAX:
            sofar = times[-1] if times else 0.0
            older = replace(gang, fragmented_seconds=gang.fragmented_seconds + sofar)
            if not 0 < (seconds := policy.alike_seconds(older)) < math.inf:
                break
            times.append(sofar + seconds)
    return times
