"""Leftovers of a mesh: processes and control groups, found by its state directory and its jobs' ids."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts


def processes_of(directory: Path) -> dict[int, str]:
    """Return the command lines, by pid, of all processes that mention the directory in arguments or environment."""
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
    """Return all control groups of attempts of these jobs."""
    wanted = set(job_ids)
    return [group for group in _groups("*/*-*/") if group.name.rpartition("-")[0] in wanted]


def groups_of_nodes(beginning: str) -> list[Path]:
    """Return all control groups of nodes with this id prefix."""
    return _groups(f"{beginning}*/")


def _groups(pattern: str) -> list[Path]:
    tops = {Path(place) / "cotenant" for mount in find_mounts() for place in (mount.root, mount.own)}
    # unlike `Path.glob`, it ignores groups that are removed meanwhile, such as those of other tests
    return [Path(group) for top in sorted(tops) for group in glob.glob(f"{glob.escape(str(top))}/{pattern}")]


def end(pids: Iterable[int]) -> None:
    """Kill processes, ignoring those that have already exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(groups: Iterable[Path]) -> None:
    """Remove control groups whose processes have been killed; busy groups stay."""
    for group in groups:
        for path, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
