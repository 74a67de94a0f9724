"""Reads processes from /proc.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os


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
    """Return a pidfd of the process that was started at `ticks`; None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    try:
        if start_ticks(pid) == ticks:
            return pidfd
    except OSError:
        pass  # gone between the two calls
    os.close(pidfd)
    return None
