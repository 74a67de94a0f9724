"""How users name a cluster: `6x8` (nodes × GPUs), `6x8x48` (× cores), or a file with all details.

`cluster_files` documents the file formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.core.model.node import NodeShape
from cotenant.core.model.validation import shown
from cotenant.simulator.clusters.cluster import CORES_PER_GPU, NODES_MAX, PER_NODE_MAX, BadCluster, Cluster, NodeKind

if TYPE_CHECKING:
    from cotenant.simulator.snapshots import Snapshot

_SHORT = re.compile(r"(\d{1,9})x(\d{1,9})(?:x(\d{1,9}))?")


def parse_cluster(text: str) -> Cluster:
    """Return a cluster from `NxG`, `NxGxC` or the path of a file.

    >>> cluster = parse_cluster("6x8")
    >>> len(cluster.shapes), cluster.gpus, cluster.cores
    (6, 48, 144)

    Raises:
        BadCluster: it is neither, or the file is invalid.
    """
    if short := _SHORT.fullmatch(text.strip().lower()):
        return _cluster(text, [_short(text, int(short[1]), int(short[2]), short[3])])
    path = Path(text)
    try:
        found = path.is_file()
    except OSError:  # not a possible file name
        found = False
    if not found:
        raise BadCluster(f"cluster {shown(text)} is neither NxG[xC], such as 6x8 or 6x8x48, nor a file")
    from cotenant.simulator import snapshots  # it reads traces, whose package reads snapshots

    if snapshots.is_snapshot(path):
        return cluster_of_snapshot(snapshots.read(path), text)
    from cotenant.simulator.clusters import cluster_files  # importing YAML is half of a short simulation's start-up

    return _cluster(text, cluster_files.read(path))


def cluster_of_snapshot(snapshot: Snapshot, name: str) -> Cluster:
    """Return the nodes of a snapshot."""
    nodes = snapshot.nodes
    return Cluster(
        name,
        tuple(node.shape for node in nodes),
        tuple(node.rack for node in nodes),
        numa_nodes=tuple(node.numa_nodes for node in nodes),
    )


def _short(text: str, nodes: int, gpus: int, cores: str | None) -> NodeKind:
    shape = NodeShape(gpus=gpus, cores=int(cores) if cores else gpus * CORES_PER_GPU)
    for what, count, least, most in (
        ("count", nodes, 1, NODES_MAX),
        ("gpus", shape.gpus, 0, PER_NODE_MAX),
        ("cores", shape.cores, 0, PER_NODE_MAX * CORES_PER_GPU),
    ):
        if not least <= count <= most:
            raise BadCluster(f"{text}: {what}: expected an integer from {least} to {most}, found '{count}'")
    if not (shape.gpus or shape.cores):
        raise BadCluster(f"{text}: expected GPUs or cores, found neither")
    return NodeKind(shape, count=nodes)


def _cluster(name: str, kinds: Sequence[NodeKind]) -> Cluster:
    count = sum(kind.count for kind in kinds)
    if not 1 <= count <= NODES_MAX:
        raise BadCluster(f"cluster {name} has {count} nodes; expected 1 to {NODES_MAX}")
    nodes = [kind for kind in kinds for _ in range(kind.count)]
    return Cluster(
        name,
        tuple(node.shape for node in nodes),
        tuple(node.rack for node in nodes),
        tuple(node.memory_bandwidth_bytes_per_second for node in nodes),
        tuple(node.numa_nodes for node in nodes),
    )
