"""Which identity jobs share with the agent, and what is kept from them all the same."""

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
RUNTIME_DIRECTORIES = Path("/run/user")  # with the sockets of a user's systemd, which starts programs outside


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """As whom jobs run and what they do not see.

    `user` is the user as whom every job runs, empty where jobs run as their submitters. `hidden` is what namespaces
    hide from jobs, empty where jobs have none. `not_enforced` says what jobs share, in a sentence each.
    """

    user: str
    hidden: tuple[str, ...]
    not_enforced: tuple[str, ...]


def find_identity(users: Mapping[str, str], secret: Iterable[Path]) -> NodeIdentity:
    """Find out what the agent's user means for jobs; `secret` is what they are not to see. Blocks for 0.1 s."""
    if (uid := os.geteuid()) == 0:
        return NodeIdentity("", (), tuple(_shared_with_root(users)))
    own = user_name(uid)
    hidden = tuple(str(path) for path in paths_to_hide([*secret, RUNTIME_DIRECTORIES / str(uid)]))
    if why := why_not_isolated(hidden):
        log.warning("jobs_not_isolated", why=why)
        return NodeIdentity(own, (), (
            f"every job runs as {own!r}, the user of the agent, and can read the mesh's token and end its processes: "
            f"user namespaces, which would prevent that, cannot be used here ({why})",
        ))  # fmt: skip
    return NodeIdentity(own, hidden, (
        f"every job runs as {own!r}, the user of the agent: namespaces keep jobs from the mesh's files and processes "
        f"and from each other's processes, but all other files of {own!r} are open to every job",
    ))  # fmt: skip


def _shared_with_root(users: Mapping[str, str]) -> Iterable[str]:
    if users.get("operator", "root") == "root":
        yield (
            "jobs submitted with the mesh's own token run as root and can read that token: [users] may name another "
            "user for operator"
        )
    if "*" in users:
        yield f"jobs of submitters that [users] does not name all run as {users['*']!r} and share that user's files"


def paths_to_hide(paths: Iterable[Path | str]) -> list[Path]:
    """The paths that exist, resolved, without those that lie in another one of them."""
    found = sorted({path.resolve() for path in map(Path, paths) if path.exists()})
    return [path for path in found if not any(above in path.parents for above in found)]


def why_not_isolated(hidden: Iterable[str]) -> str:
    """Try namespaces out, and return why they do not work; "" where they do."""
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
    return (tried.stderr.strip().splitlines() or [f"the trial ended with {tried.returncode}"])[-1]
