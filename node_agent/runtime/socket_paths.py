"""Paths of the agent's Unix sockets, which the kernel limits to 107 bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from cotenant.node_agent.runtime.attempt_status import AttemptKey

PRIVATE_SUFFIX = ".only"  # suffix of an attempt's directory that contains only its socket
SOCKET_PATH_BYTES_MAX = 107
NOTIFY = "notify"
LOCATION_FILE = "sockets.path"  # in the state directory: names another directory for the sockets
TEMPORARY_NAME = re.compile(r"cotenant-[a-z0-9_]{8}")  # names from `tempfile.mkdtemp` with our prefix
DIGEST_CHARACTERS = 24


class UnsafeDirectory(Exception):
    """Another user owns the directory for the sockets."""


def socket_directory(state_dir: Path) -> Path:
    """Create and return the directory for sockets: in the state directory or, if its path is too long, a temporary one.

    The same state directory gives the same one at every start, so that running jobs find a new agent. A temporary
    directory is in a place where anyone may create files, so it has a random name, which is recorded in the state
    directory.
    """
    directory = _directory_in_use(state_dir)
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="cotenant-"))
        (state_dir / LOCATION_FILE).write_text(str(directory))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid():
        raise UnsafeDirectory(f"{directory} belongs to user {found.st_uid}, the agent runs as {os.getuid()}")
    directory.chmod(0o700)
    return directory


def _directory_in_use(state_dir: Path) -> Path | None:
    """Return the existing directory or the one to create; None if a new temporary one is needed."""
    directory = state_dir / "sockets"
    if len(os.fsencode(directory)) + 1 + DIGEST_CHARACTERS <= SOCKET_PATH_BYTES_MAX:
        return directory
    with contextlib.suppress(OSError, ValueError):
        if _is_socket_directory(noted := Path((state_dir / LOCATION_FILE).read_text())):
            return noted
    return before if _is_our_own(before := _earlier_directory(state_dir)) else None


def _earlier_directory(state_dir: Path) -> Path:
    """Return the directory of earlier releases, with a guessable name: jobs that they started use it."""
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    temporary = tempfile.gettempdir()  # only read: nothing is created there
    return Path(temporary) / f"cotenant-{os.getuid()}-{digest}"


def _is_socket_directory(directory: Path) -> bool:
    """Return whether `socket_directory` created the directory: a damaged record may name any path."""
    if directory.root != os.sep or ".." in directory.parts or not TEMPORARY_NAME.fullmatch(directory.name):
        return False  # `tempfile` gives neither a relative path nor one like //tmp
    return _is_our_own(directory) and not directory.lstat().st_mode & 0o077


def _is_our_own(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def remove_socket_directory(state_dir: Path) -> None:
    """Remove the temporary directory unless jobs run: then it stays, so that no other user can take its name."""
    if (directory := _directory_in_use(state_dir)) is None:
        return
    with contextlib.suppress(OSError):
        (directory / NOTIFY).unlink()
    if directory.parent != state_dir:
        with contextlib.suppress(OSError):  # it contains other files
            directory.rmdir()
            (state_dir / LOCATION_FILE).unlink(missing_ok=True)


def progress_socket(directory: Path, key: AttemptKey) -> Path:
    """Return the path of an attempt's progress socket: its length does not depend on the job id."""
    return directory / hashlib.sha256(str(key).encode()).hexdigest()[:DIGEST_CHARACTERS]


def make_private_directory(path: str) -> Path:
    """Create and return a directory that contains only an attempt's socket, under the same name.

    A job in a mount namespace of its own sees it in place of the directory with the sockets of all attempts.
    """
    directory = Path(path + PRIVATE_SUFFIX)
    directory.mkdir(mode=0o700, exist_ok=True)
    link_private_socket(Path(path))
    return directory


def link_private_socket(path: Path) -> None:
    """Link a recreated socket into the attempt's private directory, if there is one."""
    link = Path(str(path) + PRIVATE_SUFFIX) / path.name
    if link.parent.is_dir():
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.hardlink_to(path)


def remove_private_directory(path: Path) -> None:
    """Remove an attempt's private directory."""
    shutil.rmtree(str(path) + PRIVATE_SUFFIX, ignore_errors=True)
