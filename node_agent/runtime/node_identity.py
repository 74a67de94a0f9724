"""Determines the user that jobs run as, and what is hidden from them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from cotenant.node_agent.runtime.run_as import user_name

log = structlog.get_logger()

PROGRAM = Path(__file__).parents[1] / "supervisor" / "isolation.py"
TRY_SECONDS_MAX = 20.0
RUNTIME_DIRECTORIES = Path("/run/user")  # holds the sockets of the user's systemd, which starts programs outside


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The user that jobs run as, and what they do not see.

    `user` is the user that runs every job, empty if jobs run as their submitters. `hidden` are the paths that
    namespaces hide from jobs, empty if jobs have no namespaces. `not_enforced` are sentences that say what jobs share.
    """

    user: str
    hidden: tuple[str, ...]
    not_enforced: tuple[str, ...]


def find_identity(users: Mapping[str, str], secret: Iterable[Path]) -> NodeIdentity:
    """Determine the users for jobs; `secret` are paths to hide from them. Blocks for 0.1 s."""
    if (uid := os.geteuid()) == 0:
        return NodeIdentity("", (), tuple(_shared_with_root(users)))
    own = user_name(uid)
    hidden = tuple(str(path) for path in paths_to_hide([*secret, RUNTIME_DIRECTORIES / str(uid)]))
    if why := why_not_isolated(hidden):
        log.warning("jobs_not_isolated", why=why)
        return NodeIdentity(own, (), (
            f"every job runs as {own!r}, the agent's user, and can read the mesh's token and kill its processes: user "
            f"namespaces, which would prevent that, are not available ({why})",
        ))  # fmt: skip
    return NodeIdentity(own, hidden, (
        f"every job runs as {own!r}, the agent's user: namespaces isolate jobs from the mesh's files and processes "
        f"and from each other's processes, but every job can access all other files of {own!r}",
    ))  # fmt: skip


def _shared_with_root(users: Mapping[str, str]) -> Iterable[str]:
    if users.get("operator", "root") == "root":
        yield (
            "jobs submitted with the mesh's own token run as root and can read that token; hint: map operator to "
            "another user in [users]"
        )
    if "*" in users:
        yield f"jobs of submitters that are not in [users] all run as {users['*']!r} and share that user's files"


def paths_to_hide(paths: Iterable[Path | str]) -> list[Path]:
    """Return the existing paths, resolved, without those inside another one."""
    found = sorted({path.resolve() for path in map(Path, paths) if path.exists()})
    return [path for path in found if not any(above in path.parents for above in found)]


def why_not_isolated(hidden: Iterable[str]) -> str:
    """Try namespaces and return why they do not work; "" if they do."""
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(PROGRAM), *hidden],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRY_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode == 0:
        return tried.stdout
    return (tried.stderr.strip().splitlines() or [f"the trial exited with {tried.returncode}"])[-1]
