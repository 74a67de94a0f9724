"""Reads files of a job's working directory for its users, and never anything else.

The job may change the directory meanwhile, and the agent may be root, so a path is resolved by the kernel, within the
directory (openat2 with RESOLVE_BENEATH), and not compared as text: no "..", absolute path, link or rename leads out. On
kernels before 5.6, and where openat2 is forbidden, no link is followed at all. A file of another user that is not
readable for all is left out: it may be a hard link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.v1.job_pb2 import (
    FILE_KIND_DIRECTORY,
    FILE_KIND_FILE,
    FILE_KIND_LINK,
    FILE_KIND_UNSPECIFIED,
    FileEntry,
    FileKind,
    FilePart,
    FileSelection,
)

PIECE_BYTES = 256 * 1024
DEPTH_MAX = 128
SYS_OPENAT2 = 437  # on all architectures
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x02, 0x04, 0x08
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoFiles(Exception):
    """There is no such file, for this reason."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def read_files(work: Path, wanted: FileSelection) -> Generator[FilePart, None, None]:
    """Yield the wanted entries, sorted by path, each file with its content.

    Raises:
        NoFiles: there is no such directory, or nothing with the wanted path.
    """
    try:
        root = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise NoFiles("this attempt has no files on its node: its working directory was empty, or is gone") from None
    try:
        yield from _Files(root, wanted).parts()
    finally:
        os.close(root)


class _Files:
    """The files below one directory."""

    def __init__(self, root: int, wanted: FileSelection) -> None:
        self._root, self._wanted = root, wanted
        self._owner = os.fstat(root).st_uid

    def parts(self) -> Iterator[FilePart]:
        """Yield the wanted entry and what is in it."""
        path = self._wanted.path.strip(b"/")
        shown = ascii(path.decode(errors="replace"))
        try:
            base = open_beneath(self._root, path or b".", os.O_PATH, links=True)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):
                raise NoFiles(f"{shown} leads out of the working directory, or through too many links") from None
            raise NoFiles(f"{shown}: {(error.strerror or str(error)).lower()}") from None
        try:
            found = os.fstat(base)
            yield FilePart(entry=_entry(b"", found, b""))
            if stat.S_ISDIR(found.st_mode):
                yield from self._directory(base, b"")
            elif not self._wanted.list_only:
                yield from self._content(base, b"", found)
        finally:
            os.close(base)

    def _directory(self, base: int, inner: bytes) -> Iterator[FilePart]:
        """Yield what is in a directory below `base`."""
        try:
            with opened(base, inner or b".", os.O_RDONLY | os.O_DIRECTORY) as directory:
                names = sorted(os.fsencode(name) for name in os.listdir(directory))
        except OSError as error:
            yield FilePart(problem=(error.strerror or str(error)).lower())
            return
        for name in names:
            path = b"/".join((inner, name)) if inner else name
            try:
                with opened(base, path, os.O_PATH | os.O_NOFOLLOW) as handle:
                    found = os.fstat(handle)
                    target = os.fsencode(os.readlink(b"", dir_fd=handle)) if stat.S_ISLNK(found.st_mode) else b""
            except OSError:
                continue  # it was removed or replaced meanwhile
            yield FilePart(entry=_entry(path, found, target))
            if stat.S_ISDIR(found.st_mode):
                if not self._wanted.shallow and path.count(b"/") < DEPTH_MAX:
                    yield from self._directory(base, path)
            elif stat.S_ISREG(found.st_mode) and not self._wanted.list_only:
                yield from self._content(base, path, found)

    def _content(self, base: int, path: bytes, found: os.stat_result) -> Iterator[FilePart]:
        """Yield the bytes of a file, as many as it had when it was found."""
        if not stat.S_ISREG(found.st_mode):
            yield FilePart(problem="is neither a file nor a directory")
            return
        if found.st_uid != self._owner and not found.st_mode & stat.S_IROTH:
            yield FilePart(problem="belongs to another user")
            return
        try:
            with self._reopened(base, path, found) as file:
                left = found.st_size
                while left and (data := os.read(file, min(left, PIECE_BYTES))):
                    left -= len(data)
                    yield FilePart(data=data)
        except OSError as error:
            yield FilePart(problem=(error.strerror or str(error)).lower())
            return
        if left:
            yield FilePart(problem="became shorter while it was read")

    @contextmanager
    def _reopened(self, base: int, path: bytes, found: os.stat_result) -> Iterator[int]:
        """Open the file that was found for reading, and no other. Raises `OSError`."""
        if path:
            file = open_beneath(base, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        else:
            file = os.open(f"/proc/self/fd/{base}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not os.path.samestat(os.fstat(file), found):
                raise OSError(errno.ESTALE, "was replaced while it was read")
            yield file
        finally:
            os.close(file)


@contextmanager
def opened(base: int, path: bytes, flags: int) -> Iterator[int]:
    """Open a path without links below a directory, and close it. Raises `OSError`."""
    handle = open_beneath(base, path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def open_beneath(base: int, path: bytes, flags: int, *, links: bool = False) -> int:
    """Open a path below a directory; with `links` through links that stay there. Raises `OSError`."""
    resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS
    if not links:  # with O_PATH and O_NOFOLLOW the last part may still be a link, which is opened itself
        resolve |= RESOLVE_NO_SYMLINKS
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    handle: int = _LIBC.syscall(SYS_OPENAT2, base, path, ctypes.byref(how), ctypes.sizeof(how))
    if handle >= 0:
        return handle
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM):
        return _open_without_links(base, path, flags)
    raise OSError(number, os.strerror(number))


def _open_without_links(base: int, path: bytes, flags: int) -> int:
    """Open a path part by part, none of them a link. Raises `OSError`."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    handle = os.open(b".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
    try:
        for part in parts[:-1]:
            following = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = following
        return os.open(parts[-1] if parts else b".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)


def _entry(path: bytes, found: os.stat_result, target: bytes) -> FileEntry:
    return FileEntry(
        path=path,
        kind=_kind(found.st_mode),
        mode=found.st_mode & 0o777,
        size_bytes=found.st_size if stat.S_ISREG(found.st_mode) else 0,
        modify_time=Timestamp(seconds=int(found.st_mtime)),
        link_target=target,
    )


def _kind(mode: int) -> FileKind.ValueType:
    if stat.S_ISREG(mode):
        return FILE_KIND_FILE
    if stat.S_ISDIR(mode):
        return FILE_KIND_DIRECTORY
    return FILE_KIND_LINK if stat.S_ISLNK(mode) else FILE_KIND_UNSPECIFIED
