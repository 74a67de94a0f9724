"""Cores that were lent to running attempts, and are asked back for those that wait.

A plan counts lent cores as free (`Cluster.leaving`); a start that needs them waits for the resize that brings them
back, as it would for a job that has to stop, but for milliseconds.
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
from cotenant.services.placement.cluster.live_records import Live


@dataclass(frozen=True, slots=True)
class Loan:
    """An attempt that gives lent cores back: what each replica of some roles holds then, and why."""

    live: Live
    cores: Mapping[str, int]
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
    node_id = cluster.node_at(node).id
    there = Counter(task.role for part in live.allocation if part.node_id == node_id for task in part.tasks)
    held, lent = least(live, lambda task: len(task.core_ids)), least(live, lambda task: task.lent)
    back: dict[str, int] = {}
    for role, replicas in there.items():
        if lent[role] and short > 0:
            back[role] = min(lent[role], -(-short // replicas))
            short -= back[role] * replicas
    told = f"{plural(sum(back.values()), 'core')} per replica that had been lent went to a job that waited"
    return Loan(live, {role: held[role] - cores for role, cores in back.items()}, told)


def _given_back(cluster: Cluster, loan: Loan) -> Mapping[int, int]:
    back: Counter[int] = Counter()
    for part in loan.live.allocation:
        number = cluster.nodes[part.node_id].number
        back[number] += sum(len(task.core_ids) - loan.cores.get(task.role, len(task.core_ids)) for task in part.tasks)
    return back
