"""Looks at what the kernel tells of the node as a whole, for its health."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil

from cotenant.core.model.health import Era, NodeReading
from cotenant.file_descriptors import Usage
from cotenant.node_agent.probes.own_limits import SAID, lacking, thread_error
from cotenant.node_agent.probes.pressure import read_pressure
from cotenant.node_agent.supervisor.cgroups import read_text

TRIAL = "health.trial"


def read_node(state_dir: Path, usage: Usage | None = None) -> NodeReading:
    """Look at the disk of the state directory, at memory and load. Blocks, on a sick disk for long.

    `usage` are the agent's own descriptors. What fails for want of these, of memory or of processes is reported as
    such, never as a failure of the disk.
    """
    free_bytes = inodes = memory = None
    wants: dict[str, str] = {}
    error = ""
    try:
        disk = os.statvfs(state_dir)
        free_bytes = disk.f_bavail * disk.f_frsize
        inodes = disk.f_favail if disk.f_files else None  # some file systems make them as they are needed
        _try_to_write(state_dir / TRIAL)
        memory = psutil.virtual_memory()
    except (OSError, MemoryError) as failure:
        if lack := lacking(failure):
            wants[lack] = SAID[(failure.errno if isinstance(failure, OSError) else None) or errno.ENOMEM]
        else:
            error = str(getattr(failure, "strerror", None) or failure)
    if (why := thread_error()) and "processes" not in wants:
        wants["processes"] = why
    return NodeReading(
        disk_free_bytes=free_bytes,
        inodes_free=inodes,
        disk_error=error,
        memory_available_bytes=memory.available if memory else None,
        memory_bytes=memory.total if memory else 0,
        memory_stall_percent=read_pressure("memory").full_avg10,
        load=os.getloadavg()[0],
        cpus=os.cpu_count() or 1,
        descriptors_free=usage.free if usage else None,
        descriptors_max=usage.limit if usage else 0,
        descriptors_error=wants.get("descriptors", ""),
        processes_error=wants.get("processes", ""),
        memory_error=wants.get("memory", ""),
    )


def _try_to_write(path: Path) -> None:
    """Write a file. Raises `OSError`, unless only room is lacking, which is told apart."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_era(sysfs: Path, boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> Era:
    """Which boot this is, and which load of the driver: its directory in sysfs has a new number each time."""
    try:
        driver = str((sysfs / "module/nvidia").stat().st_ino)
    except OSError:
        driver = ""
    return Era(read_text(str(boot_id)), driver)
