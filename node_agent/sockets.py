"""Paths of the agent's Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from cotenant.node_agent.records import AttemptKey

APART = ".only"  # behind the name of an attempt's socket: a directory that holds nothing else
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


def stand_apart(path: str) -> Path:
    """Make and return a directory that holds nothing but an attempt's socket, under the same name.

    A job in a mount namespace of its own finds it in the place of the directory that holds those of all attempts.
    """
    directory = Path(path + APART)
    directory.mkdir(mode=0o700, exist_ok=True)
    link_apart(Path(path))
    return directory


def link_apart(path: Path) -> None:
    """Put a socket that was made again where its attempt looks for it, if that is in a directory of its own."""
    link = Path(str(path) + APART) / path.name
    if link.parent.is_dir():
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.hardlink_to(path)


def stand_together(path: Path) -> None:
    """Remove an attempt's directory of its own."""
    shutil.rmtree(str(path) + APART, ignore_errors=True)
