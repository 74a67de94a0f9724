"""The folders that tenants have uploaded: chunks and lists of pages, below one directory, apart for each tenant.

<tenant>/chunks/<2 digits>/<digest>    a chunk of a file, or a page of a folder's list
<tenant>/folders/<id>                  a committed folder: counts, and the digests of its pages

Several processes may use the directory, also over a network file system: a file gets its name only once it is complete,
and is never changed. All methods block, and may be called from several threads.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from cotenant.codec import errors
from cotenant.core.model.field_limits import is_id
from cotenant.core.model.validation import Violation, shown
from cotenant.folders.chunk_files import TEMPORARY, ChunkDamaged, ChunkFiles
from cotenant.folders.content import (
    DIGEST_BYTES,
    DIRECTORY,
    ENTRIES_MAX,
    FILE,
    FOLDER_BYTES_MAX,
    BadFolder,
    chunk_sizes,
    folder_id,
    is_folder_id,
    read_page,
)
from cotenant.v1.folder_service_pb2 import Folder, FolderEntry

log = structlog.get_logger()

QUOTA_BYTES = 50 * 2**30
KEPT_SECONDS = 7 * 86_400.0
UNCOMMITTED_SECONDS = 86_400.0  # chunks of an upload that was cut off are kept for so long, so that it can resume
FREE_BYTES_MIN = 2**30  # of the disk, which may also hold the store


@dataclass(frozen=True, slots=True)
class FolderRules:
    """Where uploaded folders are kept, how much, and how long after their last use; None: nowhere."""

    directory: Path | None = None
    quota_bytes: int = QUOTA_BYTES  # of a tenant
    kept_seconds: float = KEPT_SECONDS


NO_FOLDERS = FolderRules()


@dataclass(frozen=True, slots=True)
class FolderRecord:
    """A committed folder as it is on disk."""

    id: str
    entry_count: int
    size_bytes: int
    pages: tuple[str, ...]  # digests

    def to_wire(self) -> Folder:
        """Return the message."""
        return Folder(id=self.id, entry_count=self.entry_count, size_bytes=self.size_bytes)

    @property
    def page_digests(self) -> list[bytes]:
        """The digests of its pages."""
        return [bytes.fromhex(page) for page in self.pages]


class ChunksMissing(Exception):
    """Chunks of a folder are not here."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} chunks are missing")
        self.count = count


class FolderStore:
    """The folders of all tenants."""

    def __init__(self, rules: FolderRules) -> None:
        self.rules = rules
        self._tenants: dict[str, _TenantFolders] = {}
        self._lock = threading.Lock()

    def of(self, tenant: str) -> _TenantFolders:
        """Return a tenant's folders.

        Raises:
            Problem: the mesh keeps no folders, or this is not the id of a tenant.
        """
        if self.rules.directory is None:
            raise errors.failed_precondition("NO_UPLOADS", "this mesh keeps no uploaded folders")
        if not is_id(tenant):
            raise errors.invalid([Violation("tenant", f"is not the id of a tenant: {shown(tenant)}")])
        with self._lock:
            if tenant not in self._tenants:
                self._tenants[tenant] = _TenantFolders(self.rules.directory / tenant, self.rules)
            return self._tenants[tenant]

    def collect(self, used: Collection[tuple[str, str]], now: float) -> int:
        """Remove what no job needs: `used` has the tenant and id of each needed folder. Return the removed bytes."""
        removed, root = 0, self.rules.directory
        if root is None or not root.is_dir():
            return 0
        for path in sorted(root.iterdir()):
            if is_id(path.name) and path.is_dir():
                needed = {folder for tenant, folder in used if tenant == path.name}
                removed += self.of(path.name).collect(needed, now)
        return removed


