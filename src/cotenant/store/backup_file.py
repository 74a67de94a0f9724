"""What a store holds, in a file and back: backups, and the way from one store to another.

The file is gzip over lines of JSON: a head (`revision`, `keys`), one line for each key (`k`, and `v` in base64), and a
tail with the SHA-256 of all that stands between. Nothing is written into a store before the whole file was read and
agrees with its tail.
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
from cotenant.store.revision_offset import BASE, FILLING, OWN, REVISION_MAX, ShiftedStore, base_of, is_of_one_process
from cotenant.store.sqlite import SqliteStore
from cotenant.store.witness import Identity, Memory

FORMAT = 1
OPERATIONS_MAX = 100  # etcd takes 128 in a transaction unless told otherwise
BYTES_MAX = 512 * 1024
AHEAD = 1_000_000_000  # revisions: more than were ever committed between a backup and the day on which it is needed
TOLD_LENGTH_MAX = 80  # of a key
KEPT = frozenset({FILLING, IDENTITY, PROGRESS, STOPPED, ERAS})  # until the end, when all are written anew
LEADERS = "/leader"  # keys that end so are under a lease, and nobody's in another store

Progress = Callable[[int, int], None]  # keys done, keys in all
Leads = Callable[[Entry], bool]  # whether a leadership key is that of a process which leads now


class BadBackup(ValueError):
    """The file is no backup, or not whole; the message says what is wrong, and where."""


class NotEmpty(Exception):
    """The store that was to be filled holds something."""


class InUse(Exception):
    """Services run on the store that was to be filled."""


@dataclass(frozen=True, slots=True)
class Contents:
    """All keys of a store at one revision."""

    revision: int
    entries: tuple[tuple[str, bytes], ...]
    store_id: str = ""  # of the store that was read; "" where it had none
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
    """Read all that a store holds, at one revision, but for who leads."""
    listing = await store.list("")
    kept = ((entry.key, entry.value) for entry in listing.entries if not entry.key.endswith(LEADERS))
    raw = store.inner if isinstance(store, ShiftedStore) else store
    identity = identity_of(await raw.get(IDENTITY))
    named = (identity.id, identity.generation) if identity else ("", 0)
    return Contents(listing.revision, tuple(kept), *named)


def identity_of(entry: Entry | None) -> Identity | None:
    """Read the identity of a store; None where it has none."""
    return Identity.decode(entry.value) if entry else None


def write_file(contents: Contents, path: Path) -> None:
    """Write a backup, whole or not at all; only its owner can read it.

    Raises:
        OSError: it cannot be written there.
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
        OSError: it cannot be read.
        BadBackup: it is none, or not whole.
    """
    try:
        with gzip.open(path, "rb") as file:
            lines = [_object(line, number) for number, line in enumerate(file, 1)]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadBackup(f"{path} is no backup, or was cut off: {error}") from None
    head, tail = (lines[0], lines[-1]) if len(lines) > 1 else ({}, {})
    if head.get("cotenant_backup") != FORMAT:
        found = head.get("cotenant_backup")
        raise BadBackup(f"{path}: line 1 is not the head of a backup of format {FORMAT}; it says {found!r}")
    try:
        entries = tuple((str(line["k"]), base64.b64decode(line["v"], validate=True)) for line in lines[1:-1])
        named = str(head.get("store", "")), int(head.get("generation", 0))
        contents = Contents(int(head["revision"]), entries, *named)
        digest = contents.digest
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadBackup(f"{path}: a line between the first and the last is no key and value: {error}") from None
    if (head.get("keys"), tail.get("sha256")) != (len(entries), digest):
        raise BadBackup(f"{path} is not whole: {len(entries)} keys of {head.get('keys')}, or another digest")
    return contents


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadBackup(f"line {number} is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise BadBackup(f"line {number} is no JSON object")
    return read


async def fill(
    store: ShiftedStore,
    contents: Contents,
    *,
    replace: bool = False,
    leads: Leads = lambda entry: True,
    progress: Progress = lambda done, all_: None,
    known: Sequence[Memory] = (),
) -> int:
    """Put contents into a store that nobody uses, and return the revision from which it goes on.

    It gets an identity that is accepted by all that knew the store, the one that was read, or those in `known`.

    Whoever opens the store before the end is told that it is not whole. Where this is cut off, it is to be done again,
    with `replace`.

    Raises:
        NotEmpty: the store holds something, and is not to be replaced.
        InUse: a service leads there.
        BadBackup: the contents are none that a store has, and nothing was done; or what is in the store afterwards is
            not what was to be.
        StoreUnavailable: it does not answer; it may be half filled then.
    """
    _check(contents)
    inner = store.inner
    there = await inner.list("")
    leaders = [entry.key for entry in there.entries if entry.key.endswith(LEADERS) and leads(entry)]
    if leaders and not is_of_one_process(inner):
        raise InUse(f"services run on this store ({', '.join(leaders)}); stop them first")
    old = [entry.key for entry in there.entries if entry.key not in KEPT]
    if old and not replace:
        raise NotEmpty(f"the store holds {len(old)} keys already; --replace removes them")
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
        raise BadBackup(f"the store holds {len(found.entries)} keys that are not the {len(contents.entries)} written")
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


def _successor(there: Identity | None, contents: Contents, known: Sequence[Memory]) -> Identity:
    """Return the identity of a store that was filled: the next generation of it, or of the one that was read."""
    first = there or Identity.new(0.0)
    if there is None and contents.store_id:
        first = replace(first, id=contents.store_id)
    others = [contents.store_id, *(one.id for one in known)]
    generation = max([contents.generation, *(one.generation for one in known)])
    return first.accepted(time.time(), others, generation)


def _check(contents: Contents) -> None:
    """Refuse what no store had, before anything is done: a digest says only that a file is as it was written."""
    if not 0 <= contents.revision <= REVISION_MAX - AHEAD:
        raise BadBackup(f"a store is never at revision {contents.revision}")
    if twice := [key for key, count in Counter(key for key, _ in contents.entries).items() if count > 1]:
        raise BadBackup(f"the key {twice[0]!r} is there more than once")
    for key, value in contents.entries:
        if key.startswith(OWN) or key.endswith(LEADERS):
            raise BadBackup(f"{key!r} belongs to one store, and is in no backup")
        try:
            check_key(key)
            check_value(key, value)
        except (ValueError, TypeError) as error:
            raise BadBackup(f"{key[:TOLD_LENGTH_MAX]!r} cannot be kept: {error}") from None


def _batches(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Divide operations into transactions that every store takes."""
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
