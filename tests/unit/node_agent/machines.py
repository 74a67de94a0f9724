"""Other machines, as trees of files like the kernel's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def sysfs(
    root: Path, *, cores: Iterable[tuple[int, int, tuple[int, ...]]], online: str, numa: Mapping[int, str]
) -> Path:
    """A /sys with cores given as (socket, core id, its logical CPUs), and NUMA nodes with their lists of CPUs."""
    write(root / "devices/system/cpu/online", online)
    for socket, core, cpus in cores:
        for cpu in cpus:
            topology = root / f"devices/system/cpu/cpu{cpu}/topology"
            write(topology / "physical_package_id", str(socket))
            write(topology / "core_id", str(core))
            write(topology / "core_cpus_list", ",".join(str(sibling) for sibling in cpus))
    for node, cpulist in numa.items():
        write(root / f"devices/system/node/node{node}/cpulist", cpulist)
    return root


def two_sockets(root: Path, *, online: str = "0-15") -> Path:
    """Two sockets of four cores with two threads each, numbered as most servers do: siblings are 8 apart."""
    cores = [(core // 4, core % 4, (core, core + 8)) for core in range(8)]
    return sysfs(root, cores=cores, online=online, numa={0: "0-3,8-11", 1: "4-7,12-15"})
