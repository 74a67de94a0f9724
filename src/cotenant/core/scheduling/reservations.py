"""Reservations: the earliest places for a gang that has waited long, and what other jobs may do without delaying it.

Theory of operation. This is EASY backfilling (Lifka, The ANL/IBM SP scheduling system, JSSPP 1995 [P]) over a ledger
and any placement policy. Running jobs leave in the order of their expected ends; the end after which the gang fits is
found by bisection, because free resources only grow. That end is the reserved start, and the policy's offer at that
time gives the reserved places. A job without an estimate is never assumed to end.

A part of the reserved places becomes free by then; the rest is free now, and must stay free or be free again. So later
jobs are placed as if that rest were taken, except jobs that end before the reserved start. Nothing else is needed: how
they are placed need not be foreseen.

If the known ends do not suffice, there is no start to reserve. Then the gang's places are kept for it as they become
free, but only once it has waited twice as long, and not forever: see `keeps`.
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
from cotenant.core.model.refusal import Code, Refusal, format_duration, plural
from cotenant.core.model.resources import AMOUNTS, KINDS, counts_of
from cotenant.core.policy.protocols import DefinesEquivalence, PlacementPolicy
from cotenant.core.scheduling.earliest_start import (
    Ask,
    Departure,
    earliest_places,
    ends_within_seconds,
    eventual_places,
    span,
)

TRIES = 4  # per possible reservation
REFRESH_SECONDS = 60.0  # an estimated start is refreshed after this time
RELAXATIONS_MAX = 8  # relaxations of a waiting gang that are considered ahead


@dataclass(frozen=True, slots=True)
class ReservationRules:
    """Which gangs get a reservation: those that have waited this long, at most `most` at a time; 0: none."""

    after_seconds: float = math.inf
    most: int = 1

    def __bool__(self) -> bool:
        return self.after_seconds < math.inf and self.most > 0

    @property
    def tries(self) -> int:
        """The number of long-waiting gangs, first in the order, for which a reservation is tried."""
        return TRIES * self.most

    def starves(self, gang: Gang) -> bool:
        """Return whether a gang has waited long enough."""
        return gang.waited_seconds >= self.after_seconds

    def keeps(self, waited_seconds: float) -> tuple[bool, float]:
        """Return whether places are kept for a gang without an estimated start, and for how long that holds.

        Places are kept once it has waited twice as long as a reservation takes, until it has waited twice as long
        again; then they are given away for as long as it had waited, then kept for twice that, and so on. So any gang
        gets its places if other jobs end at all, and a gang that never does holds up other jobs from a third to two
        thirds of the time [C].

        >>> rule = ReservationRules(after_seconds=600)
        >>> [rule.keeps(minutes * 60) for minutes in (10, 20, 39, 40, 80)]
        [(False, 600), (True, 1200.0), (True, 60.0), (False, 2400.0), (True, 4800.0)]
        """
        first = max(2 * self.after_seconds, 1.0)
        if waited_seconds < first:
            return False, first - waited_seconds
        phase = math.floor(math.log2(waited_seconds / first))
        return phase % 2 == 0, first * 2.0 ** (phase + 1) - waited_seconds


NO_RESERVATIONS = ReservationRules()


def starving_first(
    since: Floats, now: float, gangs: Flags, sequence: Ints, apart: Flags, rule: ReservationRules
) -> Ints:
    """Return the places of jobs, with gangs that have waited longest, and long enough, ahead of equals that came later.

    All columns are by place in the queue's order: `since` when each waits, whether it is one of the `gangs`, its
    `sequence`; `apart` says of each but the first whether it is not an equal of the one before. Returns places, in
    order.
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
    """The sum of what is held on one node."""

    counts: list[int] = field(default_factory=lambda: [0] * len(KINDS))  # as of a ledger
    shares: Counter[int] = field(default_factory=Counter)

    def add(self, holding: Holding) -> None:
        gpus, *others = counts_of(holding)
        added = (0 if holding.shares else gpus, *others)
        self.counts = [one + more for one, more in zip(self.counts, added, strict=True)]
        for index, milli in holding.shares:
            self.shares[index] += milli

    def free_without(self, back: _Amounts, node: int, ledger: Ledger) -> Holding:
        """Return what of this is free now and is not part of what comes `back`."""
        parts = ledger.parts_of(node) if self.shares else ()
        shares = (
            (index, min(parts[index], milli - back.shares[index])) for index, milli in sorted(self.shares.items())
        )
        columns = zip(self.counts, back.counts, ledger.free[:, node].tolist(), strict=True)
        gpus, cores, *amounts = (max(0, min(free, wanted - returned)) for wanted, returned, free in columns)
        kept = tuple((index, milli) for index, milli in shares if milli > 0)
        return Holding(node, gpus, cores, kept, **dict(zip(AMOUNTS, amounts, strict=True)))


def _by_node(holdings: Iterable[Holding]) -> dict[int, _Amounts]:
    amounts: dict[int, _Amounts] = {}
    for holding in holdings:
        amounts.setdefault(holding.node, _Amounts()).add(holding)
    return amounts


