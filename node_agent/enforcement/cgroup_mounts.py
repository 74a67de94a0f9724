"""Finds the control group that contains all of a node's attempts.

The rule, for version 2 and for each hierarchy of version 1:

1. If the agent's own group has a bound (a memory limit, or fewer CPUs than the root), attempts go below it: they must
   stay within what the agent was given.
2. Otherwise they go below the root of the mounted hierarchy, so that they do not depend on how the agent was started.
3. If that place is not writable, the other one is tried.

An agent in another system's job is given nothing outside of its own group, so only that is tried. In version 1 it
leaves the freezer's hierarchy alone if it has a group of its own there: by that group the other system finds the
processes of the job, and it does not look at groups below.

`cotenant/<node id>` is created below the chosen place. Version 2 allows a group to have either processes or controlled
children: if the agent is in the group where the children belong, all processes there first move to `cotenant-agent`,
which is the usual arrangement in a container or a delegated unit. From then on no process can enter the unit's own
group, so the next agent must be started in `cotenant-agent` while jobs live (systemd:
`DelegateSubgroup=cotenant-agent`); an agent that is already there counts as in the group above. Version 2 is used if it
has cpusets or memory, otherwise version 1, otherwise nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from cotenant.node_agent.supervisor.cgroups import (
    CONTROLLERS,
    UNIFIED,
    UNLIMITED_BYTES,
    WEIGHT_DEFAULT,
    Group,
    GroupError,
    parse_cpu_list,
    read_text,
    write_text,
)

log = structlog.get_logger()

AGENT_GROUP = "cotenant-agent"


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted hierarchy: its controllers (empty for version 2), its directory, and the agent's own group in it."""

    version: int
    controllers: tuple[str, ...]
    root: str
    own: str


def find_mounts(proc: Path = Path("/proc/self")) -> list[Mount]:
    """Return the useful mounted hierarchies, version 2 first; a group `cotenant-agent` counts as its parent."""
    own_paths = _own_paths(read_text(str(proc / "cgroup")))
    mounts = list(_mounts(read_text(str(proc / "mountinfo")), own_paths))
    return sorted(mounts, key=lambda mount: (-mount.version, mount.root))


def _own_paths(text: str) -> dict[str, str]:
    """Return the agent's group path by controller; version 2 has the empty name."""
    paths = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths.update(dict.fromkeys(fields[1].split(","), fields[2]))
    return paths