class _TenantFolders:
    """One tenant's folders."""

    def __init__(self, root: Path, rules: FolderRules) -> None:
        self._root, self._rules = root, rules
        self._chunks = ChunkFiles(root / "chunks", durable=True)
        self._folders = root / "folders"
        self._lock = threading.Lock()
        self._used_bytes: int | None = None  # None until counted

    @property
    def free_bytes(self) -> int:
        """How many bytes the tenant may still upload."""
        return max(0, self._rules.quota_bytes - self._count())

    def _count(self) -> int:
        with self._lock:
            if self._used_bytes is None:
                self._folders.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._chunks.open()
                self._used_bytes = sum(chunk.size_bytes for chunk in self._chunks.all())
            return self._used_bytes

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the missing ones of these chunks; the others count as just used."""
        self._count()
        return [digest for digest in dict.fromkeys(digests) if not self._chunks.use(digest)]

    def write(self, chunks: Sequence[bytes]) -> None:
        """Write chunks to disk.

        Raises:
            Problem: RESOURCE_EXHAUSTED: they exceed the tenant's quota, or the disk is full.
        """
        size = sum(map(len, chunks))
        self._reserve(size)
        written = 0
        try:
            written = self._chunks.write_all(chunks)
        except OSError as error:
            raise errors.exhausted("UPLOAD_DISK", f"the queue cannot write the upload: {error.strerror}") from error
        finally:
            with self._lock:
                self._used_bytes = (self._used_bytes or 0) - size + written

    def _reserve(self, size: int) -> None:
        self._count()
        quota = self._rules.quota_bytes
        with self._lock:
            used = self._used_bytes or 0
            if used + size > quota:
                raise errors.exhausted(
                    "UPLOAD_QUOTA",
                    f"tenant {self._root.name} has {used:,} bytes of uploads, of {quota:,} allowed",
                    remedy="name what the job does not need in .cotenantignore, or wait: an upload is removed "
                    f"{self._rules.kept_seconds / 86_400:g} days after its last job has ended",
                )
            if shutil.disk_usage(self._root).free - size < FREE_BYTES_MIN:
                raise errors.exhausted(
                    "UPLOAD_DISK", "the disk with the uploads is nearly full; an operator has to free some of it"
                )
            self._used_bytes = used + size

    def commit(self, pages: Sequence[bytes]) -> FolderRecord:
        """Make a folder of pages, all of whose chunks are here.

        Raises:
            ChunksMissing: they are not.
            BadFolder: these are not the pages of a folder.
        """
        known = self.find(identity := folder_id(pages))
        if known is not None and not self.missing(pages):
            return known
        entries, size, lacking, digests = 0, 0, 0, set(pages)
        for entry in self._entries(pages):
            entries, size = entries + 1, size + entry.size_bytes
            if entries > ENTRIES_MAX or size > FOLDER_BYTES_MAX:
                raise BadFolder(f"has more than {ENTRIES_MAX:,} entries or {FOLDER_BYTES_MAX:,} bytes")
            if entry.kind == FILE:
                lacking += self._lacking(entry)
                digests.update(entry.chunks)
        if lacking:
            raise ChunksMissing(lacking)
        self._chunks.flush_names(iter(digests))
        record = FolderRecord(identity, entries, size, tuple(page.hex() for page in pages))
        self._put(record)
        return record

    def _entries(self, pages: Sequence[bytes]) -> Iterator[FolderEntry]:
        """Yield the entries of pages, in order.

        Raises:
            ChunksMissing: a page is missing.
            BadFolder: an entry is invalid, or not behind its parent and the one before.
        """
        if missing := self.missing(pages):
            raise ChunksMissing(len(missing))
        before, directories = b"", {b""}
        for page in pages:
            for entry in read_page(self._chunks.read(page)):
                parent = entry.path.rpartition(b"/")[0]
                if entry.path.split(b"/") <= before.split(b"/") and before:
                    raise BadFolder("its entries are not sorted by path")
                if parent not in directories:
                    raise BadFolder("an entry has a parent that is not a directory of the folder")
                if entry.kind != FILE and (entry.size_bytes or entry.chunks):
                    raise BadFolder("an entry that is not a file has content")
                before = entry.path
                if entry.kind == DIRECTORY:
                    directories.add(entry.path)
                yield entry

    def _lacking(self, entry: FolderEntry) -> int:
        """Return how many chunks of a file are missing or have another size."""
        sizes = chunk_sizes(entry.size_bytes)
        return sum(self._chunks.size(digest) != size for digest, size in zip(entry.chunks, sizes, strict=True))

    def _put(self, record: FolderRecord) -> None:
        temporary = self._chunks.root / TEMPORARY / os.urandom(16).hex()
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._folders / record.id)
        descriptor = os.open(self._folders, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def find(self, identity: str) -> FolderRecord | None:
        """Return a committed folder, which then counts as just used; None if there is none."""
        if not is_folder_id(identity):
            return None
        path = self._folders / identity
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return self._read(path)

    def _read(self, path: Path) -> FolderRecord | None:
        try:
            told = json.loads(path.read_text())
            pages = tuple(str(page) for page in told["pages"])
            if any(len(bytes.fromhex(page)) != DIGEST_BYTES for page in pages):
                raise ValueError("a digest of another length")
            return FolderRecord(path.name, int(told["entry_count"]), int(told["size_bytes"]), pages)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.warning("folder_unreadable", folder=path.name, error=str(error))
            return None

    def read(self, digest: bytes) -> bytes:
        """Return a chunk.

        Raises:
            ChunksMissing: it is not here, or was damaged.
        """
        try:
            return self._chunks.read(digest)
        except (FileNotFoundError, ChunkDamaged):
            raise ChunksMissing(1) from None

    def forget(self, identity: str) -> None:
        """Forget a folder with missing chunks, so that the next upload completes it."""
        if is_folder_id(identity):
            (self._folders / identity).unlink(missing_ok=True)

    def collect(self, needed: Collection[str], now: float) -> int:
        """Remove folders that are neither needed nor recently used, then chunks of no folder; return the bytes."""
        self._count()
        kept: set[bytes] = set()
        for path in list(self._folders.iterdir()):
            record = self._read(path)
            if path.name not in needed and now - path.stat().st_mtime > self._rules.kept_seconds:
                path.unlink(missing_ok=True)
                log.info("folder_removed", tenant=self._root.name, folder=path.name)
            elif record is not None:
                kept.update(self._chunks_of(record))
        removed = 0
        for chunk in list(self._chunks.all()):
            if chunk.digest not in kept and now - chunk.used > UNCOMMITTED_SECONDS:
                self._chunks.remove(chunk.digest)
                removed += chunk.size_bytes
        with self._lock:
            self._used_bytes = max(0, (self._used_bytes or 0) - removed)
        return removed

    def _chunks_of(self, record: FolderRecord) -> Iterator[bytes]:
        for page in record.page_digests:
            yield page
            try:
                for entry in read_page(self._chunks.read(page)):
                    yield from entry.chunks
            except (FileNotFoundError, ChunkDamaged, BadFolder) as error:
                log.warning("folder_damaged", tenant=self._root.name, folder=record.id, error=str(error))
