"""The kernel's own view of the machine and its processes, read without any of our code."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.enforcement.hook import EnforcedNode
from cotenant.node_agent.enforcement.hooks import make_hooks, open_hooks
from cotenant.node_agent.supervisor.cgroups import Group, parse_cpu_list

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
GROUPS = Path("/sys/fs/cgroup")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MEBIBYTE = 1 << 20


def cpus_of_nodes() -> dict[int, list[int]]:
    """The CPUs of each NUMA node."""
    paths = sorted(NODES.glob("node[0-9]*"))
    return {int(path.name[4:]): parse_cpu_list((path / "cpulist").read_text()) for path in paths}


def siblings_of(cpu: int) -> set[int]:
    """All threads of a CPU's core, the CPU among them."""
    return set(parse_cpu_list((CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()))


def need_nodes(count: int) -> None:
    if len(cpus_of_nodes()) < count:
        pytest.skip(f"needs {count} NUMA nodes")


def need_siblings() -> None:
    if siblings_of(0) == {0}:
        pytest.skip("needs cores with two threads")


def anonymous_pages(pid: int, at_least: int) -> dict[int, int]:
    """Return the pages by node of a process's private mappings of at least a given size."""
    pages: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if (anonymous := re.search(r"\banon=(\d+)", line)) and int(anonymous[1]) >= at_least:
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                pages[int(node)] = pages.get(int(node), 0) + int(count)
    return pages


def group_of(pid: int) -> Path:
    """The control group that a process is in."""
    return GROUPS / Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")


def read(path: Path) -> str:
    return path.read_text().strip()


def number(path: Path, key: str) -> int:
    """The number after a key in a file of `key number` lines, or of `key=number` words."""
    found = re.search(rf"\b{key}[ =](\d+)", path.read_text())
    return int(found[1]) if found else 0


def stalled_microseconds(path: Path) -> int:
    """Return for how long some task had to wait, from a pressure file."""
    return number(path, "some avg10=.* total")


def new_group(name: str) -> Group:
    """Return a new group among those of a node, with all controllers; the test removes it."""
    node = open_node_group("test-vm")
    assert node is not None
    assert open_hooks(make_hooks(), EnforcedNode(node)) == []
    group = node.child(name)
    group.create()
    return group
