"""Paths of the agent's Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import contextlib
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
    directory = _place(state_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid():
        raise UnsafeDirectory(f"{directory} belongs to user {found.st_uid}, the agent runs as {os.getuid()}")
    directory.chmod(0o700)
    return directory


def _place(state_dir: Path) -> Path:
    directory = state_dir / "sockets"
    if len(os.fsencode(directory)) + 1 + DIGEST_CHARACTERS <= SOCKET_PATH_BYTES_MAX:
        return directory
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"cotenant-{os.getuid()}-{digest}"


def remove_socket_directory(state_dir: Path) -> None:
    """Leave nothing in the temporary directory. Where jobs run it stays: nobody else may take its name."""
    directory = _place(state_dir)
    with contextlib.suppress(OSError):
        (directory / NOTIFY).unlink()
    if directory.parent != state_dir:
        with contextlib.suppress(OSError):  # something is in it that is not ours to judge
            directory.rmdir()


def progress_socket(directory: Path, key: AttemptKey) -> Path:
    """Where an attempt tells its progress: as short for a long job id as for a short one."""
    return directory / hashlib.sha256(str(key).encode()).hexdigest()[:DIGEST_CHARACTERS]
