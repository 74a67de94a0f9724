"""The cluster of a simulation: `6x8` (nodes × GPUs), `6x8x48` (× cores), or a file that says everything.

A file is YAML or JSON, a list of kinds of node or an object with that list under `nodes`:

    nodes:
      - {count: 4, gpus: 8, cores: 96, memory_bytes: 549755813888, gpu_type: A100, rack: r1}
      - {count: 2, gpus: 0, cores: 64}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.core.ledger import Ledger
from cotenant.core.nodes import NodeShape
from cotenant.core.options import did_you_mean
from cotenant.core.validate import shown

CORES_PER_GPU = 3
NODES_MAX = 100_000
PER_NODE_MAX = 1_000_000  # GPUs or cores: a whole cluster may be pooled into one node
MEMORY_BYTES_MAX = 2**50

_SHORT = re.compile(r"(\d{1,9})x(\d{1,9})(?:x(\d{1,9}))?")
_KEYS = ("count", "gpus", "cores", "memory_bytes", "gpu_type", "rack")


class BadCluster(Exception):
    """A cluster that cannot be understood, and why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of a simulation, each with its rack; `name` is how the user called it."""

    name: str
    shapes: tuple[NodeShape, ...]
    racks: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(shape.gpus for shape in self.shapes)

    @property
    def cores(self) -> int:
        """Cores of all nodes."""
        return sum(shape.cores for shape in self.shapes)

    def ledger(self) -> Ledger:
        """Open a ledger in which all of it is free."""
        return Ledger(self.shapes, self.racks)


def parse_cluster(text: str) -> Cluster:
    """Read a cluster: `NxG`, `NxGxC` or the path of a file.

    >>> cluster = parse_cluster("6x8")
    >>> len(cluster.shapes), cluster.gpus, cluster.cores
    (6, 48, 144)

    Raises:
        BadCluster: it is neither, or the file does not say what it should.
    """
    if short := _SHORT.fullmatch(text.strip().lower()):
        nodes, gpus = int(short[1]), int(short[2])
        cores = int(short[3]) if short[3] else gpus * CORES_PER_GPU
        return _cluster(text, [_Kind(text, "").read({"count": nodes, "gpus": gpus, "cores": cores})])
    path = Path(text)
    if not path.is_file():
        raise BadCluster(f"cluster {shown(text)} is neither NxG[xC], such as 6x8 or 6x8x48, nor a file")
    return _cluster(text, _kinds(text, _document(path)))


def _cluster(name: str, kinds: Sequence[tuple[NodeShape, str, int]]) -> Cluster:
    count = sum(count for _, _, count in kinds)
    if not 1 <= count <= NODES_MAX:
        raise BadCluster(f"cluster {name} has {count} nodes; from 1 to {NODES_MAX} were expected")
    return Cluster(
        name,
        tuple(shape for shape, _, count in kinds for _ in range(count)),
        tuple(rack for _, rack, count in kinds for _ in range(count)),
    )


def _document(path: Path) -> Any:
    import yaml  # only for files: half of a short simulation's start would go into this import

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8-sig"))  # JSON is YAML too
    except OSError as error:
        raise BadCluster(f"cluster file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadCluster(f"cluster file {path} is no UTF-8 text") from error
    except yaml.YAMLError as error:
        raise BadCluster(f"cluster file {path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error


def _kinds(source: str, document: Any) -> list[tuple[NodeShape, str, int]]:
    if isinstance(document, Mapping):
        if unknown := sorted(str(key) for key in document if key != "nodes"):
            raise BadCluster(f"{source}: {unknown[0]!r} is no key of a cluster; only 'nodes' is")
        document = document.get("nodes")
    if not isinstance(document, list) or not document:
        raise BadCluster(f"{source}: expected a list of nodes, alone or under 'nodes', found {shown(str(document))}")
    return [_Kind(source, f"nodes[{number}]").read(entry) for number, entry in enumerate(document)]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of node under way: knows where it stands, so that errors can say it."""

    source: str
    place: str

    def read(self, entry: Any) -> tuple[NodeShape, str, int]:
        if not isinstance(entry, Mapping):
            raise self._bad("", f"expected an object with {', '.join(_KEYS)}, found {shown(str(entry))}")
        for key in entry:
            if key not in _KEYS:
                raise self._bad(str(key), f"is no key of a node{did_you_mean(str(key), _KEYS)}; {', '.join(_KEYS)} are")
        gpus = self._count(entry, "gpus", 0, PER_NODE_MAX)
        shape = NodeShape(
            gpus=gpus,
            cores=self._count(entry, "cores", gpus * CORES_PER_GPU, PER_NODE_MAX * CORES_PER_GPU),
            memory_bytes=self._count(entry, "memory_bytes", 0, MEMORY_BYTES_MAX),
            gpu_type=self._text(entry, "gpu_type"),
        )
        if not (shape.gpus or shape.cores):
            raise self._bad("", "expected GPUs or cores, found neither")
        return shape, self._text(entry, "rack"), self._count(entry, "count", 1, NODES_MAX, least=1)

    def _count(self, entry: Mapping[str, Any], key: str, default: int, most: int, *, least: int = 0) -> int:
        value = entry.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(key, f"expected a whole number from {least} to {most}, found {shown(str(value))}")
        return value

    def _text(self, entry: Mapping[str, Any], key: str) -> str:
        value = entry.get(key, "")
        if not isinstance(value, str):
            raise self._bad(key, f"expected a text, found {shown(str(value))}")
        return value

    def _bad(self, key: str, fault: str) -> BadCluster:
        return BadCluster(f"{': '.join(part for part in (self.source, self.place, key) if part)}: {fault}")
