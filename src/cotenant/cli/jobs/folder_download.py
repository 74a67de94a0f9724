"""Writes files that a node sends below one place on this machine, and nowhere else.

A node is not trusted with this machine: paths are checked, a link that would lead out of the copied folder is left out,
and links are made last, so that nothing is written through them. A file gets its name once it is complete.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import BinaryIO

from cotenant.cli.jobs.work_files import shown
from cotenant.cli.outcome import CommandError
from cotenant.folders.content import link_stays, path_error
from cotenant.v1.job_pb2 import FILE_KIND_DIRECTORY, FILE_KIND_FILE, FILE_KIND_LINK, FileEntry, FilePart


def target_of(path: bytes, target: str) -> str:
    """Return where a file or folder of a job goes: into the target if that is a folder, else there, as with cp -r."""
    return os.path.join(target, os.fsdecode(path.rpartition(b"/")[2])) if path and os.path.isdir(target) else target


class Download:
    """Receives parts. `target` is the path of the wanted entry itself."""

    def __init__(self, target: str) -> None:
        self._target = os.fsencode(target)
        self._links: list[FileEntry] = []
        self._modes: list[tuple[bytes, int]] = []
        self._file: BinaryIO | None = None
        self._temporary, self._final, self._left, self._mode = b"", b"", 0, 0
        self._last = b""
        self.problems: list[str] = []
        self.files = self.bytes = 0

    def take(self, part: FilePart) -> None:
        """Write a part.

        Raises:
            CommandError: this machine cannot write it, or the node sends something invalid.
        """
        try:
            if part.HasField("entry"):
                self._finish_file()
                self._begin(part.entry)
            if part.data:
                self._write(part.data)
            if part.problem:
                self._drop_file()
                self.problems.append(f"{shown(self._last) or 'it'}: {part.problem}")
        except OSError as error:
            self.close()
            where = shown(error.filename) if isinstance(error.filename, bytes) else shown(self._path(self._last))
            raise CommandError(f"cannot write {where}: {(error.strerror or str(error)).lower()}") from None

    def _path(self, inner: bytes) -> bytes:
        return os.path.join(self._target, inner) if inner else self._target

    def _begin(self, entry: FileEntry) -> None:
        if entry.path and (why := path_error(entry.path)):
            raise CommandError(f"the node sends a path that no folder has: {shown(entry.path[:80])}: {why}")
        self._last, path = entry.path, self._path(entry.path)
        if entry.kind == FILE_KIND_DIRECTORY:
            _make_directory(path, replace_link=bool(entry.path))
            self._modes.append((path, entry.mode))
        elif entry.kind == FILE_KIND_LINK:
            self._links.append(entry)
        elif entry.kind == FILE_KIND_FILE:
            self._temporary, self._final = path + b".cotenant-part", path
            self._left, self._mode = entry.size_bytes, entry.mode
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = open(os.open(self._temporary, flags, 0o600), "wb")  # noqa: SIM115  # closed in _finish_file
        else:
            self.problems.append(f"{shown(entry.path)}: is a socket, a pipe or a device")

    def _write(self, data: bytes) -> None:
        if self._file is None or len(data) > self._left:
            raise CommandError("the node sends more than it has announced")
        self._file.write(data)
        self._left -= len(data)
        self.bytes += len(data)

    def _finish_file(self) -> None:
        if self._file is None:
            return
        if self._left:
            self._drop_file()
            self.problems.append(f"{shown(self._last) or 'it'}: is not complete")
            return
        os.fchmod(self._file.fileno(), self._mode & ~_umask())
        self._file.close()
        self._file = None
        os.replace(self._temporary, self._final)
        self.files += 1

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                os.unlink(self._temporary)

    def finish(self) -> None:
        """Finish the last file, then make the links and set the modes of directories."""
        try:
            self._finish_file()
            for entry in self._links:
                self._make_link(entry)
            for path, mode in reversed(self._modes):
                os.chmod(path, (mode | stat.S_IRWXU) & ~_umask())
        except OSError as error:
            raise CommandError(f"cannot finish the copy: {(error.strerror or str(error)).lower()}") from None

    def _make_link(self, entry: FileEntry) -> None:
        path = self._path(entry.path)
        if not entry.path or not link_stays(entry.path, entry.link_target):
            self.problems.append(f"{shown(entry.path) or 'it'}: is a link to {shown(entry.link_target)}, outside")
            return
        if os.path.islink(path):
            os.unlink(path)
        with suppress(FileExistsError):  # a file of the same name is left alone
            os.symlink(entry.link_target, path)

    def close(self) -> None:
        """Remove an incomplete file."""
        self._drop_file()


def _make_directory(path: bytes, *, replace_link: bool) -> None:
    if replace_link and os.path.islink(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
