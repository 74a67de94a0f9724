"""The secrets of attempts on a node: in memory (tmpfs) where the node has a place for them, else in the attempt's own
directory, readable by the agent and the job's user only; removed at the attempt's end.

<root>/<attempt>/environment   variables, for the supervisor: they are in no other file
<root>/<attempt>/files/        the directory in COTENANT_SECRETS, with files of mode 0400 that belong to the job's user
"""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from cotenant.v1 import job_pb2

log = structlog.get_logger()

ENVIRONMENT, FILES = "environment", "files"
VARIABLE = "COTENANT_SECRETS"
PREFIX = "cotenant-secrets-"
TEMPORARY_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # names from `tempfile.mkdtemp` with our prefix
LOCATION_FILE = "secrets.path"  # in the state directory: names the directory in memory
KERNELS = ("/sys/", "/proc/")
ON_DISK = "secrets"  # in the state directory of a node that has no such place


@dataclass(frozen=True, slots=True)
class WrittenSecrets:
    """Where the secrets of an attempt are; None: it has none of that form."""

    environment: str | None
    files: str | None


NO_SECRETS = WrittenSecrets(None, None)


class SecretFiles:
    """The secrets of all attempts of a node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(
        self, attempt: str, spec: job_pb2.JobSpec, values: Mapping[str, bytes], owner: tuple[int, int] | None
    ) -> WrittenSecrets:
        """Write the secrets of an attempt; `owner` is the user and group of its processes. Blocks.

        Raises:
            OSError: they cannot be written.
            ValueError: a value cannot be an environment variable. The message does not have the value.
        """
        if not spec.secrets:
            return NO_SECRETS
        self.remove(attempt)
        for directory in (self.root, self.root / attempt):
            _make_own(directory, 0o711)
        variables = {use.variable: _text(use.name, values[use.name]) for use in spec.secrets if use.variable}
        files = {use.path: values[use.name] for use in spec.secrets if use.path}
        environment, directory = self.root / attempt / ENVIRONMENT, self.root / attempt / FILES
        if variables:
            _write(environment, marshal.dumps(variables), 0o600, None)
        if files:
            _make_own(directory, 0o700)
            for path, value in files.items():
                _make_parents(directory, path, owner)
                _write(directory / path, value, 0o400, owner)
            if owner:
                os.chown(directory, *owner)
        return WrittenSecrets(str(environment) if variables else None, str(directory) if files else None)

    def places(self) -> list[str]:
        """Return this directory, and those of other agents of the same user beside it."""
        found = {str(self.root)}
        for path in self.root.parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # it has just been removed
                found |= {str(path)} if path.lstat().st_uid == os.geteuid() else set()
        return sorted(found)

    def remove(self, attempt: str) -> None:
        """Remove the secrets of an attempt, if it has any. An error is logged."""
        if (path := self.root / attempt).is_dir():
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.error("secret_removal_failed", attempt=attempt, error=str(error))

    def close(self) -> None:
        """Remove the directory if it is empty: a node that never starts again leaves nothing in memory."""
        with contextlib.suppress(OSError):
            self.root.rmdir()


def open_secret_files(state_dir: Path) -> SecretFiles:
    """Return where a node's secrets are kept, which exists: in memory, or else on disk. Raises `OSError`.

    The same state directory gives the same place at every start of the agent. A directory in memory may be where anyone
    may create files, so it has a random name, which is recorded in the state directory.
    """
    record = state_dir / LOCATION_FILE
    with contextlib.suppress(OSError, ValueError):
        if _is_our_own(noted := Path(record.read_text())):
            return SecretFiles(noted)
    for mount in memory_mounts():
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=mount))
            made.chmod(0o711)
            record.write_text(str(made))
            return SecretFiles(made)
    log.warning("secrets_not_in_memory", directory=str(state_dir / ON_DISK))
    _make_own(state_dir / ON_DISK, 0o711)
    return SecretFiles(state_dir / ON_DISK)


def memory_mounts() -> list[str]:
    """Return the tmpfs mounts in which this user may create directories, those that only it may write first.

    What is below `/sys` (where control groups of version 1 are mounted) is the kernel's, although root may write there.
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            found = [words[1] for line in file if len(words := line.split(" ")) > 2 and words[2] == "tmpfs"]
    except OSError:
        return []
    ours = (path for path in dict.fromkeys(found) if not path.startswith(KERNELS))
    usable = [path for path in ours if os.access(path, os.W_OK | os.X_OK)]
    return sorted(usable, key=lambda path: bool(os.stat(path).st_mode & stat.S_IWOTH))


def _is_our_own(path: Path) -> bool:
    """Return whether a recorded path is a directory that an agent of this user made: a record may be damaged."""
    if path.root != os.sep or ".." in path.parts or not TEMPORARY_NAME.fullmatch(path.name):
        return False
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _make_own(path: Path, mode: int) -> None:
    """Make a directory of the agent's, whatever its umask. Raises `OSError` if somebody else has made it."""
    path.mkdir(exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{path} is not a directory of the agent's user")
    path.chmod(mode)


def _make_parents(directory: Path, path: str, owner: tuple[int, int] | None) -> None:
    for part in reversed([one for one in Path(path).parents if one.name]):
        if not (directory / part).is_dir():
            (directory / part).mkdir(mode=0o700)
            if owner:
                os.chown(directory / part, *owner)


def _write(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)
        if owner:
            os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), mode)


def _text(name: str, value: bytes) -> str:
    if b"\0" in value:
        raise ValueError(f"the secret {name} has a NUL byte, and cannot be an environment variable; use {name}:PATH")
    return value.decode(errors="surrogateescape")
