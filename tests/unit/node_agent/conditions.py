"""Waits for conditions in other processes, and checks what this machine can test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group

T = TypeVar("T")
PATIENCE = float(os.environ.get("COTENANT_PATIENCE", "1"))  # on an emulated processor everything takes longer
PATIENCE_SECONDS = 30.0 * PATIENCE


async def until(what: Callable[[], T]) -> T:
    """Wait until a condition is true and return its value."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (value := what()):  # noqa: ASYNC110  # other processes set no events of ours
            await asyncio.sleep(0.005)
        return value


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def private_kib(pid: int) -> int:
    """Return a process's private memory in KiB."""
    words = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
    return sum(int(words[place + 1]) for place, word in enumerate(words) if word.startswith("Private_"))


def written_number(path: Path) -> int:
    """Return the number in a file that a job writes; 0 before it exists."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    return int(text) if text.isdigit() else 0


def need_groups(*controllers: str) -> None:
    """Skip the test, with the reason, if this is not root or control groups are not available."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    group = open_node_group(f"test-probe-{os.getpid()}")  # tests run in several processes
    if group is None:
        pytest.skip("needs writable control groups")
    enforced = {*group.enforces, *(("freezer",) if group.can_freeze() else ())}  # in version 2 it is no controller
    group.remove(0)
    if missing := set(controllers) - enforced:
        pytest.skip(f"needs the controllers {sorted(missing)}")
