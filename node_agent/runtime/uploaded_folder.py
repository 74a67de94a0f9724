"""Builds the working directories of jobs from uploaded folders, with a cache of chunks on the node.

A file is always a copy: jobs write into their folders, so none may share its files with the cache or with another job.
The cache keeps the most recently used chunks. Its directory is private to the agent, and each chunk is compared with
its digest when it is used.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.folders.chunk_files import ChunkFiles
from cotenant.folders.content import DIRECTORY, FILE, BadFolder, chunk_sizes, digest_of, folder_id, read_page
from cotenant.v1.folder_service_pb2 import FolderEntry

log = structlog.get_logger()

CACHE = "chunks"  # below the agent's state directory
FETCHED_AT_ONCE_MAX = 256  # chunks of one call


class ChunkSource(Protocol):
    """Where the chunks of a job's folder come from."""

    def read(self, assignment: agent_pb2.Assignment, digests: Sequence[bytes]) -> AsyncIterator[bytes]:
        """Yield these chunks of the job's folder, in order; without digests, its pages.

        Raises:
            CannotFetch: the queue does not have them, or is out of reach for too long.
        """


class CannotFetch(Exception):
    """The folder cannot be fetched."""


class FetchStopped(Exception):
    """The attempt was stopped meanwhile."""


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    """A folder whose chunks are in the cache."""

    entries: Sequence[FolderEntry]
    digests: frozenset[bytes]

    @property
    def size_bytes(self) -> int:
        """The bytes of its files."""
        return sum(entry.size_bytes for entry in self.entries)


