"""Chooses victims for a gang: those whose stop costs least, among those that the order leaves to choose from.

Theory of operation. The order determines which running jobs may be stopped for a gang, and if it is enforced it also
determines which go first. If it is not, as when a tenant reclaims lent resources, whole groups have equal standing: for
example, jobs of one priority that all borrow. Of these the cheapest set is chosen, by this order: no job of a higher
standing than necessary; then the least service lost (run time since the last checkpoint plus restart, times GPUs); then
the fewest jobs.

Only the policy can tell whether a set suffices, so sets are tried. For few jobs all sets are tried, the cheapest first,
so the first that suffices is the cheapest there is. For many jobs there are candidates: the last in the order, those
that free most for their cost, and those on one node; each is reduced to what is needed, and the cheapest is chosen. It
never costs more than the last in the order would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.gang_allocation import Victim, cores_of, gpu_milli_of

EXACT_MAX = 8  # for at most this many jobs all sets are tried
THIN_MAX = 12  # jobs of a set that are tried without
NODES_MAX = 4  # nodes on which to make room alone
CORE_WEIGHT = 0.001  # of a GPU, so that jobs without GPUs are not stopped for nothing [C]


def _weight(holdings: Sequence[Holding]) -> float:
    return gpu_milli_of(holdings) / WHOLE_GPU_MILLI + CORE_WEIGHT * cores_of(holdings)


def service_lost(victim: Victim) -> float:
    """Return the service that a stop loses, in GPU-seconds."""
    return victim.stop_cost_seconds * _weight(victim.holdings)


def cost_of(victims: Collection[Victim]) -> tuple[float, int]:
    """Return the cost of a set of one standing: GPU-seconds lost, then jobs."""
    return round(sum(service_lost(victim) for victim in victims), 6), len(victims)


Suffices = Callable[[Sequence[Victim]], bool]
Ask = Callable[[Sequence[Victim]], Offer | Refusal]  # places for a gang if these victims had stopped


def fewest(gang: Gang, left: Sequence[Victim], ledger: Ledger, ask: Ask) -> tuple[Offer, list[Victim]] | Refusal:
    """Return places for a gang, and the victims to stop for it: as few of the last as suffice, or the cheapest.

    The first to go is the last of `left`; all of them, if any, may be stopped. A larger set always suffices if a
    smaller one does. If all are too few, returns the refusal that the gang gets when all have stopped.
    """
    too_few, enough = 0, 1
    while isinstance(offer := ask(left[-enough:]), Refusal):
        if enough == len(left):
            return offer
        too_few, enough = enough, min(2 * enough, len(left))
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        tried = ask(left[-middle:])
        if isinstance(tried, Refusal):
            too_few = middle
        else:
            enough, offer = middle, tried
    going = list(left[-enough:])
    if (standing := going[0].standing) is None:
        return offer, going
    pool = [one for one in reversed(left) if one.standing is not None and one.standing <= standing]
    chosen = {
        one.job_id for one in cheapest(gang, pool, going, ledger, lambda some: not isinstance(ask(some), Refusal))
    }
    going = [one for one in left if one.job_id in chosen]
    offer = ask(going)
    assert not isinstance(offer, Refusal), "the chosen victims suffice"
    return offer, going


def cheapest(gang: Gang, pool: Sequence[Victim], last: Sequence[Victim], ledger: Ledger, ask: Suffices) -> list[Victim]:
    """Return the cheapest set of a pool that suffices for a gang. `last` is a set that does: the last in the order.

    `ask` tells whether a set suffices; a larger set always does if a smaller one does. The pool's order breaks ties.
    """
    if len(pool) <= EXACT_MAX:
        cheaper = (some for some in _by_cost(pool) if cost_of(some) <= cost_of(last))
        return next((list(some) for some in cheaper if ask(some)), list(last))
    sets = [_thinned(list(last), ask)]
    for some in _candidates(gang, pool, ledger, ask):
        if cost_of(some) < cost_of(sets[0]):
            sets.append(_thinned(some, ask))
    return min(sets, key=cost_of)


def _by_cost(pool: Sequence[Victim]) -> list[tuple[Victim, ...]]:
    """Return all sets, the cheapest first; ties by the pool's order."""
    sets = [some for count in range(1, len(pool) + 1) for some in combinations(pool, count)]
    return sorted(sets, key=cost_of)


def _candidates(gang: Gang, pool: Sequence[Victim], ledger: Ledger, ask: Suffices) -> Iterator[list[Victim]]:
    """Yield sets that suffice."""
    by_gain = sorted(pool, key=lambda victim: service_lost(victim) / max(_weight(victim.holdings), CORE_WEIGHT))
    too_few, enough = 0, len(by_gain)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if ask(by_gain[:middle]) else (middle, enough)
    yield by_gain[:enough]
    for some in sorted(_on_one_node(gang, pool, ledger), key=cost_of)[:NODES_MAX]:
        if ask(some):
            yield some


def _on_one_node(gang: Gang, pool: Sequence[Victim], ledger: Ledger) -> Iterator[list[Victim]]:
    """Yield for each node the cheapest set whose end lets all of a gang fit there, by counting."""
    by_node: dict[int, list[Victim]] = {}
    for victim in pool:
        for node in {holding.node for holding in victim.holdings}:
            by_node.setdefault(node, []).append(victim)
    free = ledger.free_milli
    for node, victims in sorted(by_node.items()):
        milli, cores = gang.gpu_milli - int(free[node]), gang.cores - int(ledger.free_cores[node])
        some: list[Victim] = []
        for victim in sorted(victims, key=lambda victim: service_lost(victim)):
            if milli <= 0 and cores <= 0:
                break
            there = [holding for holding in victim.holdings if holding.node == node]
            milli, cores = milli - gpu_milli_of(there), cores - cores_of(there)
            some.append(victim)
        if some and milli <= 0 and cores <= 0:
            yield some


def _thinned(victims: list[Victim], ask: Suffices) -> list[Victim]:
    """Return a set without the victims that are not needed, trying the most expensive first."""
    for victim in sorted(victims, key=lambda victim: -service_lost(victim))[:THIN_MAX]:
        fewer = [one for one in victims if one is not victim]
        if fewer and ask(fewer):
            victims = fewer
    return victims
