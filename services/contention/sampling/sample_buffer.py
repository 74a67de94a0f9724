"""Buffer of each node's last samples, in memory only: they have no value after a restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cotenant.core.policy.protocols import NodeWindow
from cotenant.v1 import contention_service_pb2 as pb


class TooManyNodes(Exception):
    """The buffer already has samples of the maximum number of nodes."""


@dataclass(slots=True)
class NodeSamples:
    """A node's last samples, newest last."""

    samples: deque[pb.NodeSample]
    ended: float = field(default=0.0)  # end of the newest sample


class SampleBuffer:
    """The last samples of all nodes, bounded per node and in nodes. Nodes that fell silent are dropped."""

    def __init__(self, samples_max: int, nodes_max: int, silent_seconds_max: float) -> None:
        self._samples_max, self._nodes_max = samples_max, nodes_max
        self._silent_seconds_max = silent_seconds_max
        self._by_node: dict[str, NodeSamples] = {}

    def add(self, sample: pb.NodeSample, window: NodeWindow) -> None:
        """Add a sample that is newer than its node's last one.

        Raises:
            ValueError: it is not newer.
            TooManyNodes: it is from a new node, and the buffer is full.
        """
        ring = self._by_node.get(window.node_id) or self._open(window)
        if window.now <= ring.ended:
            raise ValueError(f"it ended {ring.ended - window.now:g} s before the last sample, or at the same time")
        ring.samples.append(sample)
        ring.ended = window.now

    def nodes(self, now: float) -> Sequence[str]:
        """Return the ids of the nodes with samples, sorted, after forgetting those that are silent."""
        self._forget_silent(now)
        return sorted(self._by_node)

    def last(self, node_id: str) -> pb.NodeSample:
        """Return the last sample of one of the `nodes`."""
        return self._by_node[node_id].samples[-1]

    def history(self, node_id: str) -> Sequence[pb.NodeSample]:
        """Return the buffered samples of a node, newest last."""
        ring = self._by_node.get(node_id)
        return tuple(ring.samples) if ring else ()

    def _open(self, window: NodeWindow) -> NodeSamples:
        if len(self._by_node) >= self._nodes_max:
            self._forget_silent(window.now)
        if len(self._by_node) >= self._nodes_max:
            raise TooManyNodes(f"samples of {self._nodes_max} nodes are already buffered")
        return self._by_node.setdefault(window.node_id, NodeSamples(deque(maxlen=self._samples_max)))

    def _forget_silent(self, now: float) -> None:
        silent = [name for name, ring in self._by_node.items() if now - ring.ended > self._silent_seconds_max]
        for name in silent:
            del self._by_node[name]
