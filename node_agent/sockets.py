"""Paths of the agent's Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from cotenant.node_agent.records import AttemptKey

SOCKET_PATH_BYTES_MAX = 107
NOTIFY = "notify"
DIGEST_CHARACTERS = 24


class UnsafeDirectory(Exception):
    """Somebody else owns the directory in which the sockets should lie."""


def socket_directory(state_dir: Path) -> Path:
    """Make and return the directory for sockets: in the state directory, or for a deep one under the temporary one.

    The same state directory gives the same one at every start, so that running jobs find a new agent.
    """
    directory = state_dir / "sockets"
    if len(os.fsencode(directory)) + 1 + DIGEST_CHARACTERS > SOCKET_PATH_BYTES_MAX:
        digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
        directory = Path(tempfile.gettempdir()) / f"cotenant-{os.getuid()}-{digest}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid():
        raise UnsafeDirectory(f"{directory} belongs to user {found.st_uid}, the agent runs as {os.getuid()}")
    directory.chmod(0o700)
    return directory


def progress_socket(directory: Path, key: AttemptKey) -> Path:
    """Where an attempt tells its progress: as short for a long job id as for a short one."""
    return directory / hashlib.sha256(str(key).encode()).hexdigest()[:DIGEST_CHARACTERS]
