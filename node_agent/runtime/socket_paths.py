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

APART = ".only"  # behind the name of an attempt's socket: a directory that holds nothing else
SOCKET_PATH_BYTES_MAX = 107
NOTIFY = "notify"
PLACE = "sockets.path"  # in the state directory: where the sockets are, if not there
MADE = re.compile(r"cotenant-[a-z0-9_]{8}")  # the names that `tempfile.mkdtemp` gives with our prefix
DIGEST_CHARACTERS = 24


class UnsafeDirectory(Exception):
    """Somebody else owns the directory in which the sockets should lie."""


def socket_directory(state_dir: Path) -> Path:
    """Make and return the directory for sockets: in the state directory, or for a deep one in the temporary one.

    The same state directory gives the same one at every start, so that running jobs find a new agent. In the temporary
    directory, where anybody may put something, it has a random name that is noted in the state directory.
    """
    directory = _place(state_dir)
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="cotenant-"))
        (state_dir / PLACE).write_text(str(directory))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid():
        raise UnsafeDirectory(f"{directory} belongs to user {found.st_uid}, the agent runs as {os.getuid()}")
    directory.chmod(0o700)
    return directory


def _place(state_dir: Path) -> Path | None:
    """The directory that there is, or is to be made; None where a new one is to be found in the temporary directory."""
    directory = state_dir / "sockets"
    if len(os.fsencode(directory)) + 1 + DIGEST_CHARACTERS <= SOCKET_PATH_BYTES_MAX:
        return directory
    with contextlib.suppress(OSError, ValueError):
        if _was_made(noted := Path((state_dir / PLACE).read_text())):
            return noted
    return before if _is_our_own(before := _place_before(state_dir)) else None


def _place_before(state_dir: Path) -> Path:
    """Where earlier releases put it, under a name that others could guess: jobs that they started look there."""
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    temporary = tempfile.gettempdir()  # only looked at: nothing is made there
    return Path(temporary) / f"cotenant-{os.getuid()}-{digest}"


def _was_made(directory: Path) -> bool:
    """Whether it is a directory of ours as `socket_directory` makes them: a damaged note may name any other one."""
    if not directory.is_absolute() or not MADE.fullmatch(directory.name):
        return False
    return _is_our_own(directory) and not directory.lstat().st_mode & 0o077


def _is_our_own(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def remove_socket_directory(state_dir: Path) -> None:
    """Leave nothing in the temporary directory. Where jobs run it stays: nobody else may take its name."""
    if (directory := _place(state_dir)) is None:
        return
    with contextlib.suppress(OSError):
        (directory / NOTIFY).unlink()
    if directory.parent != state_dir:
        with contextlib.suppress(OSError):  # something is in it that is not ours to judge
            directory.rmdir()
            (state_dir / PLACE).unlink(missing_ok=True)


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
