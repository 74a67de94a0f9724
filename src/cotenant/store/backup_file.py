"""Backup files: writes the contents of a store into a file, and restores them into a store.

The file is gzip over lines of JSON: a header (`revision`, `keys`), one line for each key (`k`, and `v` in base64), and
a trailer with the SHA-256 of everything in between. Nothing is written into a store before the whole file was read and
matches its trailer.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from cotenant import fail_points
from cotenant.store.argument_checks import check_key, check_value
from cotenant.store.eras import ERAS, begun
from cotenant.store.identity_check import IDENTITY, PROGRESS, STOPPED
from cotenant.store.port import Conflict, Delete, Entry, Operation, Put, Store
from cotenant.store.revision_offset import BASE, FILLING, OWN, REVISION_MAX, OffsetStore, base_of, is_of_one_process
from cotenant.store.sqlite import SqliteStore
from cotenant.store.witness import Identity, RememberedStore

FORMAT = 1
OPERATIONS_MAX = 100  # etcd's default limit per transaction is 128
BYTES_MAX = 512 * 1024
AHEAD = 1_000_000_000  # revisions: more than are committed between a backup and its restore
QUOTED_LENGTH_MAX = 80  # of a key
KEPT = frozenset({FILLING, IDENTITY, PROGRESS, STOPPED, ERAS})  # kept until the end, then rewritten
LEADERS = "/leader"  # such keys are under a lease, and invalid in another store

Progress = Callable[[int, int], None]  # keys done, total keys
OnLeader = Callable[[Entry], bool]  # whether a leader key belongs to a current leader


class BadBackup(ValueError):
    """The file is not a complete backup; the message says what is wrong, and where."""


class NotEmpty(Exception):
    """The store to restore into is not empty."""


class InUse(Exception):
    """Services run on the store to restore into."""


@dataclass(frozen=True, slots=True)
class Contents:
    """All keys of a store at one revision."""

    revision: int
    entries: tuple[tuple[str, bytes], ...]
    store_id: str = ""  # of the store that was read; "" if it had none
    generation: int = 0

    @property
    def digest(self) -> str:
        """The SHA-256 over all keys and values."""
        digest = hashlib.sha256()
        for key, value in self.entries:
            for part in (key.encode(), value):
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


async def read_store(store: Store) -> Contents:
    """Return the contents of a store at one revision, without leader keys."""
    listing = await store.list("")
    kept = ((entry.key, entry.value) for entry in listing.entries if not entry.key.endswith(LEADERS))
    raw = store.inner if isinstance(store, OffsetStore) else store
    identity = identity_of(await raw.get(IDENTITY))
    named = (identity.id, identity.generation) if identity else ("", 0)
    return Contents(listing.revision, tuple(kept), *named)


def identity_of(entry: Entry | None) -> Identity | None:
    """Return the identity of a store; None if it has none."""
    return Identity.decode(entry.value) if entry else None


def write_file(contents: Contents, path: Path) -> None:
    """Write a backup atomically; only its owner can read it.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            for line in _lines(contents):
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.close()
            raw.flush()
            os.fsync(raw.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def _lines(contents: Contents) -> Iterator[dict[str, Any]]:
    head = {"cotenant_backup": FORMAT, "revision": contents.revision, "keys": len(contents.entries)}
    yield head | ({"store": contents.store_id, "generation": contents.generation} if contents.store_id else {})
    for key, value in contents.entries:
        yield {"k": key, "v": base64.b64encode(value).decode()}
    yield {"sha256": contents.digest}


def read_file(path: Path) -> Contents:
    """Read a backup.

    Raises:
        OSError: the file cannot be read.
        BadBackup: it is not a complete backup.
    """
    try:
        with gzip.open(path, "rb") as file:
            lines = [_object(line, number) for number, line in enumerate(file, 1)]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadBackup(f"{path} is not a backup, or is truncated: {error}") from None
    head, tail = (lines[0], lines[-1]) if len(lines) > 1 else ({}, {})
    if head.get("cotenant_backup") != FORMAT:
        found = head.get("cotenant_backup")
        raise BadBackup(f"{path}: line 1 is not the header of a backup of format {FORMAT}; its format is {found!r}")
    try:
        entries = tuple((str(line["k"]), base64.b64decode(line["v"], validate=True)) for line in lines[1:-1])
        named = str(head.get("store", "")), int(head.get("generation", 0))
        contents = Contents(int(head["revision"]), entries, *named)
        digest = contents.digest
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadBackup(f"{path}: a line between header and trailer is not a key and value: {error}") from None
    if (head.get("keys"), tail.get("sha256")) != (len(entries), digest):
        raise BadBackup(f"{path} is incomplete: {len(entries)} keys of {head.get('keys')}, or a different digest")
    return contents


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadBackup(f"line {number} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise BadBackup(f"line {number} is not a JSON object")
    return read


async def restore_entries(
    store: OffsetStore,
    contents: Contents,
    *,
    replace: bool = False,
    leads: OnLeader = lambda entry: True,
    progress: Progress = lambda done, all_: None,
    known: Sequence[RememberedStore] = (),
) -> int:
    """Restore contents into a store that is not in use, and return the revision from which it continues.

    The store gets an identity that every process accepts that knew this store, the store that was read, or those in
    `known`.

    A process that opens the store before the end gets an error that it is incomplete. If the restore is interrupted, it
    must be repeated with `replace`.

    Raises:
        NotEmpty: the store is not empty, and `replace` is not set.
        InUse: a service leads there.
        BadBackup: the contents are not valid, and nothing was written; or the store does not hold them afterwards.
        StoreUnavailable: the store does not answer; it may be partly restored.
    """
    _check(contents)
    inner = store.inner
    there = await inner.list("")
    leaders = [entry.key for entry in there.entries if entry.key.endswith(LEADERS) and leads(entry)]
    if leaders and not is_of_one_process(inner):
        raise InUse(f"services run on this store ({', '.join(leaders)}); stop them first")
    old = [entry.key for entry in there.entries if entry.key not in KEPT]
    if old and not replace:
        raise NotEmpty(f"the store already holds {len(old)} keys; --replace removes them")
    own = {entry.key: entry for entry in there.entries if entry.key.startswith(OWN)}
    base = base_of(own.get(BASE)) or 0
    seen = [contents.revision, base + there.revision, *(one.revision for one in known)]
    goes_on = min(max(seen), REVISION_MAX - AHEAD) + AHEAD
    identity = _successor(identity_of(own.get(IDENTITY)), contents, known)
    await _done(inner, [Put(FILLING, b"")])
    total, done = len(old) + len(contents.entries), 0
    removed, put = [Delete(key) for key in old], [Put(*entry) for entry in contents.entries]
    for batch in chain(_batches(removed), _batches(put)):
        await _done(inner, batch)
        await fail_points.reach("restore.filling")
        done += len(batch)
        progress(done, total)
    written = await inner.list("")
    found = Contents(0, tuple((one.key, one.value) for one in written.entries if not one.key.startswith(OWN)))
    if found.digest != Contents(0, tuple(sorted(contents.entries))).digest:
        raise BadBackup(f"the {len(found.entries)} keys in the store differ from the {len(contents.entries)} written")
    await fail_points.reach("restore.filled")
    await _done(
        inner,
        [
            Put(BASE, str(goes_on).encode()),
            Put(IDENTITY, identity.encode()),
            Put(PROGRESS, b""),
            Put(ERAS, begun((), 0)[1]),
            Delete(STOPPED),
            Delete(FILLING),
        ],
    )
    if isinstance(inner, SqliteStore):
        await inner.accept()
    return goes_on


def _successor(there: Identity | None, contents: Contents, known: Sequence[RememberedStore]) -> Identity:
    """Return the identity of a restored store: the next generation of its own, or of the store that was read."""
    first = there or Identity.new(0.0)
    if there is None and contents.store_id:
        first = replace(first, id=contents.store_id)
    others = [contents.store_id, *(one.id for one in known)]
    generation = max([contents.generation, *(one.generation for one in known)])
    return first.accepted(time.time(), others, generation)


def _check(contents: Contents) -> None:
    """Reject invalid contents before anything is written: a digest proves only that the file is unchanged."""
    if not 0 <= contents.revision <= REVISION_MAX - AHEAD:
        raise BadBackup(f"invalid revision {contents.revision}")
    if twice := [key for key, count in Counter(key for key, _ in contents.entries).items() if count > 1]:
        raise BadBackup(f"the key {twice[0]!r} occurs more than once")
    for key, value in contents.entries:
        if key.startswith(OWN) or key.endswith(LEADERS):
            raise BadBackup(f"{key!r} belongs to a single store and cannot be in a backup")
        try:
            check_key(key)
            check_value(key, value)
        except (ValueError, TypeError) as error:
            raise BadBackup(f"{key[:QUOTED_LENGTH_MAX]!r} cannot be stored: {error}") from None


def _batches(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Divide operations into transactions that every store accepts."""
    batch: list[Operation] = []
    size = 0
    for operation in operations:
        weight = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        if batch and (len(batch) == OPERATIONS_MAX or size + weight > BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(operation)
        size += weight
    if batch:
        yield batch


async def _done(store: Store, operations: Sequence[Operation]) -> None:
    result = await store.transact([], operations)
    assert not isinstance(result, Conflict), "nothing was compared"
