"""What a mesh may leave behind: processes and control groups, found by its state directory and its jobs' ids."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts


def processes_of(directory: Path) -> dict[int, str]:
    """All processes that name the directory in their command line or their environment, and their command lines."""
    wanted = os.fsencode(directory)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if wanted in command or wanted in (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def groups_of(job_ids: Iterable[str]) -> list[Path]:
    """All control groups of attempts of these jobs."""
    wanted = set(job_ids)
    return [group for group in _groups("*/*-*/") if group.name.rpartition("-")[0] in wanted]


def groups_of_nodes(beginning: str) -> list[Path]:
    """All control groups of nodes whose ids begin so."""
    return _groups(f"{beginning}*/")


def _groups(pattern: str) -> list[Path]:
    tops = {Path(place) / "cotenant" for mount in find_mounts() for place in (mount.root, mount.own)}
    return [group for top in sorted(tops) for group in (top.glob(pattern) if top.is_dir() else ())]


def end(pids: Iterable[int]) -> None:
    """Kill processes; those that are gone already are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(groups: Iterable[Path]) -> None:
    """Remove control groups whose processes have been killed; one that is still busy stays."""
    for group in groups:
        for path, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
