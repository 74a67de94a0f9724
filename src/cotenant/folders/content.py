r"""The content of an uploaded folder: files cut into chunks, entries cut into pages, both known by their SHA-256.

>>> entry = FolderEntry(path=b"a", kind=FILE, mode=0o644, size_bytes=2, chunks=[digest_of(b"hi")])
>>> [page] = pages_of([entry])
>>> read_page(page)[0].path, folder_id([digest_of(page)])[:12]
(b'a', '9265a4366050')
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError

from cotenant.v1.folder_service_pb2 import (
    FOLDER_ENTRY_KIND_DIRECTORY,
    FOLDER_ENTRY_KIND_FILE,
    FOLDER_ENTRY_KIND_LINK,
    FolderEntry,
    FolderPage,
)

FILE, DIRECTORY, LINK = FOLDER_ENTRY_KIND_FILE, FOLDER_ENTRY_KIND_DIRECTORY, FOLDER_ENTRY_KIND_LINK

CHUNK_BYTES = 960 * 2**10  # below the largest field that servers decode, with its header
PAGE_BYTES = 2**19
PAGES_MAX = 1_000
DIGEST_BYTES = 32
ENTRIES_MAX = 200_000  # of a folder
FOLDER_BYTES_MAX = 10 * 2**30  # of the files of a folder
PATH_BYTES_MAX, NAME_BYTES_MAX, DEPTH_MAX = 4096, 255, 128
MODE_MAX = 0o777


class BadFolder(ValueError):
    """A page or an entry that no folder has."""


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 of a chunk."""
    return hashlib.sha256(data).digest()


def folder_id(pages: Iterable[bytes]) -> str:
    """Return the id of the folder with these page digests."""
    return hashlib.sha256(b"".join(pages)).hexdigest()


def is_folder_id(text: str) -> bool:
    """Return whether a text has the form of a folder's id."""
    return len(text) == 2 * DIGEST_BYTES and all(char in "0123456789abcdef" for char in text)


def chunk_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of the chunks of a file.

    >>> chunk_sizes(CHUNK_BYTES + 1), chunk_sizes(0)
    ([983040, 1], [])
    """
    whole, rest = divmod(size_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * (rest > 0)


def chunk_count(size_bytes: int) -> int:
    """Return how many chunks a file has.

    >>> chunk_count(CHUNK_BYTES + 1), chunk_count(0)
    (2, 0)
    """
    return -(-size_bytes // CHUNK_BYTES)


def pages_of(entries: Iterable[FolderEntry]) -> Iterator[bytes]:
    """Yield the pages of a folder's entries, which are sorted by path; an empty folder has one page."""
    page, size, yielded = FolderPage(), 0, False
    for entry in entries:
        added = entry.ByteSize() + 8
        if page.entries and size + added > PAGE_BYTES:
            yield page.SerializeToString(deterministic=True)
            page, size, yielded = FolderPage(), 0, True
        page.entries.append(entry)
        size += added
    if page.entries or not yielded:
        yield page.SerializeToString(deterministic=True)


def read_page(data: bytes) -> Sequence[FolderEntry]:
    """Return the entries of a page.

    Raises:
        BadFolder: it is not a page, or an entry is invalid.
    """
    try:
        page = FolderPage.FromString(data)
    except DecodeError:
        raise BadFolder("not a page of a folder") from None
    for entry in page.entries:
        if why := entry_error(entry):
            raise BadFolder(f"{entry.path[:80].decode(errors='replace')!a}: {why}")
    return page.entries


def entry_error(entry: FolderEntry) -> str:
    r"""Return why an entry is invalid; "" if it is valid.

    >>> entry_error(FolderEntry(path=b"a/../b", kind=DIRECTORY))
    'has a part that is empty, "." or ".."'
    >>> entry_error(FolderEntry(path=b"a/b", kind=LINK, link_target=b"../../etc"))
    'is a link that leads out of the folder'
    """
    if why := path_error(entry.path):
        return why
    if entry.mode > MODE_MAX:
        return "has more than permission bits"
    if entry.kind == FILE:
        if not 0 <= entry.size_bytes <= FOLDER_BYTES_MAX or len(entry.chunks) != chunk_count(entry.size_bytes):
            return "has another size than its chunks"
        wrong = any(len(digest) != DIGEST_BYTES for digest in entry.chunks)
        return "has a chunk without a SHA-256" if wrong else ""
    if entry.kind == LINK:
        return "" if link_stays(entry.path, entry.link_target) else "is a link that leads out of the folder"
    return "" if entry.kind == DIRECTORY else "is neither a file, a directory nor a link"


def path_error(path: bytes) -> str:
    """Return why this is not the path of an entry; "" if it is."""
    if not path or len(path) > PATH_BYTES_MAX or b"\0" in path:
        return f"must have 1 to {PATH_BYTES_MAX} bytes, none of them zero"
    parts = path.split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        return 'has a part that is empty, "." or ".."'
    if len(parts) > DEPTH_MAX or max(map(len, parts)) > NAME_BYTES_MAX:
        return f"has more than {DEPTH_MAX} parts, or one of more than {NAME_BYTES_MAX} bytes"
    return ""


def link_stays(path: bytes, target: bytes) -> bool:
    """Return whether a link's target, taken as text, stays within the folder.

    >>> link_stays(b"a/b", b"../c"), link_stays(b"a/b", b"../../c"), link_stays(b"a", b"/etc"), link_stays(b"a", b"")
    (True, False, False, False)
    """
    if not target or target.startswith(b"/") or b"\0" in target or len(target) > PATH_BYTES_MAX:
        return False
    depth = path.count(b"/")
    for part in target.split(b"/"):
        depth += -1 if part == b".." else part not in (b"", b".")
        if depth < 0:
            return False
    return True