@dataclass(slots=True)
class Reservation:
    """Places that a gang will have, after `start_seconds`; infinity: at an unknown time, but kept for it.

    `back` are the jobs that will have left these places by then, with what they hold there.
    """

    gang: Gang
    holdings: tuple[Holding, ...]
    start_seconds: float
    early_seconds: float
    late_seconds: float
    holds_seconds: float
    back: dict[str, tuple[Holding, ...]] = field(default_factory=dict)

    def binds(self, gang: Gang) -> bool:
        """Return whether a gang that starts now may still run at the reserved start."""
        return math.isinf(self.start_seconds) or ends_within_seconds(gang.estimate) > self.start_seconds

    def kept(self, ledger: Ledger, gone: Collection[str]) -> Iterator[Holding]:
        """Yield what is free now and must be free at the start, when the jobs in `gone` have already left."""
        back = _by_node(one for job_id, holdings in self.back.items() if job_id not in gone for one in holdings)
        for node, wanted in _by_node(self.holdings).items():
            kept = wanted.free_without(back.get(node, _Amounts()), node, ledger)
            if any(counts_of(kept)) or kept.shares:
                yield kept

    @property
    def nodes(self) -> int:
        """The number of nodes of its places."""
        return len({holding.node for holding in self.holdings})

    @property
    def summary(self) -> str:
        """When and where the gang will start, for users.

        >>> at = (Holding(0), Holding(1))
        >>> Reservation(Gang("a", ()), at, 720, 480, 1800, 60).summary
        'reserved: estimated start in 12 min (8 min to 30 min) on 2 nodes'
        >>> Reservation(Gang("a", ()), at, 720, 720, 720, 60).summary
        'reserved: estimated start in 12 min on 2 nodes'
        """
        nodes = plural(self.nodes, "node")
        if math.isinf(self.start_seconds):
            return (
                f"reserved: what becomes free on {nodes} is kept for it for {format_duration(self.holds_seconds)}; too "
                "little is known of when others end to estimate its start"
            )
        likely, early = format_duration(self.start_seconds), format_duration(self.early_seconds)
        late = "" if math.isinf(self.late_seconds) else format_duration(self.late_seconds)
        span = f" ({early} to {late})" if late else f" ({early} or later)"
        return f"reserved: estimated start in {likely}{span if {early, late} != {likely} else ''} on {nodes}"

    def annotate(self, refusal: Refusal) -> Refusal:
        """Return the refusal of its gang, with the reservation added."""
        numbers = {"reserved_nodes": float(self.nodes)}
        if self.start_seconds < math.inf:
            numbers |= {"reserved_start_seconds": self.start_seconds, "reserved_early_seconds": self.early_seconds}
        if self.late_seconds < math.inf:
            numbers["reserved_late_seconds"] = self.late_seconds
        return replace(
            refusal,
            detail=f"{refusal.full_detail}; {self.summary}",
            numbers={**refusal.numbers, **numbers},
            holds_seconds=min(refusal.holds_seconds, self.holds_seconds),
            held_seconds=0.0,
            relaxes_to=None,
        )


def has_reservation(refusal: Refusal) -> bool:
    """Return whether a gang with this refusal has a reservation."""
    return "reserved_nodes" in refusal.numbers


def held_back(gang: Gang, refusal: Refusal, reservations: Sequence[Reservation]) -> Refusal:
    """Return the refusal of a gang for which there would be room without the reservations.

    `refusal` is the refusal given the resources that are not reserved.
    """
    first = reservations[0]
    ends = ends_within_seconds(gang.estimate)
    expected = "its own run time is unknown" if math.isinf(ends) else f"it may run for {format_duration(ends)}"
    when = "" if math.isinf(first.start_seconds) else f" in {format_duration(first.start_seconds)}"
    names = " and ".join(one.gang.job_id for one in reservations)
    numbers = {"kept_nodes": float(first.nodes), "other_waited_seconds": first.gang.waited_seconds}
    if first.start_seconds < math.inf:
        numbers["other_starts_in_seconds"] = first.start_seconds
    if ends < math.inf:
        numbers["ends_within_seconds"] = ends
    return Refusal(
        Code.RESERVED,
        f"its places on {plural(first.nodes, 'node')} are reserved for {names}, which has waited for "
        f"{format_duration(first.gang.waited_seconds)} and will start{when}; {expected}",
        f"{names} starts, or other jobs finish",
        numbers,
        holds_seconds=refusal.holds_seconds,
        held_seconds=refusal.held_seconds,
    )


def groups(departures: Iterable[Departure], nodes: Collection[int]) -> dict[str, tuple[Holding, ...]]:
    """Return what each departing job gives back on some nodes."""
    back = {one.job_id: tuple(held for held in one.holdings if held.node in nodes) for one in departures}
    return {job_id: holdings for job_id, holdings in back.items() if holdings}


def reserve(
    gang: Gang,
    ledger: Ledger,
    ask: Ask,
    departures: Sequence[Departure],
    rule: ReservationRules,
    ages_seconds: Iterable[float] = (),
) -> Reservation | None:
    """Return a reservation of the earliest places for a gang; None if nothing should be kept for it now.

    Leaves the ledger unchanged.
    """
    if found := earliest_places(gang, ledger, ask, departures, ages_seconds):
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
            REFRESH_SECONDS,
            groups(found.gone, nodes),
        )
    keeps, holds_seconds = rule.keeps(gang.waited_seconds)
    if not keeps or (found := eventual_places(gang, ledger, ask, departures)) is None:
        return None
    return Reservation(gang, found.holdings, math.inf, math.inf, math.inf, holds_seconds)


def relaxations(gang: Gang, policy: PlacementPolicy) -> list[float]:
    """Return the times after which a policy would answer differently because of the gang's wait alone."""
    times: list[float] = []
    if isinstance(policy, DefinesEquivalence):
        while len(times) < RELAXATIONS_MAX:
            sofar = times[-1] if times else 0.0
            older = replace(gang, fragmented_seconds=gang.fragmented_seconds + sofar)
            if not 0 < (seconds := policy.equivalence_seconds(older)) < math.inf:
                break
            times.append(sofar + seconds)
    return times
