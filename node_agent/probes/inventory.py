"""Inventories the server from what the kernel exposes. Odd or missing files only make the inventory less detailed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import psutil
import structlog

from cotenant.node_agent.enforcement.cgroup_mounts import Mount, find_mounts
from cotenant.node_agent.probes import gpus as gpu_probe
from cotenant.node_agent.probes.outer_job import Nesting, select_gpus
from cotenant.node_agent.supervisor.cgroups import UNLIMITED_BYTES, parse_cpu_list, read_text
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU: its location, and all CPUs of its physical core."""

    id: int
    core: frozenset[int]
    numa_node: int
    socket: int


def usable_cpus(sysfs: Path, allowed: Iterable[int]) -> list[int]:
    """Return the online CPUs that this process may use: `allowed` is its affinity, which cpusets limit."""
    online = online_cpus(str(sysfs))
    return sorted(set(online) & set(allowed)) if online else sorted(set(allowed))


def read_cpus(sysfs: Path, usable: Iterable[int]) -> list[Cpu]:
    """Return the location of each CPU. A CPU without topology is a core of its own on the first node and socket."""
    numa_of = _numa_of_cpus(sysfs)
    cpus = []
    for cpu in usable:
        topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
        siblings = read_text(str(topology / "core_cpus_list")) or read_text(str(topology / "thread_siblings_list"))
        socket = read_text(str(topology / "physical_package_id"))
        cpus.append(
            Cpu(
                id=cpu,
                core=frozenset(parse_cpu_list(siblings)) | {cpu},
                numa_node=numa_of.get(cpu, 0),
                socket=int(socket) if socket.isdigit() else 0,
            )
        )
    return cpus


def _numa_of_cpus(sysfs: Path) -> dict[int, int]:
    numa_of: dict[int, int] = {}
    for directory in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        number = directory.name.removeprefix("node")
        if number.isdigit():
            numa_of.update(dict.fromkeys(parse_cpu_list(read_text(str(directory / "cpulist"))), int(number)))
    return numa_of


def schedulable_cores(
    cpus: Iterable[Cpu], *, split_siblings: bool, names: Mapping[int, int] = MappingProxyType({})
) -> list[resources_pb2.Core]:
    """Return the cores offered to jobs: physical cores with all usable siblings, or each logical CPU by itself.

    A core's id is that of its lowest CPU, or the one by which `names` already knows its CPUs.
    """
    by_core: dict[frozenset[int], list[Cpu]] = {}
    for cpu in cpus:
        by_core.setdefault(frozenset({cpu.id}) if split_siblings else cpu.core, []).append(cpu)
    ids = [_known_id(members, names) for members in by_core.values()]
    if len(set(ids)) < len(ids):  # names of another machine
        ids = [_known_id(members, {}) for members in by_core.values()]
    cores = (
        resources_pb2.Core(
            id=core_id,
            cpus=sorted(cpu.id for cpu in members),
            numa_node=members[0].numa_node,
            socket=members[0].socket,
        )
        for core_id, members in zip(ids, by_core.values(), strict=True)
    )
    return sorted(cores, key=lambda core: core.id)


def _known_id(members: Iterable[Cpu], names: Mapping[int, int]) -> int:
    cpus = [cpu.id for cpu in members]
    known = {names[cpu] for cpu in cpus if cpu in names}
    return known.pop() if len(known) == 1 else min(cpus)


def offered_cores(
    options: ProbeOptions, usable: Iterable[int], sysfs: Path, names: Mapping[int, int] = MappingProxyType({})
) -> list[resources_pb2.Core]:
    """Return the cores of the usable CPUs that jobs may have."""
    offered = [cpu for cpu in usable if options.cpus is None or cpu in options.cpus]
    return schedulable_cores(read_cpus(sysfs, offered), split_siblings=options.split_siblings, names=names)


