"""Determines the user of a job's processes: its submitter if the agent is root, otherwise the agent's own user.

The holder of the mesh's own token is its operator, and the operator's jobs run as the agent's user: so `cotenant up` is
useful at once, also as root on a laptop. All other submitters are looked up among the machine's users by name, or in
`[users]` of the agent's settings. Root and the machine's system accounts, perhaps including the mesh's own, are used
only if `[users]` names them: a submitter's name elsewhere grants no access to what such an account owns.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MESH_SUBMITTERS = frozenset(
    {"", "operator", "anyone"}
)  # submitters that are not persons; "": from before submitters existed
WILDCARD = "*"
LOGIN_DEFS = Path("/etc/login.defs")
UID_MIN_DEFAULT = 1000  # of persons; the default of login.defs
_UID_MIN = re.compile(r"^[ \t]*UID_MIN[ \t]+(\d+)", re.MULTILINE)


class UserNotAllowed(Exception):
    """A submitter has no user on this machine, or not one that may run jobs."""


@dataclass(frozen=True, slots=True)
class User:
    """A user of this machine."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    def environment(self) -> dict[str, str]:
        """Return the variables that a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def to_spec(self) -> dict[str, object]:
        """Return what the supervisor needs to become this user."""
        return {"uid": self.uid, "gid": self.gid, "groups": list(self.groups)}


def min_person_uid(defs: Path = LOGIN_DEFS) -> int:
    """Return the lowest user id of a person on this machine; system accounts are below (login.defs(5), UID_MIN)."""
    try:
        found = _UID_MIN.search(defs.read_text(errors="replace"))
    except OSError:
        found = None
    return int(found[1]) if found else UID_MIN_DEFAULT


def user_name(uid: int) -> str:
    """Return the name of a user of this machine; the id if it has none, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_user() -> User:
    """Return the user of this process; without an entry, as in many containers, its id is the name."""
    uid, groups = os.geteuid(), tuple(os.getgroups())
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        return User(str(uid), uid, os.getegid(), groups, os.environ.get("HOME", "/"), "/bin/sh")
    return User(found.pw_name, uid, os.getegid(), groups, found.pw_dir, found.pw_shell)


def runs_as(own: str, submitter: str, names: Mapping[str, str]) -> bool:
    """Return whether an agent that runs as the user `own`, not as root, may run a submitter's jobs.

    >>> [runs_as("bob", name, {"eve": "bob"}) for name in ("operator", "bob", "eve", "mallory")]
    [True, True, True, False]
    """
    return submitter in MESH_SUBMITTERS or own == (names.get(submitter) or names.get(WILDCARD) or submitter)


def shared_identity_refusal(own: str, submitter: str) -> str:
    """Return why an agent that is not root does not run a submitter's jobs."""
    return (
        f"all jobs here run as the user {own!r}, so jobs of {submitter!r} could read and change everything that "
        f"belongs to {own}: run the agent as root, or allow it with --shared-identity"
    )


@dataclass(frozen=True, slots=True)
class UserMapping:
    """Maps submitters to users. `names` maps submitters to users of this machine, `*` all others."""

    names: Mapping[str, str] = field(default_factory=dict)
    own_uid: int = field(default_factory=os.geteuid)
    uid_min: int = field(default_factory=min_person_uid)
    look_up: Callable[[str], pwd.struct_passwd] = pwd.getpwnam
    shared: bool = False  # allow any submitter on an agent that is not root

    def of(self, submitter: str) -> User | None:
        """Return the user for a submitter's jobs; None: the agent's user. May query a directory service.

        Raises:
            UserNotAllowed: no user may run them.
        """
        if self.own_uid != 0:
            own = user_name(self.own_uid)
            if not self.shared and not runs_as(own, submitter, self.names):
                raise UserNotAllowed(shared_identity_refusal(own, submitter))
            return None
        mapped = self.names.get(submitter)
        if mapped is None and submitter in MESH_SUBMITTERS:
            return None
        name = mapped or self.names.get(WILDCARD) or submitter
        try:
            found = self.look_up(name)
        except (KeyError, ValueError):
            why = f", which {submitter!r} is mapped to" if name != submitter else ""
            raise UserNotAllowed(
                f"this node has no user {name!r}{why}; jobs run as their submitters: create the user, or map the "
                "submitter to another one in [users] of the agent's settings"
            ) from None
        if found.pw_uid == 0 and mapped is None:
            raise UserNotAllowed(
                f"jobs of {submitter!r} would run as root: only [users] of the agent's settings can allow it"
            )
        if found.pw_uid < self.uid_min and name == submitter and mapped is None:
            raise UserNotAllowed(
                f"{submitter!r} is a system account of this node (its user id {found.pw_uid} is below "
                f"{self.uid_min}): jobs run as one only if [users] of the agent's settings names it"
            )
        groups = os.getgrouplist(found.pw_name, found.pw_gid)
        return User(found.pw_name, found.pw_uid, found.pw_gid, tuple(groups), found.pw_dir, found.pw_shell)
