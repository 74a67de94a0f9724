"""As whom a job's processes run: as its submitter where the agent is root, else as the agent's own user.

Who holds the mesh's own token is its operator, and what they submit runs as whoever runs the agent: so `cotenant up`
is of use at once, by root on a laptop too. Everybody else is looked up among the machine's users by name, or in the
`[users]` of the agent's settings. Root and the machine's system accounts, among which may be the one that the mesh runs
as, are taken from there alone: a name that somebody bears elsewhere gives nobody what such an account owns.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OF_THE_MESH = frozenset({"", "operator", "anyone"})  # submitters that are no persons; "" is of before there were any
ANYBODY_ELSE = "*"
LOGIN_DEFS = Path("/etc/login.defs")
UID_MIN_DEFAULT = 1000  # of people; what login.defs says where it says nothing
_UID_MIN = re.compile(r"^[ \t]*UID_MIN[ \t]+(\d+)", re.MULTILINE)


class NoUser(Exception):
    """A submitter is nobody on this machine, or not somebody as whom jobs may run."""


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
        """What a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def to_plain(self) -> dict[str, object]:
        """What the supervisor needs to become this user."""
        return {"uid": self.uid, "gid": self.gid, "groups": list(self.groups)}


def people_from_uid(defs: Path = LOGIN_DEFS) -> int:
    """The least user id of a person on this machine; system accounts have lesser ones (login.defs(5), UID_MIN)."""
    try:
        told = _UID_MIN.search(defs.read_text(errors="replace"))
    except OSError:
        told = None
    return int(told[1]) if told else UID_MIN_DEFAULT


def user_name(uid: int) -> str:
    """The name of a user of this machine; the id where it has none, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_user() -> User:
    """The user that this process runs as; one without an entry, as in many containers, has its id for a name."""
    uid, groups = os.geteuid(), tuple(os.getgroups())
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        return User(str(uid), uid, os.getegid(), groups, os.environ.get("HOME", "/"), "/bin/sh")
    return User(found.pw_name, uid, os.getegid(), groups, found.pw_dir, found.pw_shell)


def runs_as(own: str, submitter: str, names: Mapping[str, str]) -> bool:
    """Whether an agent that runs as the user `own`, which is not root, may run a submitter's jobs.

    >>> [runs_as("bob", who, {"eve": "bob"}) for who in ("operator", "bob", "eve", "mallory")]
    [True, True, True, False]
    """
    return submitter in OF_THE_MESH or own == (names.get(submitter) or names.get(ANYBODY_ELSE) or submitter)


def refusal_of_others(own: str, submitter: str) -> str:
    """Why jobs of a submitter are not run by an agent that is not root."""
    return (
        f"everything here runs as the user {own!r}, so jobs of {submitter!r} could read and change all that is "
        f"{own}'s: run the agent as root, or accept that with --shared-identity"
    )


@dataclass(frozen=True, slots=True)
class Users:
    """Who runs jobs here. `names` maps submitters to users of this machine, `*` all that are not named."""

    names: Mapping[str, str] = field(default_factory=dict)
    own_uid: int = field(default_factory=os.geteuid)
    uid_min: int = field(default_factory=people_from_uid)
    look_up: Callable[[str], pwd.struct_passwd] = pwd.getpwnam
    shared: bool = False  # whether an agent that is not root runs jobs of any submitter

    def of(self, submitter: str) -> User | None:
        """Return as whom a submitter's jobs run; None: as whoever runs the agent. May ask a directory service.

        Raises:
            NoUser: nobody may run them.
        """
        if self.own_uid != 0:
            own = user_name(self.own_uid)
            if not self.shared and not runs_as(own, submitter, self.names):
                raise NoUser(refusal_of_others(own, submitter))
            return None
        told = self.names.get(submitter)
        if told is None and submitter in OF_THE_MESH:
            return None
        name = told or self.names.get(ANYBODY_ELSE) or submitter
        try:
            found = self.look_up(name)
        except (KeyError, ValueError):
            why = f", as which {submitter!r} is to run here," if name != submitter else ""
            raise NoUser(
                f"this node has no user {name!r}{why} and jobs run as whoever submitted them: make the user, or name "
                "another one in [users] of the agent's settings"
            ) from None
        if found.pw_uid == 0 and told is None:
            raise NoUser(f"jobs of {submitter!r} would run as root, which only [users] of the agent's settings allows")
        if found.pw_uid < self.uid_min and name == submitter and told is None:
            raise NoUser(
                f"{submitter!r} is a system account of this node (its user id {found.pw_uid} is less than "
                f"{self.uid_min}): jobs run as one only if [users] of the agent's settings names it"
            )
        groups = os.getgrouplist(found.pw_name, found.pw_gid)
        return User(found.pw_name, found.pw_uid, found.pw_gid, tuple(groups), found.pw_dir, found.pw_shell)