def usable_memory_bytes(physical_bytes: int, mounts: Iterable[Mount], limit_bytes: int | None) -> int:
    """Return the memory for jobs: the machine's, or less if the agent's control group or the operator limits it."""
    bounds = [physical_bytes, *(bound for mount in mounts for bound in _memory_bounds(mount))]
    if limit_bytes is not None:
        bounds.append(limit_bytes)
    return min(bounds)


def _memory_bounds(mount: Mount) -> list[int]:
    """Return the memory limits of the agent's own group and all groups above it."""
    if mount.version == 1 and "memory" not in mount.controllers:
        return []
    name = "memory.max" if mount.version == 2 else "memory.limit_in_bytes"
    bounds, path = [], mount.own
    while path.startswith(mount.root):
        text = read_text(os.path.join(path, name))
        if text.isdigit() and int(text) < UNLIMITED_BYTES:
            bounds.append(int(text))
        if path == mount.root:
            break
        path = os.path.dirname(path)
    return bounds


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """The operator's settings of a node. See `AgentConfig`."""

    node_id: str
    gpus: str = "auto"
    cpus: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    rack: str = ""
    address: str = ""
    shareable_gpus: bool = False
    split_siblings: bool = False
    machine: str = ""
    machine_parts: int = 1
    scratch_directory: str = ""
    nesting: Nesting | None = None

    @property
    def gpus_given(self) -> tuple[str, ...] | None:
        """The GPUs that an outer job was given; None: all."""
        return self.nesting.job.gpus if self.nesting else None


def probe(
    options: ProbeOptions, *, sysfs: Path = SYSFS, allowed: Iterable[int] | None = None
) -> resources_pb2.Inventory:
    """Return the inventory without NVML's GPUs, which `NodeHealth` adds. Blocks for a moment."""
    usable = usable_cpus(sysfs, os.sched_getaffinity(0) if allowed is None else allowed)
    troubles = []
    if options.cpus is not None and (absent := sorted(set(options.cpus) - set(usable))):
        log.error("configured_cpus_missing", cpus=absent)
        troubles.append(f"CPUs {absent} are configured but not usable on this machine")
    cores = offered_cores(options, usable, sysfs)
    gpus = []
    if options.gpus != gpu_probe.AUTO:
        numa_nodes = sorted({core.numa_node for core in cores})
        gpus = gpu_probe.declared_gpus(options.node_id, options.gpus, numa_nodes, shareable=options.shareable_gpus)
        gpus = select_gpus(gpus, [gpu.uuid for gpu in gpus], options.gpus_given)
    scratch, scratch_bytes = options.scratch_directory, 0
    try:
        scratch_bytes = file_system_bytes(scratch) // options.machine_parts if scratch else 0
    except OSError as error:
        log.error("scratch_directory_unusable", directory=scratch, error=str(error))
        troubles.append(f"the scratch directory {scratch} is configured but not usable: {error.strerror}")
    inventory = resources_pb2.Inventory(
        cores=cores,
        gpus=gpus,
        memory_bytes=machine_memory_bytes(options.memory_bytes) // options.machine_parts,
        rack=options.rack,
        address=options.address,
        not_enforced=troubles,
        agent_version=_own_version(),
        machine=options.machine,
        scratch_bytes=scratch_bytes,
    )
    if options.nesting is not None:
        inventory.outer_job = options.nesting.job.id
        if options.nesting.drain_time is not None:
            inventory.available_until.FromMilliseconds(int(options.nesting.drain_time * 1000))
    return inventory


def file_system_bytes(path: str) -> int:
    """Return the size of the file system that holds a directory. Raises `OSError`."""
    found = os.statvfs(os.path.join(path, ""))  # not of a file
    return found.f_blocks * found.f_frsize


def machine_memory_bytes(limit_bytes: int | None = None) -> int:
    """Return the memory that jobs of all agents of this machine may use together, within the agent's own limits."""
    return usable_memory_bytes(psutil.virtual_memory().total, find_mounts(), limit_bytes)


def _own_version() -> str:
    try:
        return version("cotenant")
    except PackageNotFoundError:
        return "unknown"
