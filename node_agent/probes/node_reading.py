"""Reads the state of the node as a whole, for its health."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil

from cotenant.core.model.health import BootInstance, NodeReading
from cotenant.exhaustion import exhausted_resource
from cotenant.file_descriptors import Usage
from cotenant.node_agent.probes.own_limits import EXHAUSTION_MESSAGES, thread_error
from cotenant.node_agent.probes.pressure import read_pressure
from cotenant.node_agent.supervisor.cgroups import read_text

TRIAL = "health.trial"


def read_node(state_dir: Path, usage: Usage | None = None) -> NodeReading:
    """Read the disk of the state directory, memory and load. Blocks, on a failing disk for long.

    `usage` are the agent's own descriptors. A failure for lack of descriptors, memory or processes is reported as such,
    never as a failure of the disk.
    """
    free_bytes = inodes = memory = None
    shortages: dict[str, str] = {}
    error = ""
    try:
        disk = os.statvfs(state_dir)
        free_bytes = disk.f_bavail * disk.f_frsize
        inodes = disk.f_favail if disk.f_files else None  # some file systems allocate them on demand
        _try_to_write(state_dir / TRIAL)
        memory = psutil.virtual_memory()
    except (OSError, MemoryError) as failure:
        if resource := exhausted_resource(failure):
            number = failure.errno if isinstance(failure, OSError) else None
            shortages[resource] = EXHAUSTION_MESSAGES[number or errno.ENOMEM]
        else:
            error = str(getattr(failure, "strerror", None) or failure)
    if (why := thread_error()) and "processes" not in shortages:
        shortages["processes"] = why
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
        descriptors_error=shortages.get("descriptors", ""),
        processes_error=shortages.get("processes", ""),
        memory_error=shortages.get("memory", ""),
    )


def _try_to_write(path: Path) -> None:
    """Write a file. Raises `OSError`, except for lack of space, which is reported separately."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_era(sysfs: Path, boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> BootInstance:
    """Return the current boot and driver load: the driver's directory in sysfs has a new inode each time."""
    try:
        driver = str((sysfs / "module/nvidia").stat().st_ino)
    except OSError:
        driver = ""
    return BootInstance(read_text(str(boot_id)), driver)
