"""Nodes that an operator gives up: what they had is started elsewhere, and whoever comes by their name is a new one.

That a node was given up is kept before anything follows from it, so that the next placement goes on with it; and so is
the request, beyond the node: one that comes late, when a new node has the name, is known, and takes nothing from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant.codec import errors
from cotenant.core.model.lifecycle import AttemptState
from cotenant.services.placement.attempts.attempt_store import Attempts
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Write
from cotenant.services.placement.cluster.live_records import FORGOTTEN, NODES, REQUEST_IDS_MAX, SCHEMA_VERSION, Node
from cotenant.v1 import records_pb2

log = structlog.get_logger()

FORGOTTEN_MAX = 1_000  # nodes of which the requests are remembered, the last ones


class Forgetting:
    """Gives nodes up, and removes those on which nothing is left. `give_up` ends what must have stopped by itself."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        attempts: Attempts,
        lock: Callable[[str], asyncio.Lock],
        give_up: Callable[[Node, str, float], None],
    ) -> None:
        self._cluster, self._committer, self._attempts = cluster, committer, attempts
        self._lock, self._give_up = lock, give_up

    def was_asked(self, node_id: str, request_id: str) -> bool:
        """Whether a node that is no more was given up by this request."""
        left = self._cluster.forgotten.get(node_id)
        return bool(left and request_id in left.request_ids and node_id not in self._cluster.nodes)

    async def forget(self, node_id: str, reason: str, request_id: str, *, powered_off: bool) -> Node:
        """Give up a node that will not come back, and what it has; a repeat does nothing to who has come since.

        Attempts that must not run twice are kept until they must have stopped by themselves, unless the node is
        `powered_off`. It is forgotten as soon as none is left.

        Raises:
            Problem: there is no such node, or its agent is there.
        """
        async with self._lock(node_id):
            node = self._cluster.nodes.get(node_id)
            if node is None:
                raise errors.not_found("node", node_id, near=self._cluster.nodes)
            if not request_id or request_id not in node.record.request_ids:
                if node.connected:
                    raise errors.failed_precondition(
                        "NODE_CONNECTED", f"the agent of {node.id} is connected: drain {node.id}"
                    )
                await self._keep(node, reason, request_id, powered_off)
            if node.given_up:
                self.let_go(node)
        self._attempts.feed.publish_capacity()
        return node

    async def _keep(self, node: Node, reason: str, request_id: str, powered_off: bool) -> None:
        record = records_pb2.StoredNode()
        record.CopyFrom(node.record)
        record.request_ids[:] = [*record.request_ids, *([request_id] if request_id else [])][-REQUEST_IDS_MAX:]
        record.given_up = f"{node.id} was given up by an operator{f': {reason}' if reason else ''}"
        record.powered_off = powered_off
        await self._committer.commit([Write(NODES + node.id, record.SerializeToString())])
        node.record = record
        log.warning("node_given_up", node=node.id, reason=reason, powered_off=powered_off)

    def let_go(self, node: Node) -> None:
        """Take what a node had that was given up as lost."""
        node.lost = True
        if node.record.powered_off:
            for live in self._cluster.on_node(node.id):
                self._attempts.give_up(live, node.id, AttemptState.LOST, node.given_up)
        self._give_up(node, node.given_up, 0.0)

    async def remove(self) -> None:
        """Remove the nodes that were given up and that nothing is known to be on any more."""
        for node in [node for node in self._cluster.nodes.values() if node.given_up and not node.connected]:
            await self.remove_if_empty(node)

    async def remove_if_empty(self, node: Node) -> None:
        """Remove a node, if nothing is on it; of what was asked of it the requests are left."""
        async with self._lock(node.id):
            if node.connected or self._cluster.nodes.get(node.id) is not node or self._cluster.on_node(node.id):
                return
            left = records_pb2.StoredNode(schema_version=SCHEMA_VERSION, request_ids=node.record.request_ids)
            left.node.id = node.id
            others = list(self._cluster.forgotten)
            oldest = others[: max(0, len(others) + 1 - FORGOTTEN_MAX)]
            await self._committer.commit(
                [
                    Write(NODES + node.id, None),
                    Write(FORGOTTEN + node.id, left.SerializeToString()),
                    *(Write(FORGOTTEN + one, None) for one in oldest),
                ]
            )
            self._cluster.remove_node(node)
            self._cluster.forgotten[node.id] = left
            for one in oldest:
                self._cluster.forgotten.pop(one, None)
        self._attempts.feed.publish_capacity()
        log.info("node_forgotten", node=node.id)

    def requests_left(self, node_id: str) -> list[str]:
        """What was asked of a node that had this name before."""
        left = self._cluster.forgotten.get(node_id)
        return list(left.request_ids) if left else []
