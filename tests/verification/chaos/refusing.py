"""Makes one node refuse what a launch takes, by means that a real node may meet with, and takes that back."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable

from tests.end_to_end import remains
from tests.verification.chaos.limits import Limit
from tests.verification.chaos.machines import Machine
from tests.verification.chaos.parts import Mesh
from tests.verification.chaos.plan import Hook

Undo = Callable[[], None]
PASSWORDS, NULL = "/etc/passwd", "/dev/null"
REMOUNTS_MAX, BUSY_SECONDS = 50, 0.02
MEMORY = "/memory/"  # in the paths of that hierarchy, of version 1; a single one of version 2 has all controllers


def refuse(mesh: Mesh, part: str, hook: Hook) -> Undo | None:
    """Begin to refuse; returns how to end it, or None where it cannot be done now."""
    machine = mesh.machines.all[part]
    match hook:
        case Hook.GROUP:
            groups = [str(group) for group in remains.groups_of_nodes(mesh.node_ids[part])]
            return _mounted(machine, [group for group in groups if MEMORY in group] or groups)
        case Hook.DIRECTORY:
            return _mounted(machine, [str(path) for path in machine.disk.glob("state/nodes/*/attempts")])
        case Hook.DISK:
            return _mounted(machine, [str(machine.disk)])
        case Hook.DEVICE:
            return _mounted(machine, [NULL], option="nodev")
        case Hook.USER:
            nobody = mesh.directory / "nobody"
            nobody.touch()
            return _mounted(machine, [PASSWORDS], source=str(nobody))
    pid = mesh.pid(part)
    if pid is None:
        return None
    return _without_forks(mesh, part, pid) if hook is Hook.FORK else _without_descriptors(pid)


def _mounted(machine: Machine, places: list[str], *, option: str = "ro", source: str = "") -> Undo | None:
    """Mount each place over itself with an option that refuses something, or another file over it."""
    if not places:
        return None
    for place in places:
        machine.call("mount", "--bind", source or place, place)
        _remount(machine, place, option)

    def undo() -> None:
        for place in reversed(places):
            machine.call("umount", "--lazy", place)

    return undo


def _remount(machine: Machine, place: str, option: str) -> None:
    """Set an option of a mount that was just made; somebody may be writing there already."""
    for left in reversed(range(REMOUNTS_MAX)):
        try:
            machine.call("mount", "-o", f"remount,bind,{option}", place)
        except OSError:
            if not left:
                raise
            time.sleep(BUSY_SECONDS)
        else:
            return


def _without_forks(mesh: Mesh, part: str, pid: int) -> Undo | None:
    limit = Limit.make("pids", f"{mesh.directory.name}-forks-{part}")
    if limit is None:
        return None
    limit.take(pid)
    limit.write("pids.max", "1")
    return limit.remove


def _without_descriptors(pid: int) -> Undo | None:
    """Set a process's soft limit to what it has open, so that it can open nothing more.

    The hard limit stays: without CAP_SYS_RESOURCE not even root can raise it again.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        held = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, hard))
    except OSError:
        return None

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: another one has limits of its own
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    return undo
