"""What to do where a supervisor died before its attempt: end what is left of it, and take the account."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from cotenant.node_agent.runtime.runtime_port import Usage
from cotenant.node_agent.supervisor.cgroups import Group

ROUND_SECONDS = 0.02
ROUND_SECONDS_MAX = 1.0


def end_remains(group: Group | None, marker: str, *, patience_seconds: float) -> bool:
    """Kill all that is left of an attempt; False where something still lives when patience is over. Blocks.

    Its processes are those in its group and, whether or not there is one, those that carry `marker`, a variable
    that only this attempt's processes have, in their environment.
    """
    deadline = time.monotonic() + patience_seconds
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
    """The living processes that have the variable `marker`, written NAME=value, in their environment."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and has_marker(int(name), marker)]


def has_marker(pid: int, marker: str) -> bool:
    """Whether a process has the variable `marker`, written NAME=value, in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + marker.encode() + b"\0" in b"\0" + file.read()
    except OSError:
        return False  # gone meanwhile, or another user's


def descendants(pid: int) -> list[psutil.Process]:
    """All processes that came of one; none where it is gone. Blocks."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def usage_of_descendants(pid: int) -> Usage | None:
    """What all descendants of a supervisor use now, where no control group keeps the account. Blocks."""
    if not psutil.pid_exists(pid):
        return None
    cpu_seconds, memory_bytes = 0.0, 0
    for process in descendants(pid):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            times = process.cpu_times()
            cpu_seconds += times.user + times.system + times.children_user + times.children_system
            memory_bytes += process.memory_info().rss
    return Usage(cpu_seconds, memory_bytes)
