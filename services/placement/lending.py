"""Cores that were lent to running attempts, and are asked back for those that wait.

A plan counts lent cores as free (`Cluster.leaving`); a start that needs them waits for the resize that brings them
back, as it would for a job that has to stop, but for milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.core import cycle
from cotenant.core.lifecycle import AttemptState
from cotenant.core.refusals import plural
from cotenant.rpc import translate
from cotenant.services.placement.cluster import Cluster
from cotenant.services.placement.following import cores_of, own_cores_of, places_of
from cotenant.services.placement.records import Live


@dataclass(frozen=True, slots=True)
class Loan:
    """An attempt that gives lent cores back: what its replicas hold then, by role, and why."""

    live: Live
    cores: tuple[int, ...]
    reason: str


def ask_back(
    cluster: Cluster, waiting: Sequence[cycle.Start], stops: Sequence[Live]
) -> tuple[tuple[Loan, ...], dict[str, int]]:
    """Choose who gives cores back, so that all starts that wait for room have enough; and what they claim, by node.

    What stops, or shrinks already, is counted first. No more is asked back than is needed, the largest loan of a node
    first; a gang gives back in lock-step.
    """
    if not waiting:
        return (), {}
    claimed: Counter[int] = Counter()
    for start in waiting:
        for holding in start.holdings:
            claimed[holding.node] += holding.cores
    soon = _soon(cluster, stops)
    leaving = {live.key[0] for live in stops}
    loans: dict[str, Loan] = {}
    for node in sorted(claimed):
        short = claimed[node] - int(cluster.ledger.free_cores[node]) - soon[node]
        lenders = [live for live in cluster.on_node(cluster.node_at(node).id) if live.key[0] not in leaving]
        able = [live for live in lenders if live.key[0] not in loans and not live.target and cluster.coming_back(live)]
        for live in sorted(able, key=lambda live: (-cluster.coming_back(live)[cluster.node_at(node).id], live.key)):
            if short > 0:
                loans[live.key[0]] = loan = _loan(cluster, live, node, short)
                back = _given_back(cluster, loan)
                soon.update(back)
                short -= back[node]
    names = {cluster.node_at(node).id: cores for node, cores in claimed.items() if cores}
    return tuple(loans.values()), names


def _soon(cluster: Cluster, stops: Sequence[Live]) -> Counter[int]:
    """Cores by node that become free though nobody is asked."""
    soon: Counter[int] = Counter()
    leaving = {live.key[0] for live in stops}
    for live in cluster.attempts.values():
        if live.key[0] in leaving or live.state is AttemptState.STOPPING:
            for holding in live.holdings:
                soon[holding.node] += holding.cores
        elif live.target:
            for node_id, cores in cluster.coming_back(live).items():
                soon[cluster.nodes[node_id].number] += cores
    return soon


def _loan(cluster: Cluster, live: Live, node: int, short: int) -> Loan:
    """Ask an attempt for so many cores on a node, as far as they were lent."""
    spec = translate.spec_from_wire(live.record.spec)
    cores, own = list(cores_of(live, spec)), own_cores_of(live, spec)
    for share in places_of(cluster, live, spec):
        lent = max(0, cores[share.part] - own[share.part])
        if share.node == node and lent and short > 0:
            less = min(lent, -(-short // share.replicas))
            cores[share.part] -= less
            short -= less * share.replicas
    back = sum(cores_of(live, spec)) - sum(cores)
    return Loan(live, tuple(cores), f"{plural(back, 'core')} per replica that had been lent went to a job that waited")


def _given_back(cluster: Cluster, loan: Loan) -> Mapping[int, int]:
    spec = translate.spec_from_wire(loan.live.record.spec)
    before = cores_of(loan.live, spec)
    back: Counter[int] = Counter()
    for share in places_of(cluster, loan.live, spec):
        back[share.node] += (before[share.part] - loan.cores[share.part]) * share.replicas
    return back
