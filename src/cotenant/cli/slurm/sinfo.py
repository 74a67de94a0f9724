"""`sinfo`: lists nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cotenant.cli.connection import Mesh
from cotenant.cli.slurm import times
from cotenant.cli.slurm.arguments import read
from cotenant.cli.slurm.conventions import QUEUE
from cotenant.cli.slurm.finding import PAGE_SIZE, call
from cotenant.cli.slurm.nodes import compact, compressed, state_of
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.table import Column, lines, read_format, read_long_format
from cotenant.v1.node_service_pb2 import ListNodesRequest, Node

NAME = "sinfo"
FORMAT = "%9P %.5a %.10l %.6D %.6t %N"
FORMAT_NODES = "%20N %.6D %.9P %6t"
FORMAT_NODES_LONG = "%20N %.6D %.9P %.11T %4c %.8m %f"
FORMAT_SUMMARY = "%9P %.5a %.10l %.16F %N"
FORMAT_REASONS = "%20E %9u %19H %N"
OPTIONS = {
    "h": "noheader", "noheader": "noheader", "N": "Node", "Node": "Node", "o": "format=", "format": "format=",
    "O": "Format=", "Format": "Format=", "n": "nodes=", "nodes": "nodes=", "p": "partition=",
    "partition": "partition=", "t": "states=", "states": "states=", "s": "summarize", "summarize": "summarize",
    "l": "long", "long": "long", "e": "exact", "exact": "exact", "R": "list-reasons", "list-reasons": "list-reasons",
    "a": "all", "all": "all", "help": "help", "r": "responding", "responding": "responding", "M": "clusters=",
    "v": "verbose",
}  # fmt: skip


class Group(NamedTuple):
    """Nodes that share a line."""

    nodes: Sequence[Node]

    @property
    def state(self) -> str:
        """Their state."""
        return state_of(self.nodes[0])

    def total(self, value: Callable[[Node], float]) -> int:
        """Return the sum of a number over the nodes."""
        return int(sum(map(value, self.nodes)))


def _each(value: Callable[[Node], int]) -> Callable[[Group], str]:
    """Return a value of each node: the least, with a plus if some have more."""

    def shown(group: Group) -> str:
        values = [value(node) for node in group.nodes]
        return f"{min(values, default=0)}{'+' if len(set(values)) > 1 else ''}"

    return shown


def _cores(node: Node) -> int:
    return len(node.inventory.cores)


def _gres(node: Node) -> str:
    models = sorted({gpu.model for gpu in node.inventory.gpus})
    return ",".join(
        f"gpu:{model.replace(' ', '_')}:{sum(gpu.model == model for gpu in node.inventory.gpus)}" for model in models
    )


def _is_usable(group: Group) -> bool:
    return group.state in ("idle", "mixed", "allocated")


def _cpu_states(group: Group) -> str:
    used, total = group.total(lambda node: node.used_cores), group.total(_cores)
    other = 0 if _is_usable(group) else total - used
    return f"{used}/{total - used - other}/{other}/{total}"


def _node_states(group: Group) -> str:
    states = [state_of(node) for node in group.nodes]
    used, idle = sum(state in ("mixed", "allocated") for state in states), states.count("idle")
    return f"{used}/{idle}/{len(states) - used - idle}/{len(states)}"


_NO_REASON = "none"
_COLUMNS: Sequence[tuple[str, str, str, Callable[[Group], str]]] = (
    ("P", "partition", "PARTITION", lambda group: f"{QUEUE}*"),
    ("R", "partitionname", "PARTITION", lambda group: QUEUE),
    ("a", "available", "AVAIL", lambda group: "up"),
    ("l", "time", "TIMELIMIT", lambda group: "infinite"),
    ("D", "nodes", "NODES", lambda group: str(len(group.nodes))),
    ("t", "statecompact", "STATE", lambda group: compact(group.state)),
    ("T", "statelong", "STATE", lambda group: group.state),
    ("N", "nodelist", "NODELIST", lambda group: compressed(node.id for node in group.nodes)),
    ("n", "nodehost", "HOSTNAMES", lambda group: compressed(node.id for node in group.nodes)),
    ("c", "cpus", "CPUS", _each(_cores)),
    ("m", "memory", "MEMORY", _each(lambda node: node.inventory.memory_bytes >> 20)),
    ("e", "freemem", "FREE_MEM", _each(lambda node: (node.inventory.memory_bytes - node.used_memory_bytes) >> 20)),
    ("C", "cpusstate", "CPUS(A/I/O/T)", _cpu_states),
    ("F", "nodesstate", "NODES(A/I/O/T)", _node_states),
    ("A", "nodeai", "NODES(A/I)", lambda group: "/".join(_node_states(group).split("/")[:2])),
    ("G", "gres", "GRES", lambda group: _gres(group.nodes[0]) or "(null)" if group.nodes else "(null)"),
    ("f", "features", "AVAIL_FEATURES", lambda group: "(null)"),
    ("E", "reason", "REASON", lambda group: group.nodes[0].state_reason or _NO_REASON if group.nodes else _NO_REASON),
    ("u", "user", "USER", lambda group: "Unknown"),
    ("H", "timestamp", "TIMESTAMP", lambda group: times.UNKNOWN),
    ("O", "cpusload", "CPU_LOAD", lambda group: "N/A"),
    ("d", "disk", "TMP_DISK", _each(lambda node: node.inventory.scratch_bytes >> 20)),
    ("w", "weight", "WEIGHT", lambda group: "1"),
    ("z", "socketcorethread", "S:C:T", lambda group: "N/A"),
    ("X", "sockets", "SOCKETS", lambda group: "N/A"),
    ("Y", "cores", "CORES", _each(_cores)),
    ("Z", "threads", "THREADS", lambda group: "1"),
)
LETTERS = {letter: Column(heading, value) for letter, _, heading, value in _COLUMNS}
NAMES = {name: LETTERS[letter] for letter, name, _, _ in _COLUMNS} | {"gresused": LETTERS["G"]}


def main(words: Sequence[str]) -> int:
    """List nodes and return the exit code.

    Raises:
        SlurmError: an option is invalid.
    """
    given, others = read(NAME, words, OPTIONS)
    if "help" in given:
        print("Usage: sinfo [-h] [-N] [-s] [-l] [-o FORMAT] [-n NODE,…] [-t STATE,…]\nLists nodes of Cotenant.")
        return 0
    if others:
        raise SlurmError(f"Unrecognized option: {others[0]}")
    text = _format(given)
    cells = (
        read_long_format(given["Format"], NAMES, "node")
        if "Format" in given
        else read_format(given.get("format") or os.environ.get("SINFO_FORMAT") or text, LETTERS, "node")
    )
    nodes = [node for node in call(list_nodes) if _matches(node, given)]
    for line in lines(cells, _groups(nodes, given), heading="noheader" not in given):
        print(line.rstrip())
    return 0


def _format(given: Mapping[str, str]) -> str:
    if "Node" in given:
        return FORMAT_NODES_LONG if "long" in given else FORMAT_NODES
    if "list-reasons" in given:
        return FORMAT_REASONS
    return FORMAT_SUMMARY if "summarize" in given else FORMAT


async def list_nodes(mesh: Mesh) -> list[Node]:
    """Return all nodes."""
    found: list[Node] = []
    token = ""
    while True:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=PAGE_SIZE, page_token=token))
        found += page.nodes
        token = page.next_page_token
        if not token:
            return found


def _matches(node: Node, given: Mapping[str, str]) -> bool:
    from cotenant.cli.slurm.nodes import expanded

    state = state_of(node)
    states = [word.lower() for word in given.get("states", "").split(",") if word]
    return (
        (not states or "all" in states or state in states or compact(state) in states)
        and ("nodes" not in given or node.id in expanded(given["nodes"]))
        and ("partition" not in given or QUEUE in given["partition"].split(","))
        and ("list-reasons" not in given or bool(node.state_reason))
    )


def _groups(nodes: Sequence[Node], given: Mapping[str, str]) -> list[Group]:
    """Return the nodes of each line: one, or all with the same state and GPUs, or simply all."""
    if "Node" in given:
        return [Group([node]) for node in nodes]
    if "summarize" in given:
        return [Group(nodes)] if nodes else []
    by_state: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        gres = _gres(node) if "%G" in given.get("format", "") else ""
        by_state.setdefault((state_of(node), gres), []).append(node)
    return [Group(found) for found in by_state.values()]
