"""Reclaiming of spare cores that were lent to running attempts, for waiting jobs.

A plan counts lent cores as free (`Cluster.leaving`); a start that needs them waits for the resize that returns them, as
it would for a job that has to stop, but only for milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.refusal import plural
from cotenant.core.scheduling import cycle
from cotenant.services.placement.attempts.tracked_attempt import least
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt


@dataclass(frozen=True, slots=True)
class CoreReclaim:
    """A resize that makes an attempt return lent cores: the new cores per replica by role, and the reason."""

    live: LiveAttempt
    cores: Mapping[str, int]
    reason: str


def reclaim_lent_cores(
    cluster: Cluster, waiting: Sequence[cycle.Start], stops: Sequence[LiveAttempt]
) -> tuple[tuple[CoreReclaim, ...], dict[str, int]]:
    """Return which attempts give back cores, so that all waiting starts have enough, and the claimed cores by node.

    Attempts that are already stopping or shrinking count first. No more is reclaimed than is needed, the largest loan
    on a node first; a gang's replicas give back in lockstep.
    """
    if not waiting:
        return (), {}
    claimed: Counter[int] = Counter()
    for start in waiting:
        for holding in start.holdings:
            claimed[holding.node] += holding.cores
    soon = _freed_without_asking(cluster, stops)
    leaving = {live.key[0] for live in stops}
    loans: dict[str, CoreReclaim] = {}
    for node in sorted(claimed):
        short = claimed[node] - int(cluster.ledger.free_cores[node]) - soon[node]
        lenders = [live for live in cluster.on_node(cluster.node_at(node).id) if live.key[0] not in leaving]
        able = [
            live for live in lenders if live.key[0] not in loans and not live.target and cluster.returning_cores(live)
        ]
        for live in sorted(able, key=lambda live: (-cluster.returning_cores(live)[cluster.node_at(node).id], live.key)):
            if short > 0:
                loans[live.key[0]] = loan = _loan(cluster, live, node, short)
                back = _returned_cores(cluster, loan)
                soon.update(back)
                short -= back[node]
    names = {cluster.node_at(node).id: cores for node, cores in claimed.items() if cores}
    return tuple(loans.values()), names


def _freed_without_asking(cluster: Cluster, stops: Sequence[LiveAttempt]) -> Counter[int]:
    """Return the cores by node that become free without reclaiming."""
    soon: Counter[int] = Counter()
    leaving = {live.key[0] for live in stops}
    for live in cluster.attempts.values():
        if live.key[0] in leaving or live.state is AttemptState.STOPPING:
            for holding in live.holdings:
                soon[holding.node] += holding.cores
        elif live.target:
            for node_id, cores in cluster.returning_cores(live).items():
                soon[cluster.nodes[node_id].number] += cores
    return soon


def _loan(cluster: Cluster, live: LiveAttempt, node: int, short: int) -> CoreReclaim:
    """Return the reclaim of so many cores from an attempt on a node, as far as they were lent."""
    node_id = cluster.node_at(node).id
    there = Counter(task.role for part in live.allocation if part.node_id == node_id for task in part.tasks)
    held, lent = least(live, lambda task: len(task.core_ids)), least(live, lambda task: task.lent)
    back: dict[str, int] = {}
    for role, replicas in there.items():
        if lent[role] and short > 0:
            back[role] = min(lent[role], -(-short // replicas))
            short -= back[role] * replicas
    reason = f"{plural(sum(back.values()), 'lent core')} per replica went to a waiting job"
    return CoreReclaim(live, {role: held[role] - cores for role, cores in back.items()}, reason)


def _returned_cores(cluster: Cluster, loan: CoreReclaim) -> Mapping[int, int]:
    back: Counter[int] = Counter()
    for part in loan.live.allocation:
        number = cluster.nodes[part.node_id].number
        back[number] += sum(len(task.core_ids) - loan.cores.get(task.role, len(task.core_ids)) for task in part.tasks)
    return back
