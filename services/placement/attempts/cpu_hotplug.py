"""Keeps attempts to the cores that their nodes have: CPUs go off line, come back, and are plugged in.

A core that is gone is taken from whoever holds it, by a resize like any other; where the node has one to spare, that
comes in its place. Who holds fewer than are its own gets more as soon as its node has more. An attempt of which a task
would be left with no core at all is stopped for its node's health, to be started elsewhere.
"""

from __future__ import annotations

import structlog

from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.lifecycle import StopReason
from cotenant.services.placement.attempts.attempt_store import Attempts
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live, Node

log = structlog.get_logger()


class Fitting:
    """Fits attempts to their nodes. What cannot be done at once is tried again."""

    def __init__(self, cluster: Cluster, attempts: Attempts, resizes: Resizes) -> None:
        self._cluster, self._attempts, self._resizes = cluster, attempts, resizes
        self._late: set[str] = set()  # nodes on which somebody could not be fitted yet

    def try_again(self) -> None:
        """Fit whoever could not be fitted when its node changed."""
        for node_id in sorted(self._late):
            self.fit(node_id)

    def fit(self, node_id: str) -> None:
        """Let all attempts on a node hold what it has."""
        self._late.discard(node_id)
        node = self._cluster.nodes.get(node_id)
        if node is None or not node.connected:
            return  # its agent tells what it has when it is back
        for live in self._cluster.on_node(node_id):
            if self._cluster.can_stop(live) and not self._fit(live, node):
                self._late.add(node_id)

    def _fit(self, live: Live, node: Node) -> bool:
        """Fit one attempt; False where that has to wait."""
        ledger = self._cluster.ledger  # counts anew who holds what, where that is due
        held = live.target if self._resizes.stuck(live) else live.allocation
        spare = int(ledger.free_cores[node.number]) - self._cluster.claimed.get(node.id, 0)
        target = tuple(node.book.fit(part, max(0, spare)) if part.node_id == node.id else part for part in held)
        if target == held:
            return True
        before = next(part for part in held if part.node_id == node.id)
        after = next(part for part in target if part.node_id == node.id)
        if rank := _bereft(before, after):
            live.attempt.stop_detail = f"was on {node.id}: all cores of {rank} have gone off line"
            log.warning("cores_lost", job=live.key[0], node=node.id, rank=rank)
            self._attempts.order_stops([live], StopReason.UNHEALTHY)
            return True
        return self._resizes.replace_cores(live, target, _why(node.id, before, after))


def _bereft(before: NodeAllocation, after: NodeAllocation) -> str:
    """The first task that has no core any more; empty where each has one."""
    pairs = zip(before.tasks, after.tasks, strict=True)
    return next((f"rank {was.rank}" for was, now in pairs if was.core_ids and not now.core_ids), "")


def _why(node_id: str, before: NodeAllocation, after: NodeAllocation) -> str:
    was, now = ({core for task in part.tasks for core in task.core_ids} for part in (before, after))
    if gone := sorted(was - now):
        cores = f"core {gone[0]}" if len(gone) == 1 else f"cores {', '.join(map(str, gone))}"
        return f"{cores} of {node_id} went off line"
    return f"{node_id} has all of its cores again" if now - was else f"CPUs of its cores on {node_id} came or went"
