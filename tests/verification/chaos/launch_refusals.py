"""Makes a node refuse launches, by means that real nodes may encounter, and undoes it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable

from tests.end_to_end import remains
from tests.verification.chaos.limits import Limit
from tests.verification.chaos.machines import Machine
from tests.verification.chaos.mesh import Mesh
from tests.verification.chaos.plan import Hook

Undo = Callable[[], None]
PASSWORDS, NULL = "/etc/passwd", "/dev/null"
REMOUNTS_MAX, BUSY_SECONDS = 50, 0.02
MEMORY = "/memory/"  # in paths of this hierarchy, version 1; the single hierarchy of version 2 has all controllers


def refuse(mesh: Mesh, part: str, hook: Hook) -> Undo | None:
    """Begin to refuse; return how to undo it, or None if it is impossible now."""
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
    if not mesh.serving(part):
        return None  # an agent that has yet to start its threads exits, and says why if gRPC's own do not crash it
    return _without_forks(mesh, part, pid) if hook is Hook.FORK else _without_descriptors(pid)


def _mounted(machine: Machine, places: list[str], *, option: str = "ro", source: str = "") -> Undo | None:
    """Bind-mount each path over itself with a restricting option, or another file over it."""
    if not places:
        return None
    mounted: list[str] = []

    def undo() -> None:
        for place in reversed(mounted):
            machine.call("umount", "--lazy", place)

    for place in places:
        machine.call("mount", "--bind", source or place, place)
        mounted.append(place)
        try:
            _remount(machine, place, option)
        except OSError:  # a file there stays open for writing: its writer may be paused
            undo()
            return None
    return undo


def _remount(machine: Machine, place: str, option: str) -> None:
    """Set an option of a new mount; retried, since a process may be writing there."""
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
    """Set a process's soft limit of descriptors to the number it has open.

    The hard limit stays: without CAP_SYS_RESOURCE not even root could raise it again.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        held = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, hard))
    except OSError:
        return None

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: a new process has its own limits
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    return undo
