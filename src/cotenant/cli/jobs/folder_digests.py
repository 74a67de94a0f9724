"""The digests of the files of a folder; those of files that have not changed are remembered between uploads.

A file is known to be unchanged by its size, times, inode and device, as in git's index. A file that was written shortly
before it was read may change again within the same tick of its clock, so it is read again the next time.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from cotenant.cli.jobs.folder_scan import FoundEntry, FoundFolder, shown
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.folders.content import CHUNK_BYTES, DIGEST_BYTES, FILE, chunk_count, digest_of

RACY_SECONDS = 2.0
READERS_MAX = 4
TRIES_MAX = 3  # of a file that changes while it is read
MEMORY_BYTES_MAX = 64 * 2**20
FORMAT = 1

Digests = tuple[bytes, ...]
Key = tuple[int, int, int, int, int]


def digests_of(folder: FoundFolder, memory: Path | None, show: Callable[[int, int], None]) -> list[Digests]:
    """Return the chunk digests of each entry; `show` gets the bytes that were read, and all to read.

    Raises:
        CommandError: a file cannot be read, or changes all the time.
    """
    known = _remembered(memory)
    results = [known.get(entry.path, (None, ()))[1] if _is_known(entry, known) else None for entry in folder.entries]
    unread = [number for number, found in enumerate(results) if found is None]
    total, done = sum(folder.entries[number].size_bytes for number in unread), 0
    began = time.time()
    with ThreadPoolExecutor(min(READERS_MAX, os.cpu_count() or 1)) as readers:
        tasks = readers.map(lambda number: _read(folder, folder.entries[number]), unread)
        for number, found in zip(unread, tasks, strict=True):
            results[number] = found
            show(done := done + folder.entries[number].size_bytes, total)
    digests = [found or () for found in results]
    if memory is not None and unread:
        _remember(memory, folder, digests, began)
    return digests


def _is_known(entry: FoundEntry, known: dict[bytes, tuple[Key, Digests]]) -> bool:
    if entry.kind != FILE or not entry.size_bytes:
        return True
    return entry.path in known and known[entry.path][0] == _key(entry.status)


def _key(found: os.stat_result) -> Key:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _read(folder: FoundFolder, entry: FoundEntry) -> Digests:
    """Return the digests of a file as it was when it was found."""
    path = os.path.join(folder.root, entry.path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
            for _ in range(TRIES_MAX):
                before = os.fstat(file.fileno())
                if not stat.S_ISREG(before.st_mode) or before.st_size != entry.size_bytes:
                    break
                found = tuple(iter_digests(file.fileno(), before.st_size))
                if _key(os.fstat(file.fileno())) == _key(before) and len(found) == chunk_count(entry.size_bytes):
                    return found
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise usage_error(f"--upload: {shown(entry.path)} cannot be read: {why}") from None
    raise changing(entry.path)


def changing(path: bytes) -> CommandError:
    """Return the error for a file that changes while it is uploaded."""
    return CommandError(
        f"--upload: {shown(path)} changes while it is read",
        hint="submit again once nothing writes it, or name it in .cotenantignore",
    )


def iter_digests(descriptor: int, size: int) -> Iterator[bytes]:
    """Yield the digest of each chunk of an open file."""
    for place in range(0, size, CHUNK_BYTES):
        yield digest_of(os.pread(descriptor, min(CHUNK_BYTES, size - place), place))


def read_chunk(root: bytes, path: bytes, place: int, size: int, digest: bytes) -> bytes:
    """Return a chunk of a file.

    Raises:
        CommandError: the file is not what it was when its digests were taken.
    """
    try:
        descriptor = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            data = os.pread(descriptor, size, place)
        finally:
            os.close(descriptor)
    except OSError:
        raise changing(path) from None
    if digest_of(data) != digest:
        raise changing(path)
    return data


def memory_of(folder: FoundFolder, home: Path) -> Path:
    """Return the file that remembers the digests of a folder's files."""
    return home / "cotenant" / f"folder-{sha256(folder.root).hexdigest()[:32]}.json"


def _remembered(memory: Path | None) -> dict[bytes, tuple[Key, Digests]]:
    """Return what is remembered, by path; nothing if it is missing or damaged."""
    if memory is None:
        return {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        if memory.stat().st_size <= MEMORY_BYTES_MAX:
            told = json.loads(memory.read_bytes())
            if told["format"] == FORMAT:
                return {os.fsencode(path): _row(row) for path, row in told["files"].items()}
    return {}


def _row(row: list[object]) -> tuple[Key, Digests]:
    *numbers, text = row
    size, modified, changed, inode, device = (int(str(number)) for number in numbers)
    packed = bytes.fromhex(str(text))
    digests = tuple(packed[place : place + DIGEST_BYTES] for place in range(0, len(packed), DIGEST_BYTES))
    if len(packed) % DIGEST_BYTES or len(digests) != chunk_count(size):
        raise ValueError("digests of another file")
    return (size, modified, changed, inode, device), digests


def _remember(memory: Path, folder: FoundFolder, digests: list[Digests], began: float) -> None:
    """Remember the digests of files that were not written just before they were read."""
    settled = int((began - RACY_SECONDS) * 1e9)
    files = {
        os.fsdecode(entry.path): [*_key(entry.status), b"".join(found).hex()]
        for entry, found in zip(folder.entries, digests, strict=True)
        if found and max(entry.status.st_mtime_ns, entry.status.st_ctime_ns) < settled
    }
    fresh = memory.with_name(f"{memory.name}.{os.getpid()}")
    with suppress(OSError):  # a full or read-only home only costs time
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"format": FORMAT, "files": files}))
        fresh.rename(memory)