def _mounts(text: str, own_paths: dict[str, str]) -> Iterator[Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        controllers = tuple(name for name in kind[2].split(",") if name in CONTROLLERS) if version == 1 else ()
        if version == 1 and not controllers:
            continue  # no useful controllers, such as systemd's own hierarchy
        own_path = own_paths.get(controllers[0] if controllers else "", "/")
        shown_root = fields[3].rstrip("/")  # a container may see only a part of the hierarchy
        below = own_path.removeprefix(shown_root) if own_path.startswith(shown_root) else "/"
        root = fields[4].replace("\\040", " ")
        own = os.path.normpath(root + "/" + below)
        yield Mount(version, controllers, root, os.path.dirname(own) if own.endswith(f"/{AGENT_GROUP}") else own)


def open_node_group(node_id: str, mounts: list[Mount] | None = None, *, nested: bool = False) -> Group | None:
    """Create `cotenant/<node id>` and return it, with the controllers that are there; None without any permissions.

    A `nested` agent's is below its own groups.
    """
    mounts = find_mounts() if mounts is None else mounts
    if nested:
        mounts = [within_own(mount) for mount in mounts]
    return _open_version_2(node_id, mounts) or _open_version_1(node_id, mounts)


def within_own(mount: Mount) -> Mount:
    """Return the mount reduced to the agent's own group and what is below.

    >>> within_own(Mount(1, ("cpu", "freezer"), "/f", "/f/slurm/job_1"))
    Mount(version=1, controllers=('cpu',), root='/f/slurm/job_1', own='/f/slurm/job_1')
    """
    tracked = mount.version == 1 and mount.own != mount.root
    controllers = tuple(name for name in mount.controllers if not (tracked and name == "freezer"))
    return replace(mount, controllers=controllers, root=mount.own)


def _candidates(mount: Mount) -> list[str]:
    """Return the places to try, in the order of the rule above."""
    places = [mount.own, mount.root] if is_bounded(mount) else [mount.root, mount.own]
    return list(dict.fromkeys(places))


def is_bounded(mount: Mount) -> bool:
    """Return whether the agent's own group, or one above it, has less than the root."""
    cpus = "cpuset.cpus.effective" if mount.version == 2 else "cpuset.effective_cpus"
    everywhere, here = (parse_cpu_list(read_text(os.path.join(path, cpus))) for path in (mount.root, mount.own))
    if here and here != everywhere:
        return True
    name = "memory.max" if mount.version == 2 else "memory.limit_in_bytes"
    path = mount.own
    while path.startswith(mount.root) and path != mount.root:
        limit = read_text(os.path.join(path, name))
        if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
            return True
        path = os.path.dirname(path)
    return False


def _open_version_2(node_id: str, mounts: list[Mount]) -> Group | None:
    for mount in mounts:
        if mount.version != 2:
            continue
        for place in _candidates(mount):
            offered = read_text(os.path.join(place, "cgroup.controllers")).split()
            wanted = [name for name in CONTROLLERS if name in offered]
            if "cpuset" not in wanted and "memory" not in wanted:
                continue
            try:
                return _make_version_2(Group(2, {UNIFIED: place}, wanted), node_id)
            except GroupError as error:
                log.info("cgroup_unavailable", place=place, error=str(error))
    return None


def _make_version_2(base: Group, node_id: str) -> Group:
    path = base.directories[UNIFIED]
    is_root = not os.path.exists(os.path.join(path, "cgroup.type"))  # the root may have both
    if not is_root and read_text(os.path.join(path, "cgroup.procs")):
        _move_processes_aside(path)
    base.delegate_controllers()  # which drops unavailable controllers
    top = base.child("cotenant")
    node = top.child(node_id)
    for group in (top, node):
        group.create()
        _set_weight(group)
        group.delegate_controllers()
        node.enforces = group.enforces
    return node


def _set_weight(group: Group) -> None:
    """Give all jobs together the weight of all CPUs, so that each core counts as much as a process outside does."""
    try:
        group.set_weight(WEIGHT_DEFAULT * len(os.sched_getaffinity(0)))
    except GroupError as error:
        log.info("cgroup_weight_failed", place=group.paths()[0], error=str(error))


def _move_processes_aside(path: str) -> None:
    """Move a group's processes, the agent among them, to a child: then the group may have controlled children."""
    aside = Group(2, {UNIFIED: os.path.join(path, AGENT_GROUP)}, ())
    aside.create()
    for pid in read_text(os.path.join(path, "cgroup.procs")).split():
        try:
            write_text(os.path.join(aside.directories[UNIFIED], "cgroup.procs"), pid)
        except GroupError as error:
            log.info("process_move_failed", pid=pid, error=str(error))  # it has ended, or is a kernel thread


def _open_version_1(node_id: str, mounts: list[Mount]) -> Group | None:
    directories: dict[str, str] = {}
    for mount in mounts:
        if mount.version != 1:
            continue
        for controller in mount.controllers:
            if path := _make_version_1(mount, controller, node_id):
                directories[controller] = path
    return Group(1, directories, directories) if directories else None


def _make_version_1(mount: Mount, controller: str, node_id: str) -> str:
    for place in _candidates(mount):
        top = Group(1, {controller: place}, (controller,)).child("cotenant")
        try:
            top.create()
            node = top.child(node_id)
            node.create()
            if not os.access(path := node.directories[controller], os.W_OK):
                raise GroupError(f"{path} was left by an earlier agent and is not writable")
            for group in (top, node):
                _set_weight(group)
            node.let_children_inherit_cpus()
        except GroupError as error:
            log.info("cgroup_unavailable", place=place, error=str(error))
        else:
            return node.directories[controller]
    return ""