class UploadedFolders:
    """The cache of one node, and what it does for attempts."""

    def __init__(self, state_dir: Path, source: ChunkSource, bytes_max: int) -> None:
        self._chunks = ChunkFiles(state_dir / CACHE, durable=False)
        self._source, self._bytes_max = source, bytes_max
        self._pinned: Counter[bytes] = Counter()  # chunks of folders that are being fetched or built
        self._lock = threading.Lock()
        self._opened = False

    async def fetch(
        self, assignment: agent_pb2.Assignment, stop_asked: asyncio.Event, show: Callable[[int, int], None]
    ) -> FetchedFolder:
        """Fetch what the cache lacks of a job's folder; `show` gets the fetched bytes, and those to fetch.

        The chunks stay until `release`.

        Raises:
            CannotFetch: the folder cannot be fetched.
            FetchStopped: the attempt was stopped.
            OSError: the disk refuses.
        """
        if not self._opened:
            await asyncio.to_thread(self._chunks.open)
            self._opened = True
        entries = await self._entries(assignment, stop_asked)
        sizes = {
            digest: size
            for entry in entries
            for digest, size in zip(entry.chunks, chunk_sizes(entry.size_bytes), strict=True)
        }
        folder = FetchedFolder(entries, frozenset(sizes))
        with self._lock:
            self._pinned.update(folder.digests)
        try:
            missing = await asyncio.to_thread(lambda: [digest for digest in sizes if not self._chunks.use(digest)])
            total = sum(sizes[digest] for digest in missing)
            await asyncio.to_thread(self._check_disk, total + folder.size_bytes)
            done = 0
            for start in range(0, len(missing), FETCHED_AT_ONCE_MAX):
                async for size in self._some(assignment, missing[start : start + FETCHED_AT_ONCE_MAX]):
                    if stop_asked.is_set():
                        raise FetchStopped
                    show(done := done + size, total)
        except BaseException:
            self.release(folder)
            raise
        return folder

    async def _entries(self, assignment: agent_pb2.Assignment, stop_asked: asyncio.Event) -> list[FolderEntry]:
        pages: list[bytes] = []
        async for page in self._source.read(assignment, ()):
            if stop_asked.is_set():
                raise FetchStopped
            pages.append(page)
        if folder_id(map(digest_of, pages)) != assignment.spec.upload:
            raise CannotFetch("the queue has sent the list of another folder")
        try:
            return [entry for page in pages for entry in read_page(page)]
        except BadFolder as error:
            raise CannotFetch(f"the list of the folder is invalid: {error}") from None

    async def _some(self, assignment: agent_pb2.Assignment, wanted: Sequence[bytes]) -> AsyncIterator[int]:
        """Fetch some chunks, and yield the size of each."""
        place = 0
        async for data in self._source.read(assignment, wanted):
            written, _ = await asyncio.to_thread(self._chunks.write, data)
            if place >= len(wanted) or written != wanted[place]:
                raise CannotFetch("the queue has sent another chunk than the one asked for")
            place += 1
            yield len(data)
        if place < len(wanted):
            raise CannotFetch(f"the queue has sent {place} of {len(wanted)} chunks")

    def _check_disk(self, size: int) -> None:
        free = shutil.disk_usage(self._chunks.root).free
        if size > free:
            raise OSError(errno.ENOSPC, f"the uploaded folder needs {size:,} bytes, and the disk has {free:,}")

    def build(
        self, folder: FetchedFolder, work: Path, owner: tuple[int, int] | None, stopped: Callable[[], bool]
    ) -> None:
        """Copy a folder into an empty working directory that only the agent can enter so far. Blocks.

        Raises:
            FetchStopped: the attempt was stopped.
            ChunkDamaged: a chunk in the cache was damaged, and is removed.
            OSError: the disk refuses.
        """
        root = os.fsencode(work)
        for entry in folder.entries:
            if stopped():
                raise FetchStopped
            path = os.path.join(root, entry.path)
            if entry.kind == DIRECTORY:
                os.mkdir(path, 0o700)
            elif entry.kind == FILE:
                self._build_file(path, entry)
            else:
                os.symlink(entry.link_target, path)
        for entry in reversed(folder.entries):  # what is in a directory before the directory itself
            path = os.path.join(root, entry.path)
            if owner is not None:
                os.chown(path, *owner, follow_symlinks=False)
            if entry.kind == DIRECTORY:
                os.chmod(path, entry.mode)

    def _build_file(self, path: bytes, entry: FolderEntry) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.writelines(self._chunks.read(digest) for digest in entry.chunks)
            os.fchmod(file.fileno(), entry.mode)

    def release(self, folder: FetchedFolder) -> None:
        """Allow the cache to remove a folder's chunks."""
        with self._lock:
            self._pinned.subtract(folder.digests)
            self._pinned += Counter()  # drops what is not pinned

    def shrink(self) -> int:
        """Remove the least recently used chunks beyond the cache's size; return the removed bytes. Blocks."""
        known = sorted(self._chunks.all(), key=lambda chunk: chunk.used)
        over, removed = sum(chunk.size_bytes for chunk in known) - self._bytes_max, 0
        with self._lock:
            for chunk in known:
                if removed >= over:
                    break
                if chunk.digest not in self._pinned:
                    self._chunks.remove(chunk.digest)
                    removed += chunk.size_bytes
        return removed

    @contextmanager
    def released(self, folder: FetchedFolder) -> Iterator[None]:
        """Release a folder at the end."""
        try:
            yield
        finally:
            self.release(folder)


class FetchProgress:
    """Tells at times how much of an attempt's folder, or image, is there, once that takes more than a moment.

    `tell` gets a phrase for the job's user, and "" at the end if it had one.
    """

    def __init__(
        self,
        attempt: str,
        event: str = "folder_fetching",
        *,
        first_seconds: float = 2.0,
        seconds: float = 5.0,
        doing: str = "fetching its folder",
        tell: Callable[[str], None] = lambda phrase: None,
    ) -> None:
        self._attempt, self._event, self._seconds = attempt, event, seconds
        self._doing, self._tell, self._told = doing, tell, False
        self._due = time.monotonic() + first_seconds

    def __call__(self, done: int, total: int) -> None:
        """Tell how much was fetched, if it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            log.info(self._event, attempt=self._attempt, bytes=done, of=total)
            self._told = True
            self._tell(f"{self._doing}: {in_words(done, total)}")

    def __enter__(self) -> FetchProgress:
        return self

    def __exit__(self, *error: object) -> None:
        """Take the last phrase back."""
        if self._told:
            self._tell("")


def in_words(done: int, total: int) -> str:
    """Return how much of some bytes is there.

    >>> in_words(1_234_000_000, 3_400_000_000), in_words(1_000, 2_500_000)
    ('1.2 of 3.4 GB', '0.0 of 2.5 MB')
    """
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"
