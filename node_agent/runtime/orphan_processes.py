"""Processes that outlive their supervisor: kills them and measures their usage."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from cotenant.node_agent.runtime.runtime_port import Usage
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.launch_faults import LIMIT_ERRORS

ROUND_SECONDS = 0.02
ROUND_SECONDS_MAX = 1.0


def kill_orphans(group: Group | None, marker: str, *, timeout_seconds: float) -> bool:
    """Kill everything left of an attempt; return False if something is still alive after the timeout. Blocks.

    Its processes are those in its group and, with or without a group, those with `marker`, an environment variable that
    only this attempt's processes have.

    Raises:
        OSError, GroupError: this process lacks what it needs to find them.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = ROUND_SECONDS
    while True:
        if group is not None and group.exists():
            group.kill()
        marked = marked_processes(marker)
        for pid in marked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not marked and not (group is not None and group.pids()):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(ROUND_SECONDS_MAX, pause * 2)


def marked_processes(marker: str) -> list[int]:
    """Return the live processes with the environment variable `marker`, given as NAME=value."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and has_marker(int(name), marker)]


def has_marker(pid: int, marker: str) -> bool:
    """Return whether a process has the environment variable `marker`, given as NAME=value.

    Raises:
        OSError: this process lacks what it needs to read it.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + marker.encode() + b"\0" in b"\0" + file.read()
    except OSError as error:
        if error.errno in LIMIT_ERRORS:
            raise
        return False  # exited in the meantime, or another user's


def descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process; none if it is gone. Blocks."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def usage_of_descendants(pid: int) -> Usage | None:
    """Return the usage of a supervisor's descendants, for attempts without a control group. Blocks."""
    if not psutil.pid_exists(pid):
        return None
    cpu_seconds, memory_bytes = 0.0, 0
    for process in descendants(pid):
        with contextlib.suppress(psutil.Error):  # exited in the meantime
            times = process.cpu_times()
            cpu_seconds += times.user + times.system + times.children_user + times.children_system
            memory_bytes += process.memory_info().rss
    return Usage(cpu_seconds, memory_bytes)
