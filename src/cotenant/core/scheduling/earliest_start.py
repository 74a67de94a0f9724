"""The earliest places for a gang that cannot start now: who leaves before, as far as that is known, and what then fits.

Room only grows as jobs end, so the first end after which a policy has places is found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.placement.gang_allocation import take
from cotenant.core.policy.cluster_view import Resident, Scene

OVERDUE_SHARE = 0.1  # a job that has outlived what was expected goes on for this share of its run [R]
Ask = Callable[[Gang, Collection[str]], Offer | None]  # places for a gang once those who are named have gone


@dataclass(frozen=True, slots=True)
class Departure:
    """When a running job is expected to end, in seconds from now: the 10th, 50th and 90th percentile.

    Infinity: nothing is known. `ran_seconds` is how long it has run.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    likely_seconds: float = math.inf
    early_seconds: float = math.inf
    late_seconds: float = math.inf
    ran_seconds: float = 0.0


def departure_of(job_id: str, holdings: tuple[Holding, ...], estimate: Estimate, ran_seconds: float) -> Departure:
    """Say when a job will be gone of which an estimate is known as of now.

    >>> told = Estimate(predictable=True, remaining_seconds=60, remaining_p90_seconds=90)
    >>> one = departure_of("a", (), told, 100)
    >>> one.early_seconds, one.likely_seconds, one.late_seconds
    (60, 60, 90)
    """
    likely = estimate.remaining_seconds
    if not estimate.predictable or likely is None:
        return Departure(job_id, holdings, ran_seconds=ran_seconds)
    if likely <= 0:
        likely = max(1.0, OVERDUE_SHARE * ran_seconds)
    early, late = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
    return Departure(
        job_id,
        holdings,
        likely,
        likely if early is None else min(early, likely),
        likely if late is None else max(late, likely),
        ran_seconds,
    )


def departures_of(scene: Scene) -> list[Departure]:
    """Say of all residents when they will be gone."""
    return [_departure(resident, scene.now) for resident in scene.residents().values()]


def _departure(resident: Resident, now: float) -> Departure:
    ran = max(0.0, now - resident.since_seconds)
    return departure_of(resident.gang.job_id, resident.holdings, resident.gang.estimate, ran)


def ends_within_seconds(estimate: Estimate) -> float:
    """Within how long a job that starts now ends nine times of ten; infinity where nothing is known.

    >>> ends_within_seconds(Estimate(predictable=True, remaining_seconds=60))
    60
    """
    if not estimate.predictable or estimate.remaining_seconds is None:
        return math.inf
    return max(estimate.remaining_seconds, estimate.remaining_p90_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Found:
    """After how long a gang finds places, which, and who had gone by then."""

    seconds: float
    offer: Offer
    holdings: tuple[Holding, ...]
    gone: tuple[Departure, ...]


def earliest(
    gang: Gang, ledger: Ledger, ask: Ask, departures: Iterable[Departure], ages_seconds: Iterable[float] = ()
) -> Found | None:
    """Find when a gang can start that cannot now, if all end as is likely: O(log n) questions for n departures.

    `ages_seconds` are times from now at which the policy would answer otherwise for the gang's wait alone, if its
    places are in fragments until then. None: the ends that are known do not suffice. The ledger is left as it was.
    """
    ages_seconds = list(ages_seconds)
    known = sorted((one for one in departures if one.likely_seconds < math.inf), key=_by_end)
    ends = [one.likely_seconds for one in known]
    moments = sorted({*ends, *ages_seconds})
    counts = [bisect_right(ends, moment) for moment in moments]
    waited, fragmented = gang.waited_seconds, gang.fragmented_seconds
    older = [
        replace(gang, waited_seconds=waited + moment, fragmented_seconds=fragmented + bool(ages_seconds) * moment)
        for moment in moments
    ]
    found = _first(older, counts, known, ledger, ask)
    if found is None:
        return None
    at, offer, holdings = found
    return Found(moments[at], offer, holdings, tuple(known[: counts[at]]))


def _by_end(departure: Departure) -> tuple[float, str]:
    return departure.likely_seconds, departure.job_id


def in_the_end(gang: Gang, ledger: Ledger, ask: Ask, departures: Iterable[Departure]) -> Found | None:
    """Find places that a gang will have at some time, though nobody knows when: those that need the fewest to end.

    Those whose end is known go first; of the others, those that have run for the shortest time: what is known of a job
    that has run for some time is that it may run for as much again [R].
    """
    order = sorted(departures, key=lambda one: (one.likely_seconds, one.ran_seconds, one.job_id))
    found = _first([gang] * len(order), list(range(1, len(order) + 1)), order, ledger, ask)
    if found is None:
        return None
    at, offer, holdings = found
    return Found(math.inf, offer, holdings, tuple(order[: at + 1]))


def _first(
    gangs: Sequence[Gang], counts: Sequence[int], order: Sequence[Departure], ledger: Ledger, ask: Ask
) -> tuple[int, Offer, tuple[Holding, ...]] | None:
    """Find the first of several steps at which there are places, when `counts` have gone at each, in their order.

    First in leaps, for most wait for few; those who go and come back between two questions are only those between.
    """
    released = 0
    best: tuple[int, Offer, tuple[Holding, ...]] | None = None

    def asked(step: int) -> bool:
        nonlocal released, best
        for one in order[released : counts[step]]:
            for holding in one.holdings:
                ledger.release(holding)
        for one in reversed(order[counts[step] : released]):
            for holding in one.holdings:
                ledger.hold(holding)
        released = counts[step]
        offer = ask(gangs[step], {one.job_id for one in order[:released]})
        if offer is None:
            return False
        with ledger.undone():
            best = step, offer, take(ledger, gangs[step], offer)
        return True

    too_few, enough = -1, 0
    with ledger.undone():
        while enough < len(counts) and not asked(enough):
            too_few, enough = enough, (2 * enough + 1 if enough < len(counts) - 1 else len(counts))
            enough = min(enough, len(counts) - 1) if too_few < len(counts) - 1 else enough
        if enough >= len(counts):
            return None
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if asked(middle):
                enough = middle
            else:
                too_few = middle
    return best


def span(
    holdings: Sequence[Holding], ledger: Ledger, departures: Iterable[Departure], at: Callable[[Departure], float]
) -> float:
    """Say after how long all of some places are free, where departures are `at` some time; infinity: maybe never."""
    nodes = {holding.node for holding in holdings}
    there = sorted((one for one in departures if any(held.node in nodes for held in one.holdings)), key=at)
    with ledger.undone():
        if _all_free(holdings, ledger):
            return 0.0
        for seconds, going in groupby(there, key=at):
            if math.isinf(seconds):
                break
            for holding in (held for one in going for held in one.holdings):
                ledger.release(holding)
            if _all_free(holdings, ledger):
                return seconds
    return math.inf


def _all_free(holdings: Sequence[Holding], ledger: Ledger) -> bool:
    with ledger.undone():
        for holding in holdings:
            if not ledger.can_hold(holding):
                return False
            ledger.hold(holding)
    return True
