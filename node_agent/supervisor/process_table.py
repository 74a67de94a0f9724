"""Reads processes from /proc.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.launch_faults import LIMIT_ERRORS
else:
    from launch_faults import LIMIT_ERRORS


def start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot: together, pid and start time identify a process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:  # a kernel without checkpoint support
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == pid]


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def open_process(pid: int, ticks: int) -> int | None:
    """Return a pidfd of the process that was started at `ticks`; None if it is gone.

    Raises:
        OSError: this process is out of descriptors or memory.
    """
    pidfd = -1
    try:
        pidfd = os.pidfd_open(pid)
        if start_ticks(pid) == ticks:
            return pidfd
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in LIMIT_ERRORS:
            if pidfd >= 0:
                os.close(pidfd)
            raise
    if pidfd >= 0:
        os.close(pidfd)
    return None
