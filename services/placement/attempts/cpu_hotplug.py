"""CPU hotplug: adapts attempts when CPUs of their nodes go offline, come back or are added.

A core that is gone is taken from the attempt that holds it by an ordinary resize, and replaced by a spare core of the
node if there is one. An attempt that holds fewer cores than its own gets more as soon as its node has more. An attempt
with a task that would be left without any core is stopped as unhealthy, to be started elsewhere.
"""

from __future__ import annotations

import structlog

from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.lifecycle import StopReason
from cotenant.services.placement.attempts.attempt_store import AttemptStore
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt, Node

log = structlog.get_logger()


class CpuHotplug:
    """Adapts attempts to the cores of their nodes, and retries what cannot be done at once."""

    def __init__(self, cluster: Cluster, attempts: AttemptStore, resizes: Resizes) -> None:
        self._cluster, self._attempts, self._resizes = cluster, attempts, resizes
        self._already_over: set[str] = set()  # nodes with attempts that could not be adapted yet

    def retry(self) -> None:
        """Retry the nodes whose attempts could not be adapted when they changed."""
        for node_id in sorted(self._already_over):
            self.fit(node_id)

    def fit(self, node_id: str) -> None:
        """Resize the attempts on a node to the cores that it has."""
        self._already_over.discard(node_id)
        node = self._cluster.nodes.get(node_id)
        if node is None or not node.connected:
            return  # its agent reports its inventory when it reconnects
        for live in self._cluster.on_node(node_id):
            if self._cluster.can_stop(live) and not self._fit(live, node):
                self._already_over.add(node_id)

    def _fit(self, live: LiveAttempt, node: Node) -> bool:
        """Adapt one attempt; return False if it has to wait."""
        ledger = self._cluster.ledger  # rebuilds the ledger if it is stale
        held = live.target if self._resizes.stuck(live) else live.allocation
        spare = int(ledger.free_cores[node.number]) - self._cluster.claimed.get(node.id, 0)
        target = tuple(node.book.fit(part, max(0, spare)) if part.node_id == node.id else part for part in held)
        if target == held:
            return True
        before = next(part for part in held if part.node_id == node.id)
        after = next(part for part in target if part.node_id == node.id)
        if rank := _task_without_cores(before, after):
            live.attempt.stop_detail = f"was on {node.id}: all cores of {rank} have gone offline"
            log.warning("cores_lost", job=live.key[0], node=node.id, rank=rank)
            self._attempts.order_stops([live], StopReason.UNHEALTHY)
            return True
        return self._resizes.replace_cores(live, target, _why(node.id, before, after))


def _task_without_cores(before: NodeAllocation, after: NodeAllocation) -> str:
    """Return the first task that is left without cores, or ""."""
    pairs = zip(before.tasks, after.tasks, strict=True)
    return next((f"rank {was.rank}" for was, now in pairs if was.core_ids and not now.core_ids), "")


def _why(node_id: str, before: NodeAllocation, after: NodeAllocation) -> str:
    was, now = ({core for task in part.tasks for core in task.core_ids} for part in (before, after))
    if gone := sorted(was - now):
        cores = f"core {gone[0]}" if len(gone) == 1 else f"cores {', '.join(map(str, gone))}"
        return f"{cores} of {node_id} went offline"
    return f"{node_id} has all of its cores again" if now - was else f"CPUs of its cores on {node_id} came or went"
