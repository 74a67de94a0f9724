"""The earliest places for a gang that cannot start now, from the expected ends of running jobs.

Free resources only grow as jobs end, so the first end after which a policy finds places is found by bisection.
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
from cotenant.core.policy.cluster_view import ClusterView, RunningJob

OVERDUE_SHARE = 0.1  # a job that has outlived its estimate is expected to go on for this share of its run [R]
Ask = Callable[[Gang, Collection[str]], Offer | None]  # places for a gang after the named jobs have ended


@dataclass(frozen=True, slots=True)
class Departure:
    """When a running job is expected to end, in seconds from now: the 10th, 50th and 90th percentile.

    Infinity: unknown. `ran_seconds` is how long it has run.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    likely_seconds: float = math.inf
    early_seconds: float = math.inf
    late_seconds: float = math.inf
    ran_seconds: float = 0.0


def departure_of(job_id: str, holdings: tuple[Holding, ...], estimate: Estimate, ran_seconds: float) -> Departure:
    """Return the expected departure of a job, given a current estimate.

    >>> estimate = Estimate(predictable=True, remaining_seconds=60, remaining_p90_seconds=90)
    >>> one = departure_of("a", (), estimate, 100)
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


def departures_of(cluster_view: ClusterView) -> list[Departure]:
    """Return the expected departures of all running jobs."""
    return [_departure(running_job, cluster_view.now) for running_job in cluster_view.running_jobs().values()]


def _departure(running_job: RunningJob, now: float) -> Departure:
    ran = max(0.0, now - running_job.since_seconds)
    return departure_of(running_job.gang.job_id, running_job.holdings, running_job.gang.estimate, ran)


def ends_within_seconds(estimate: Estimate) -> float:
    """Return the time within which a job that starts now ends in 9 of 10 cases; infinity if unknown.

    >>> ends_within_seconds(Estimate(predictable=True, remaining_seconds=60))
    60
    """
    if not estimate.predictable or estimate.remaining_seconds is None:
        return math.inf
    return max(estimate.remaining_seconds, estimate.remaining_p90_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class FoundPlaces:
    """Places for a gang, the time until it gets them, and the jobs that will have ended by then."""

    seconds: float
    offer: Offer
    holdings: tuple[Holding, ...]
    gone: tuple[Departure, ...]


def earliest_places(
    gang: Gang, ledger: Ledger, ask: Ask, departures: Iterable[Departure], ages_seconds: Iterable[float] = ()
) -> FoundPlaces | None:
    """Return when and where a gang can start that cannot start now, if all jobs end as expected: O(log n) policy calls.

    `ages_seconds` are times from now at which the policy would answer differently because of the gang's wait alone, if
    resources stay fragmented until then. None: the known ends do not suffice. Leaves the ledger unchanged.
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
    return FoundPlaces(moments[at], offer, holdings, tuple(known[: counts[at]]))


def _by_end(departure: Departure) -> tuple[float, str]:
    return departure.likely_seconds, departure.job_id


def eventual_places(gang: Gang, ledger: Ledger, ask: Ask, departures: Iterable[Departure]) -> FoundPlaces | None:
    """Return places that a gang will have at an unknown time: those that need the fewest jobs to end.

    Jobs with known ends go first; of the others, those that have run for the shortest time: a job that has run for some
    time is expected to run for as long again [R].
    """
    order = sorted(departures, key=lambda one: (one.likely_seconds, one.ran_seconds, one.job_id))
    found = _first([gang] * len(order), list(range(1, len(order) + 1)), order, ledger, ask)
    if found is None:
        return None
    at, offer, holdings = found
    return FoundPlaces(math.inf, offer, holdings, tuple(order[: at + 1]))


def _first(
    gangs: Sequence[Gang], counts: Sequence[int], order: Sequence[Departure], ledger: Ledger, ask: Ask
) -> tuple[int, Offer, tuple[Holding, ...]] | None:
    """Return the first of several steps at which there are places, with `counts` departures gone at each, in order.

    Steps are tried in leaps first, because most gangs wait for few jobs; only the departures between two tries are
    undone.
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
        with ledger.rolled_back():
            best = step, offer, take(ledger, gangs[step], offer)
        return True

    too_few, enough = -1, 0
    with ledger.rolled_back():
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
    """Return the time until all of some places are free, with departures `at` some time; infinity: maybe never."""
    nodes = {holding.node for holding in holdings}
    there = sorted((one for one in departures if any(held.node in nodes for held in one.holdings)), key=at)
    with ledger.rolled_back():
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
    with ledger.rolled_back():
        return all(ledger.hold_if_free(holding) for holding in holdings)
