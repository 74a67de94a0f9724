"""Where a node's attempts and their supervisors live: with systemd in a scope of the node, otherwise below the root.

Without a scope, supervisors get a group next to the attempts: a container engine that stops an agent's container ends
all processes of its group, and supervisors must not be among them.

If the agent's own group has bounds, attempts stay within it in any case (see `cgroup_mounts`): a scope would release
them from the bounds. In version 1 systemd tracks a unit's processes in a hierarchy of its own and leaves the
controllers to anyone: there only the supervisors move.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.runtime.systemd_scope import Bus, ScopeRefused, open_scope
from cotenant.node_agent.supervisor.cgroups import UNIFIED, Group, GroupError, read_text

log = structlog.get_logger()

TREE = Path("/sys/fs/cgroup")  # where systemd mounts all hierarchies [systemd.io, Control Group APIs]
NO_GROUPS = "processes that escape from a job are found by ancestry only: no writable control group"
IN_UNIT = "jobs run in the agent's systemd unit, which kills them when it stops unless it has KillMode=process"


@dataclass(frozen=True, slots=True)
class NodeCgroup:
    """The group of all attempts, the group for supervisors (None: the agent's own), and what the place lacks."""

    node_group: Group | None
    home: Group | None
    not_enforced: tuple[str, ...]


def open_node_cgroup(node_id: str, bus: Bus | None, tree: Path = TREE, *, nested: bool = False) -> NodeCgroup:
    """Find or create the groups. `bus` is None if systemd is not the system's manager. Blocks.

    All groups of a `nested` agent are in its own, and its supervisors stay there: they end with the outer job.
    """
    if nested:
        group = cgroup_mounts.open_node_group(node_id, nested=True)
        return NodeCgroup(group, None, () if group else (NO_GROUPS,))
    if bus is None:
        return _without_scope(node_id)
    mounts = cgroup_mounts.find_mounts()
    if any(cgroup_mounts.is_bounded(mount) for mount in mounts):
        return _without_scope(node_id, f"{IN_UNIT}: the unit has limits that a separate scope would escape")
    try:
        scope = open_scope(bus, node_id)
    except ScopeRefused as error:
        log.warning("scope_refused", error=str(error))
        return _without_scope(node_id, f"{IN_UNIT}: systemd created no scope: {error}")
    log.info("scope_opened", scope=scope)
    within = [_delegated_mount(mount, scope) for mount in mounts]
    group = cgroup_mounts.open_node_group(node_id, within)
    return NodeCgroup(group, _scope_group(scope, tree), () if group else (NO_GROUPS,))


def remove_nested(node: Group) -> None:
    """Remove the groups of a nested node that is empty, so that the other system can remove its own. Blocks."""
    node.remove()
    above = {name: os.path.dirname(path) for name, path in node.directories.items()}
    for path in above.values():
        with contextlib.suppress(OSError):  # another node's groups are in it
            os.rmdir(path)


def _without_scope(node_id: str, *why: str) -> NodeCgroup:
    group = cgroup_mounts.open_node_group(node_id)
    return NodeCgroup(group, _supervisor_group(group), why if group else (NO_GROUPS, *why))


def _supervisor_group(node: Group | None) -> Group | None:
    """Return a group for supervisors next to the node's; None if attempts live within the agent's own group as well."""
    if node is None:
        return None
    above = {name: os.path.dirname(path) for name, path in node.directories.items()}
    if all(_contains_self(os.path.dirname(path)) for path in above.values()):
        return None
    home = Group(node.version, above, node.enforces).child(cgroup_mounts.AGENT_GROUP)
    try:
        home.create()
    except GroupError as error:
        log.warning("supervisor_cgroup_failed", error=str(error))
        return None
    return home


def _contains_self(group: str) -> bool:
    """Return whether this process is in a group or in its child `AGENT_GROUP`."""
    ours = str(os.getpid())
    return any(
        ours in read_text(f"{path}/cgroup.procs").split() for path in (group, f"{group}/{cgroup_mounts.AGENT_GROUP}")
    )


def _delegated_mount(mount: cgroup_mounts.Mount, scope: str) -> cgroup_mounts.Mount:
    """Return the mount reduced to the part of version 2's tree that systemd delegated."""
    inside = f"{mount.root}{scope}"
    return replace(mount, root=inside, own=inside) if mount.version == 2 and os.path.isdir(inside) else mount


def _scope_group(scope: str, tree: Path) -> Group:
    """Return the group by which systemd tracks the scope: in version 1 in its own hierarchy, else in the only one."""
    places = {"name=systemd": f"{tree}/systemd{scope}", "hybrid": f"{tree}/unified{scope}", UNIFIED: f"{tree}{scope}"}
    found = {name: path for name, path in places.items() if os.path.isdir(path)}
    aside = os.path.join(found.get(UNIFIED, ""), cgroup_mounts.AGENT_GROUP)
    if UNIFIED in found and os.path.isdir(aside):
        found[UNIFIED] = aside  # a group with controlled children has no processes
    return Group(1, found, ())
