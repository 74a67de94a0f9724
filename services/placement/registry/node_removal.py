"""Removal of nodes that an operator gives up or that said goodbye: their attempts start elsewhere, and their ids may be
used by new nodes.

The decision is stored before it takes effect, so that the next leader continues with it. The request id is stored even
beyond the node: a late retry, when a new node already has the id, is recognized and does not touch the new node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant.codec import errors
from cotenant.core.model.lifecycle import AttemptState
from cotenant.services.placement.attempts.attempt_store import AttemptStore
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Write
from cotenant.services.placement.cluster.live_records import FORGOTTEN, NODES, REQUEST_IDS_MAX, SCHEMA_VERSION, Node
from cotenant.storage.v1 import records_pb2

log = structlog.get_logger()

FORGOTTEN_MAX = 1_000  # removed nodes whose request ids are kept; the oldest are dropped


class NodeRemoval:
    """Gives up nodes and removes them once they are empty. `give_up` ends attempts that must have stopped by then."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        attempts: AttemptStore,
        lock: Callable[[str], asyncio.Lock],
        give_up: Callable[[Node, str, float], None],
    ) -> None:
        self._cluster, self._committer, self._attempts = cluster, committer, attempts
        self._lock, self._give_up = lock, give_up

    def was_removed_by(self, node_id: str, request_id: str) -> bool:
        """Return whether a removed node was given up by this request."""
        left = self._cluster.forgotten.get(node_id)
        return bool(left and request_id in left.request_ids and node_id not in self._cluster.nodes)

    async def forget(self, node_id: str, reason: str, request_id: str, *, powered_off: bool) -> Node:
        """Give up a lost node and its attempts; a repeated request does not affect a new node with this id.

        Attempts that must not run twice are kept until they must have stopped, unless the node is `powered_off`. The
        node is removed as soon as it has no attempts.

        Raises:
            Problem: there is no such node, or its agent is connected.
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
                given_up = f"{node.id} was given up by an operator{f': {reason}' if reason else ''}"
                await self._save(node, given_up, request_id, powered_off=powered_off)
            if node.given_up:
                self.mark_lost(node)
        self._attempts.events.publish_capacity()
        return node

    async def leave(self, node_id: str, reason: str) -> None:
        """Remove a node whose agent said goodbye: it had a part of another system's job, and nothing runs there."""
        async with self._lock(node_id):
            node = self._cluster.nodes.get(node_id)
            if node is None or node.connected:  # a new agent of the node has connected meanwhile
                return
            await self._save(node, f"{node_id} left: {reason or 'it said goodbye'}", "", powered_off=True)
            self.mark_lost(node)
        await self.remove_if_empty(node)

    async def _save(self, node: Node, given_up: str, request_id: str, *, powered_off: bool) -> None:
        record = records_pb2.StoredNode()
        record.CopyFrom(node.record)
        record.request_ids[:] = [*record.request_ids, *([request_id] if request_id else [])][-REQUEST_IDS_MAX:]
        record.given_up = given_up
        record.powered_off = powered_off
        await self._committer.commit([Write(NODES + node.id, record.SerializeToString())])
        node.record = record
        log.warning("node_given_up", node=node.id, why=given_up, powered_off=powered_off)

    def mark_lost(self, node: Node) -> None:
        """Mark a given-up node and its attempts as lost."""
        node.lost = True
        if node.record.powered_off:
            for live in self._cluster.on_node(node.id):
                self._attempts.give_up(live, node.id, AttemptState.LOST, node.given_up)
        self._give_up(node, node.given_up, 0.0)

    async def remove(self) -> None:
        """Remove the nodes that were given up and are empty."""
        for node in [node for node in self._cluster.nodes.values() if node.given_up and not node.connected]:
            await self.remove_if_empty(node)

    async def remove_if_empty(self, node: Node) -> None:
        """Remove a node if it is empty, keeping its request ids."""
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
        self._attempts.events.publish_capacity()
        log.info("node_removed", node=node.id)

    def past_request_ids(self, node_id: str) -> list[str]:
        """Return the request ids of a removed node with this id."""
        left = self._cluster.forgotten.get(node_id)
        return list(left.request_ids) if left else []
