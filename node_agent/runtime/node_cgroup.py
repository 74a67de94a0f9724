"""Where a node's attempts and their supervisors live: with systemd in a scope of the node's own, else below the root.

There supervisors get a group next to the attempts: a container engine that stops an agent's container ends all
processes of its group, and those who look after jobs are not to be among them.

Where the agent's own group sets bounds, attempts stay within it in any case (see `cgroup_mounts`): a scope would let
them out. In version 1 systemd has a hierarchy of its own to know a unit's processes by, the controllers are free for
anybody: there it is only the supervisors that move.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.runtime.systemd_scope import Bus, ScopeRefused, open_scope
from cotenant.node_agent.supervisor.cgroups import UNIFIED, Group, GroupError, read_text

log = structlog.get_logger()

TREE = Path("/sys/fs/cgroup")  # where systemd mounts all hierarchies [systemd.io, Control Group APIs]
IN_UNIT = "jobs are in the unit of the agent, which ends them with it unless it has KillMode=process"


@dataclass(frozen=True, slots=True)
class Place:
    """The group of all attempts, the group into which supervisors step (None: they stay where the agent is)."""

    node_group: Group | None
    home: Group | None
    not_enforced: tuple[str, ...]


def open_place(node_id: str, bus: Bus | None, tree: Path = TREE) -> Place:
    """Find or make the place. `bus` is None where systemd is not the manager of this system. Blocks."""
    if bus is None:
        return _without_scope(node_id)
    mounts = cgroup_mounts.find_mounts()
    if any(cgroup_mounts.is_bounded(mount) for mount in mounts):
        return _without_scope(node_id, f"{IN_UNIT}: that has limits, which a scope of their own would let them out of")
    try:
        scope = open_scope(bus, node_id)
    except ScopeRefused as error:
        log.warning("scope_refused", error=str(error))
        return _without_scope(node_id, f"{IN_UNIT}: systemd gave no scope: {error}")
    log.info("scope_opened", scope=scope)
    within = [_within(mount, scope) for mount in mounts]
    group, missing = cgroup_mounts.open_node_group(node_id, within)
    return Place(group, _home(scope, tree), tuple(missing))


def _without_scope(node_id: str, *why: str) -> Place:
    group, missing = cgroup_mounts.open_node_group(node_id)
    return Place(group, _beside(group), (*missing, *why))


def _beside(node: Group | None) -> Group | None:
    """A group for supervisors next to the node's; None where attempts live within the agent's own group as well."""
    if node is None:
        return None
    above = {name: os.path.dirname(path) for name, path in node.directories.items()}
    if all(_holds_us(os.path.dirname(path)) for path in above.values()):
        return None
    home = Group(node.version, above, node.enforces).child(cgroup_mounts.ASIDE)
    try:
        home.create()
    except GroupError as error:
        log.warning("supervisors_stay_with_the_agent", error=str(error))
        return None
    return home


def _holds_us(group: str) -> bool:
    """Whether we are in a group, or have stepped aside in it."""
    ours = str(os.getpid())
    return any(ours in read_text(f"{path}/cgroup.procs").split() for path in (group, f"{group}/{cgroup_mounts.ASIDE}"))


def _within(mount: cgroup_mounts.Mount, scope: str) -> cgroup_mounts.Mount:
    """The part of version 2's tree that systemd has given to us."""
    inside = f"{mount.root}{scope}"
    return replace(mount, root=inside, own=inside) if mount.version == 2 and os.path.isdir(inside) else mount


def _home(scope: str, tree: Path) -> Group:
    """By what systemd knows a process to be of the scope: in version 1 a hierarchy of its own, else the only one."""
    places = {"name=systemd": f"{tree}/systemd{scope}", "hybrid": f"{tree}/unified{scope}", UNIFIED: f"{tree}{scope}"}
    found = {name: path for name, path in places.items() if os.path.isdir(path)}
    aside = os.path.join(found.get(UNIFIED, ""), cgroup_mounts.ASIDE)
    if UNIFIED in found and os.path.isdir(aside):
        found[UNIFIED] = aside  # what has controlled children has no processes
    return Group(1, found, ())
