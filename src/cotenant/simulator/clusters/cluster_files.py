"""Files that describe a cluster.

YAML or JSON: a list of kinds of nodes, or an object with that list under `nodes`; every key is optional:

    nodes:
      - {count: 4, gpus: 8, cores: 96, memory_bytes: 549755813888, gpu_type: A100, rack: r1, shareable: true,
         numa_nodes: 2, memory_bandwidth_bytes_per_second: 380000000000}
      - {count: 2, gpus: 0, cores: 64}

Or one of two published CSV formats, detected by their columns:
- a node a row, `sn, cpu_milli, memory_mib, gpu, model` (Alibaba's openb, used by FGD, ATC'23 [D]). Its GPUs can be
  shared, as in the cluster of the list; cores are rounded down to whole cores.
- one row for all, `num_switch, num_node_p_switch, num_gpu_p_node, num_cpu_p_node, mem_p_node` (Tiresias, NSDI'19, and
  Muri [D]). A switch is a rack; memory is in GB.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import AMOUNT_MAX, AMOUNTS
from cotenant.core.model.validation import shown
from cotenant.core.spelling import did_you_mean
from cotenant.simulator.clusters.cluster import CORES_PER_GPU, NODES_MAX, PER_NODE_MAX, BadCluster, NodeKind
from cotenant.simulator.traces.rows import Row, Table, open_text
from cotenant.simulator.traces.trace_job import BadTrace

BANDWIDTH_MAX = 1e15  # bytes/s
NUMA_NODES_MAX = 1024
MEBIBYTE, GIGABYTE = 2**20, 10**9

KEYS = (
    "count",
    "gpus",
    "cores",
    *AMOUNTS,
    "gpu_type",
    "rack",
    "shareable",
    "numa_nodes",
    "memory_bandwidth_bytes_per_second",
)


def read(path: Path) -> list[NodeKind]:
    """Return a cluster's kinds of nodes.

    Raises:
        BadCluster: the file is invalid; the message names the line.
    """
    try:
        columns = set(_first_record(path))
        for wanted, reader in _TABLES.items():
            if columns.issuperset(wanted):
                return _table(path, reader)
        with open_text(path) as text:
            return _document(str(path), text.read())
    except BadTrace as error:
        raise BadCluster(f"cluster file {error}") from error


def _first_record(path: Path) -> list[str]:
    """Return the names in the first line that is not blank, as a CSV table's reader sees them; none if it is no CSV."""
    with open_text(path) as text:
        first = next((line for line in text if line.strip()), "")
    try:
        return [name.strip().lower() for name in next(csv.reader([first], strict=True), [])]
    except csv.Error:
        return []


def _table(path: Path, read_row: Callable[[Row], list[NodeKind]]) -> list[NodeKind]:
    kinds: list[NodeKind] = []
    with open_text(path) as text:
        for row in Table(str(path), text).rows():
            if not isinstance(row, Row):
                raise row
            kinds += read_row(row)
    return kinds


