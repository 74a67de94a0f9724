"""Lists of nodes as Slurm writes them, and the states of nodes in its words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotenant.v1.node_service_pb2 import Node

_NUMBERED = r"(.*?)(\d+)"


def compressed(names: Iterable[str]) -> str:
    """Return a list of nodes in its short form.

    >>> compressed(["gpu1", "gpu2", "gpu3", "gpu07", "login"]), compressed([]), compressed(["gpu1", "gpu3"])
    ('gpu[1-3],gpu07,login', '', 'gpu[1,3]')
    """
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        match = re.fullmatch(_NUMBERED, name)
        if match:
            padded = len(match[2]) if match[2].startswith("0") and match[2] != "0" else 0
            groups.setdefault((match[1], padded), []).append(int(match[2]))
        else:
            plain.append(name)
    return ",".join([*(_written(head, width, sorted(found)) for (head, width), found in groups.items()), *plain])


def _written(head: str, width: int, numbers: list[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1 and len(str(number)) == len(str(ranges[-1][1])):
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}" for first, last in ranges]
    return f"{head}[{','.join(texts)}]" if len(numbers) > 1 else f"{head}{texts[0]}"


def expanded(text: str) -> Iterator[str]:
    """Yield the nodes of a list.

    >>> list(expanded("gpu[1-3,5],gpu[07-08],login"))
    ['gpu1', 'gpu2', 'gpu3', 'gpu5', 'gpu07', 'gpu08', 'login']
    """
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)?", text):
        head, bracket, rest = part.partition("[")
        if not bracket:
            yield part
            continue
        ranges, _, tail = rest.partition("]")
        for one in ranges.split(","):
            first, _, last = one.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                yield f"{head}{one}{tail}"
                continue
            for number in range(int(first), int(last or first) + 1):
                yield f"{head}{number:0{len(first)}d}{tail}"


_COMPACT = {"idle": "idle", "mixed": "mix", "allocated": "alloc", "draining": "drng", "drained": "drain",
            "down": "down", "down*": "down*", "unknown": "unk"}  # fmt: skip


def state_of(node: Node) -> str:
    """Return the state of a node."""
    from cotenant.v1 import node_service_pb2 as pb  # lists of jobs use this module, too, and need no messages of nodes

    used = node.used_cores > 0 or node.used_gpu_milli > 0
    if node.state in (pb.NODE_STATE_CORDONED, pb.NODE_STATE_DRAINING):
        return "draining" if used else "drained"
    if node.state == pb.NODE_STATE_AWAY:
        return "down*"
    if node.state == pb.NODE_STATE_LOST:
        return "down"
    if node.state != pb.NODE_STATE_READY:
        return "unknown"
    full = node.used_cores >= len(node.inventory.cores) > 0
    return "allocated" if full else "mixed" if used else "idle"


def compact(state: str) -> str:
    """Return the short name of a node's state."""
    return _COMPACT.get(state, state)
