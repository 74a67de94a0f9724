"""Chunks on disk, one file each, named by their SHA-256.

A chunk is written to a temporary file, which gets its name only once it is complete: a crash leaves no half chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from cotenant.folders.content import DIGEST_BYTES, digest_of

TEMPORARY = "tmp"


class ChunkDamaged(Exception):
    """A chunk's file no longer had its content, and was removed."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk's file. `used` is when it was last written or asked for, in seconds since 1970."""

    digest: bytes
    size_bytes: int
    used: float


class ChunkFiles:
    """The chunks below one directory. `durable` chunks are flushed to disk. All methods block."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self.root, self._durable = root, durable

    def open(self) -> None:
        """Make the directory, and remove what a crash has left half written."""
        (self.root / TEMPORARY).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.root / TEMPORARY).iterdir():
            path.unlink(missing_ok=True)

    def path(self, digest: bytes) -> Path:
        """Return where a chunk is, or would be."""
        name = digest.hex()
        return self.root / name[:2] / name

    def size(self, digest: bytes) -> int | None:
        """Return the size of a chunk; None if it is missing."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def use(self, digest: bytes) -> bool:
        """Return whether a chunk is here, and record that it is used now."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    def write(self, data: bytes) -> tuple[bytes, bool]:
        """Write a chunk; return its digest, and whether it is new here. Raises `OSError`."""
        digest = digest_of(data)
        return digest, bool(self.write_all([data]))

    def write_all(self, chunks: Iterable[bytes]) -> int:
        """Write chunks; return how many bytes of them are new here. Raises `OSError`.

        All are written before the first is flushed, so that the file system flushes them together.
        """
        written: dict[bytes, tuple[Path, int]] = {}
        with ExitStack() as undo:
            for data in chunks:
                digest = digest_of(data)
                if digest not in written and not self.use(digest):
                    temporary = self.root / TEMPORARY / os.urandom(16).hex()
                    undo.callback(temporary.unlink, missing_ok=True)
                    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                        file.write(data)
                    written[digest] = temporary, len(data)
            if self._durable:
                for temporary, _ in written.values():
                    flush(temporary)
            return sum(size for digest, (temporary, size) in written.items() if self._name(temporary, digest))

    def _name(self, temporary: Path, digest: bytes) -> bool:
        """Rename a complete temporary file to its digest; return whether the chunk is new."""
        target = self.path(digest)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.link(temporary, target)
        except FileExistsError:  # somebody else has written it meanwhile
            return False
        return True

    def flush_names(self, digests: Iterator[bytes]) -> None:
        """Flush the directories that have these chunks' names to disk. Raises `OSError`."""
        for place in sorted({self.path(digest).parent for digest in digests}):
            flush(place)

    def read(self, digest: bytes) -> bytes:
        """Return a chunk.

        Raises:
            FileNotFoundError: it is missing.
            ChunkDamaged: it was damaged.
        """
        data = self.path(digest).read_bytes()
        if digest_of(data) != digest:
            self.remove(digest)
            raise ChunkDamaged(f"chunk {digest.hex()} was damaged on disk")
        return data

    def remove(self, digest: bytes) -> None:
        """Remove a chunk, if it is here."""
        self.path(digest).unlink(missing_ok=True)

    def all(self) -> Iterator[StoredChunk]:
        """Yield all chunks."""
        with suppress(FileNotFoundError), os.scandir(self.root) as places:
            for place in places:
                if len(place.name) != 2 or not place.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(place.path) as files:
                    for file in files:
                        if len(file.name) == 2 * DIGEST_BYTES:
                            with suppress(FileNotFoundError, ValueError):
                                found = file.stat(follow_symlinks=False)
                                yield StoredChunk(bytes.fromhex(file.name), found.st_size, found.st_mtime)


def flush(path: Path) -> None:
    """Flush a file, or a directory's names, to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
