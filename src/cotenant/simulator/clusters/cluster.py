"""The cluster of a simulation: its nodes, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import Resources, added

CORES_PER_GPU = 3
NODES_MAX = 100_000
PER_NODE_MAX = 1_000_000  # GPUs or cores: a whole cluster may be pooled into one node


class BadCluster(Exception):
    """An invalid cluster; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A number of equal nodes. A memory bandwidth of 0 bytes/s means unknown."""

    shape: NodeShape
    rack: str = ""
    memory_bandwidth_bytes_per_second: float = 0.0
    numa_nodes: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of a simulation, as parallel tuples; `name` is what the user wrote.

    `memory_bandwidths` are peaks in bytes/s, 0 if unknown; `numa_nodes` counts each node's memory domains. Both may be
    left out.
    """

    name: str
    shapes: tuple[NodeShape, ...]
    racks: tuple[str, ...]
    memory_bandwidths: tuple[float, ...] = ()
    numa_nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for column, untold in (("memory_bandwidths", 0.0), ("numa_nodes", 1)):
            if not getattr(self, column):
                object.__setattr__(self, column, (untold,) * len(self.shapes))

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(shape.gpus for shape in self.shapes)

    @property
    def server_gpus(self) -> int:
        """GPUs of the node with the most."""
        return max((shape.gpus for shape in self.shapes), default=0)

    @property
    def cores(self) -> int:
        """Cores of all nodes."""
        return sum(shape.cores for shape in self.shapes)

    @property
    def resources(self) -> Resources:
        """Resources of all nodes; 0 where unknown."""
        return added(shape.resources for shape in self.shapes)

    def ledger(self) -> Ledger:
        """Return a ledger with all of it free."""
        return Ledger(self.shapes, self.racks)
