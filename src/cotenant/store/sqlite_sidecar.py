"""The file beside an SQLite store with the last committed revision, so that a lost WAL is noticed.

SQLite accepts a database without its write-ahead log, with a truncated log, or an older copy as complete: nothing in
the file says otherwise. So each commit is noted here, after COMMIT has returned and before it is acknowledged.

Order and durability. The note is written after the commit and never before it, so it is never ahead of the database,
whatever is killed or cut off at any time: no false alarm. It is written before the commit is acknowledged, so after the
death of the process it covers everything that was acknowledged. It reaches the disk at most `SYNC_SECONDS` later: a
second fsync in each commit would cost about as much as the first. So only a power cut together with the loss of the log
can hide the commits of that last moment.

There are two slots, written alternately, each with a checksum: a torn write leaves the other one intact. A slot also
has a digest of what the revision changed, to distinguish another history of the same length.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cotenant.store.keyspace import Keyspace
from cotenant.store.port import Changes
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

SYNC_SECONDS = 0.5
MAGIC = b"CotnSeen"
DIGEST_BYTES = 16
SLOT = struct.Struct(f"<8sQQ{DIGEST_BYTES}s")  # magic, number of the note, revision, digest
CHECKSUM = struct.Struct("<I")
SLOT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Note:
    """A noted commit. An empty digest is not compared."""

    count: int
    revision: int
    digest: bytes


class Sidecar:
    """The open sidecar. If it cannot be opened or written, that is logged, and the store runs without this check."""

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(f"{store.name}-witness")
        self.noted: Note | None = None
        self.dirty = False
        self._failed = False
        self._file = -1
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.noted = newest_note(os.pread(self._file, 2 * SLOT_BYTES, 0))
        except OSError as error:
            self._fail(error)

    def regression(self, keyspace: Keyspace) -> str:
        """Return how the store is older than what was committed, or another one; "" if it is neither."""
        noted = self.noted
        if noted is None:
            return ""
        if keyspace.revision < noted.revision:
            return (
                f"the file holds revision {keyspace.revision}, but revision {noted.revision} was committed: its "
                "write-ahead log (-wal) is lost or truncated, or the file is an older copy"
            )
        after = keyspace.since(noted.revision - 1) if noted.revision - 1 >= keyspace.compacted else ()
        compared = noted.digest.strip(b"\0") and after and after[0].revision == noted.revision
        if compared and digest_of(after[0]) != noted.digest:
            return f"revision {noted.revision} of the file is not the one that was committed: it is another store"
        return ""

    def note(self, revision: int, changes: Changes | None) -> None:
        """Note a commit. The note survives the process at once, and the machine after `sync`."""
        count = self.noted.count + 1 if self.noted else 1
        digest = digest_of(changes) if changes else bytes(DIGEST_BYTES)
        self.noted = Note(count, revision, digest)
        try:
            os.pwrite(self._file, packed(self.noted), count % 2 * SLOT_BYTES)
            self.dirty = True
            self._failed = False
        except OSError as error:
            self._fail(error)

    def sync(self) -> None:
        """Sync the notes to disk."""
        if self._file < 0:
            return
        self.dirty = False
        try:
            os.fdatasync(self._file)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            if self.dirty:
                self.sync()
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            log.warning("store_witness_write_failed", path=str(self.path), error=str(error))
        self._failed = True


def digest_of(changes: Changes) -> bytes:
    """Return the digest of what a revision changed."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for change in changes.changes:
        key = change.key.encode()
        digest.update(struct.pack("<QQ?", len(key), len(change.value or b""), change.value is None))
        digest.update(key)
        digest.update(change.value or b"")
    return digest.digest()


def packed(note: Note) -> bytes:
    """Return a slot with its checksum.

    >>> newest_note(packed(Note(3, 40, b"0123456789abcdef")))
    Note(count=3, revision=40, digest=b'0123456789abcdef')
    """
    slot = SLOT.pack(MAGIC, note.count, note.revision, note.digest)
    return (slot + CHECKSUM.pack(zlib.crc32(slot))).ljust(SLOT_BYTES, b"\0")


def newest_note(content: bytes) -> Note | None:
    """Return the newest intact note of a file; None if there is none."""
    found = []
    for start in (0, SLOT_BYTES):
        slot = content[start : start + SLOT.size]
        rest = content[start + SLOT.size : start + SLOT.size + CHECKSUM.size]
        if len(slot) < SLOT.size or len(rest) < CHECKSUM.size or CHECKSUM.unpack(rest)[0] != zlib.crc32(slot):
            continue
        magic, count, revision, digest = SLOT.unpack(slot)
        if magic == MAGIC:
            found.append(Note(count, revision, digest))
    return max(found, key=lambda note: note.count, default=None)
