"""Unpacks the layers of an image into one directory, whatever an archive contains.

A layer is a tar archive that changes what the layers below it have made: `.wh.NAME` removes NAME, and `.wh..wh..opq`
everything that they have in its directory. Every path is resolved by the kernel with the directory as its root
(openat2), so that no "..", absolute path or link leads out. Files belong to the user who unpacks them, without set-uid
and set-gid bits; devices are left out, as a container has its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from cotenant.node_agent.containers.oci_layout import BadImage

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
SYS_OPENAT2 = 437  # on all architectures
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
PIECE_BYTES = 1 << 20
ENTRIES_MAX = 5_000_000
DEPTH_MAX = 256
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Unpacker:
    """Unpacks layers, from the lowest, into an existing directory; they may have `bytes_max` bytes in all.

    `check` is called for each entry, and may raise.
    """

    def __init__(self, root: str, bytes_max: int, check: Callable[[], None] = lambda: None) -> None:
        self._root = os.open(root, DIRECTORY)
        self._bytes_max, self._check = bytes_max, check
        self.bytes = self.entries = 0
        self._own: set[str] = set()  # paths that the present layer has made

    def close(self) -> None:
        """Close the directory."""
        os.close(self._root)

    def unpack(self, stream: IO[bytes]) -> None:
        """Unpack one layer from its uncompressed archive.

        Raises:
            BadImage: the archive is damaged, unsafe or too large.
            OSError: the disk refuses.
        """
        self._own = set()
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE_BYTES) as archive:
                for entry in archive:
                    self._check()
                    self._count(entry)
                    self._unpack_entry(archive, entry)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
            raise BadImage(f"a layer is damaged: {error}") from error

    def _count(self, entry: tarfile.TarInfo) -> None:
        self.entries += 1
        self.bytes += entry.size if entry.isreg() else 0
        if self.entries > ENTRIES_MAX:
            raise BadImage(f"it has more than {ENTRIES_MAX:,} files")
        if self.bytes > self._bytes_max:
            raise BadImage(f"it is larger than the cache of images, {self._bytes_max:,} bytes")

    def _unpack_entry(self, archive: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        parts = _parts(entry.name)
        if not parts:
            if entry.isdir():
                os.fchmod(self._root, entry.mode & 0o777 | 0o555)  # jobs of all users start there
            return
        *above, name = parts
        with self._directory(above) as parent:
            if name == OPAQUE:
                self._remove_lower(parent, "/".join(above))
            elif name.startswith(WHITEOUT):
                if (hidden := name.removeprefix(WHITEOUT)) in ("", ".", ".."):
                    raise BadImage(f"a layer has an invalid whiteout: {entry.name[:80]!r}")
                _remove(parent, hidden)
            else:
                self._make(archive, entry, parent, name)
                self._note(parts)

    def _note(self, parts: list[str]) -> None:
        """Note that the present layer has made a path, and so needs what is above it."""
        while parts and (path := "/".join(parts)) not in self._own:
            self._own.add(path)
            parts = parts[:-1]

    def _remove_lower(self, parent: int, path: str) -> None:
        """Remove what is in a directory, but for what the present layer has made."""
        for name in os.listdir(parent):
            inner = f"{path}/{name}" if path else name
            if inner not in self._own:
                _remove(parent, name)
            elif stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                with self._directory(inner.split("/"), create=False) as below:
                    self._remove_lower(below, inner)

    def _make(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, parent: int, name: str) -> None:
        if entry.isdir():
            _make_directory(parent, name, entry)
            return
        if not (entry.isreg() or entry.issym() or entry.islnk() or entry.isfifo()):
            return
        _remove(parent, name)
        if entry.isreg():
            self._make_file(archive, entry, parent, name)
        elif entry.issym():
            os.symlink(entry.linkname, name, dir_fd=parent)
        elif entry.isfifo():
            os.mkfifo(name, entry.mode & 0o777, dir_fd=parent)
        else:
            self._make_link(entry, parent, name)

    def _make_file(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, parent: int, name: str) -> None:
        content = archive.extractfile(entry)
        assert content is not None
        with open(os.open(name, NEW_FILE, 0o600, dir_fd=parent), "wb") as file:
            shutil.copyfileobj(content, file, PIECE_BYTES)
            os.fchmod(file.fileno(), entry.mode & 0o777)
            file.flush()
            with suppress(OSError, OverflowError, ValueError):  # Python compares a source's time with its bytecode's
                os.utime(file.fileno(), (entry.mtime, entry.mtime))

    def _make_link(self, entry: tarfile.TarInfo, parent: int, name: str) -> None:
        parts = _parts(entry.linkname)
        if not parts:
            raise BadImage(f"{entry.name[:80]!r} is a link to nothing")
        try:
            with self._directory(parts[:-1], create=False) as source:
                os.link(parts[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise BadImage(f"{entry.name[:80]!r} is a link to {entry.linkname[:80]!r}, which does not exist") from None

    @contextmanager
    def _directory(self, parts: list[str], *, create: bool = True) -> Iterator[int]:
        """Open a directory of the image through its links; create what is missing."""
        handle = self._open(parts, create=create)
        try:
            yield handle
        finally:
            os.close(handle)

    def _open(self, parts: list[str], *, create: bool) -> int:
        try:
            return _open_in_root(self._root, "/".join(parts) or ".")
        except FileNotFoundError:
            if not create or not parts:
                raise
        except OSError as error:
            raise BadImage(f"{'/'.join(parts)[:80]!r} is no directory: {error.strerror}") from error
        parent = self._open(parts[:-1], create=True)
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=parent)
        except FileExistsError:
            raise BadImage(f"{'/'.join(parts)[:80]!r} is a link to nothing") from None
        finally:
            os.close(parent)
        return self._open(parts, create=False)


def _parts(path: str) -> list[str]:
    """Return the parts of a path within an image. Raises `BadImage` if it leads out."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path or len(parts) > DEPTH_MAX:
        raise BadImage(f"a layer has a path that leads out of the image, or is too deep: {path[:80]!r}")
    return parts


def _open_in_root(root: int, path: str) -> int:
    how = _OpenHow(DIRECTORY, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    handle: int = _LIBC.syscall(SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if handle < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return handle


def _make_directory(parent: int, name: str, entry: tarfile.TarInfo) -> None:
    mode = entry.mode & 0o1777 | (0 if os.geteuid() == 0 else 0o700)  # it is still to be filled, and removed one day
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.chmod(name, mode, dir_fd=parent)
            return
        os.unlink(name, dir_fd=parent)
    os.mkdir(name, 0o700, dir_fd=parent)
    os.chmod(name, mode, dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    """Remove what a lower layer has made, if anything."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
