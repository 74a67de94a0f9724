"""Looks at what the kernel tells of the node as a whole, for its health."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil

from cotenant.core.health import Era, NodeReading
from cotenant.node_agent.cgroups import read_text
from cotenant.node_agent.pressure import read_pressure

TRIAL = "health.trial"


def read_node(state_dir: Path) -> NodeReading:
    """Look at the disk of the state directory, at memory and load. Blocks, on a sick disk for long."""
    memory = psutil.virtual_memory()
    free_bytes = inodes = None
    try:
        disk = os.statvfs(state_dir)
        free_bytes = disk.f_bavail * disk.f_frsize
        inodes = disk.f_favail if disk.f_files else None  # some file systems make them as they are needed
        error = _try_to_write(state_dir / TRIAL)
    except OSError as failure:
        error = failure.strerror or str(failure)
    return NodeReading(
        disk_free_bytes=free_bytes,
        inodes_free=inodes,
        disk_error=error,
        memory_available_bytes=memory.available,
        memory_bytes=memory.total,
        memory_stall_percent=read_pressure("memory").full_avg10,
        load=os.getloadavg()[0],
        cpus=os.cpu_count() or 1,
    )


def _try_to_write(path: Path) -> str:
    """Why a file cannot be written; nothing where it can, or where only room is lacking, which is told apart."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""
        return error.strerror or str(error)
    return ""


def read_era(sysfs: Path, boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> Era:
    """Which boot this is, and which load of the driver: its directory in sysfs has a new number each time."""
    try:
        driver = str((sysfs / "module/nvidia").stat().st_ino)
    except OSError:
        driver = ""
    return Era(read_text(str(boot_id)), driver)