def _openb(row: Row) -> list[NodeKind]:
    gpus = row.count("gpu", PER_NODE_MAX)
    shape = NodeShape(
        gpus=gpus,
        cores=row.count("cpu_milli", PER_NODE_MAX * 1000) // 1000,
        memory_bytes=row.count("memory_mib", AMOUNT_MAX // MEBIBYTE) * MEBIBYTE,
        gpu_type=row.fields["model"],
        shareable=gpus > 0,
    )
    if not (shape.gpus or shape.cores):
        raise row.bad("cpu_milli", "at least one whole core if there is no GPU")
    return [NodeKind(shape)]


def _switches(row: Row) -> list[NodeKind]:
    shape = NodeShape(
        gpus=row.count("num_gpu_p_node", PER_NODE_MAX),
        cores=row.count("num_cpu_p_node", PER_NODE_MAX),
        memory_bytes=row.count("mem_p_node", AMOUNT_MAX // GIGABYTE) * GIGABYTE,
    )
    if not (shape.gpus or shape.cores):
        raise row.bad("num_gpu_p_node", "GPUs or cores")
    nodes = row.count("num_node_p_switch", NODES_MAX, least=1)
    switches = row.count("num_switch", NODES_MAX, least=1)
    return [NodeKind(shape, f"switch-{number}", count=nodes) for number in range(switches)]


_TABLES: Mapping[tuple[str, ...], Callable[[Row], list[NodeKind]]] = {
    ("sn", "cpu_milli", "memory_mib", "gpu", "model"): _openb,
    ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node"): _switches,
}


def _document(source: str, text: str) -> list[NodeKind]:
    """Return the nodes of YAML or JSON text. It is composed first, because only then line numbers are known."""
    try:
        loader = yaml.SafeLoader(text)
        entries = _entries(source, loader, loader.get_single_node())
        return [_Kind(source, f"nodes[{number}]", loader, entry).read() for number, entry in enumerate(entries)]
    except yaml.YAMLError as error:
        raise BadCluster(f"cluster file {source} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a date such as 2024-13-01, or a number too long
        raise BadCluster(f"cluster file {source} has an invalid value: {error}") from error
    except RecursionError as error:
        raise BadCluster(f"cluster file {source} is nested too deeply") from error


def _entries(source: str, loader: yaml.SafeLoader, root: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.value != "nodes":
                raise BadCluster(
                    f"{source}, {_line(key)}: unknown key {key.value!r}; the only key of a cluster is 'nodes'"
                )
            root = value
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        found = shown(str(loader.construct_object(root, deep=True) if root else None))
        raise BadCluster(f"{source}: expected a list of nodes, alone or under 'nodes', found {found}")
    return list(root.value)


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of node being read, with its place in the file for errors."""

    source: str
    place: str
    loader: yaml.SafeLoader
    entry: yaml.Node

    def read(self) -> NodeKind:
        given = self._given()
        gpus = self._count(given, "gpus", 0, PER_NODE_MAX)
        shape = NodeShape(
            gpus=gpus,
            cores=self._count(given, "cores", gpus * CORES_PER_GPU, PER_NODE_MAX * CORES_PER_GPU),
            gpu_type=self._text(given, "gpu_type"),
            shareable=self._switch(given, "shareable"),
        )
        amounts: dict[str, Any] = {name: self._count(given, name, 0, AMOUNT_MAX) for name in AMOUNTS}
        shape = replace(shape, **amounts)
        if not (shape.gpus or shape.cores):
            raise self._bad("", "expected GPUs or cores, found neither")
        return NodeKind(
            shape,
            self._text(given, "rack"),
            self._bandwidth(given, "memory_bandwidth_bytes_per_second"),
            self._count(given, "numa_nodes", 1, NUMA_NODES_MAX, least=1),
            self._count(given, "count", 1, NODES_MAX, least=1),
        )

    def _given(self) -> dict[str, tuple[yaml.Node, Any]]:
        if not isinstance(self.entry, yaml.MappingNode):
            found = shown(str(self.loader.construct_object(self.entry, deep=True)))
            raise self._bad("", f"expected an object with {', '.join(KEYS)}, found {found}")
        given: dict[str, tuple[yaml.Node, Any]] = {}
        for key, value in self.entry.value:
            name = str(key.value)
            if name not in KEYS:
                raise self._bad(
                    name, f"unknown key{did_you_mean(name, KEYS)}; the keys of a node are {', '.join(KEYS)}", key
                )
            if name in given:
                raise self._bad(name, "occurs twice", key)
            given[name] = value, self.loader.construct_object(value, deep=True)
        return given

    def _count(
        self, given: Mapping[str, tuple[yaml.Node, Any]], key: str, default: int, most: int, *, least: int = 0
    ) -> int:
        node, value = given.get(key, (self.entry, default))
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(key, f"expected an integer from {least} to {most}, found {shown(str(value))}", node)
        return value

    def _bandwidth(self, given: Mapping[str, tuple[yaml.Node, Any]], key: str) -> float:
        node, value = given.get(key, (self.entry, 0))
        try:  # YAML reads 380e9 as a string, since it requires a dot and a sign
            number = -1.0 if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        if not 0 <= number <= BANDWIDTH_MAX:
            raise self._bad(
                key, f"expected a number of bytes/s from 0 to {BANDWIDTH_MAX:g}, found {shown(str(value))}", node
            )
        return number

    def _text(self, given: Mapping[str, tuple[yaml.Node, Any]], key: str) -> str:
        node, value = given.get(key, (self.entry, ""))
        if not isinstance(value, str):
            raise self._bad(key, f"expected a string, found {shown(str(value))}", node)
        return value

    def _switch(self, given: Mapping[str, tuple[yaml.Node, Any]], key: str) -> bool:
        node, value = given.get(key, (self.entry, False))
        if not isinstance(value, bool):
            raise self._bad(key, f"expected true or false, found {shown(str(value))}", node)
        return value

    def _bad(self, key: str, fault: str, node: yaml.Node | None = None) -> BadCluster:
        where = f"{self.source}, {_line(node or self.entry)}"
        return BadCluster(f"{': '.join(part for part in (where, self.place, key) if part)}: {fault}")
