"""Random folders, how they look on disk, and how they travel from a client through the queue to a node."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hypothesis import strategies as st

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.cli.jobs.folder_upload import Prepared, prepare
from cotenant.folders.content import DIRECTORY
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch, UploadedFolders
from cotenant.services.queue.folders.folder_store import ChunksMissing, FolderRecord, FolderRules, FolderStore

Tree = dict[bytes, tuple[str, int | bytes, bytes]]  # by path: kind, mode or target, content

NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..", b".git", b".gitignore")
) | st.sampled_from([b"a b", b"-rf", b"*", b"\n", b"\xff\xfe", "ü".encode(), b"#x", b"!y", b"..."])
CONTENTS = st.binary(max_size=64) | st.just(b"x" * (2**20 + 3)) | st.just(b"\0" * 2**20)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o400, 0o777])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Draw a folder with files, empty directories and links."""
    tree: Tree = {}
    directories = [b""]
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(directories))
        path = (parent + b"/" if parent else b"") + draw(NAMES)
        kind = draw(st.sampled_from(["file", "file", "directory", "link"]))
        if path in tree:
            continue
        if kind == "file":
            tree[path] = kind, draw(MODES), draw(CONTENTS)
        elif kind == "directory":
            tree[path] = kind, draw(st.sampled_from([0o755, 0o700, 0o555])), b""
            directories.append(path)
        else:
            tree[path] = kind, b"./" + draw(NAMES), b""
    return tree


def write(root: Path, tree: Tree) -> None:
    """Make a folder on disk."""
    root.mkdir(exist_ok=True)
    for path, (kind, mode, content) in tree.items():
        full = os.path.join(os.fsencode(root), path)
        if kind == "directory":
            os.mkdir(full)
        elif kind == "link":
            assert isinstance(mode, bytes)
            os.symlink(mode, full)
        else:
            with open(full, "wb") as file:
                file.write(content)
    for path, (kind, mode, _) in reversed(tree.items()):
        if kind != "link":
            assert isinstance(mode, int)
            os.chmod(os.path.join(os.fsencode(root), path), mode)


def read(root: Path) -> Tree:
    """Return a folder as it is on disk."""
    tree: Tree = {}
    for place, directories, files in os.walk(os.fsencode(root)):
        for name in [*directories, *files]:
            full = os.path.join(place, name)
            path, found = os.path.relpath(full, os.fsencode(root)), os.lstat(full)
            if stat.S_ISLNK(found.st_mode):
                tree[path] = "link", os.readlink(full), b""
            elif stat.S_ISDIR(found.st_mode):
                tree[path] = "directory", stat.S_IMODE(found.st_mode), b""
            else:
                tree[path] = "file", stat.S_IMODE(found.st_mode), Path(os.fsdecode(full)).read_bytes()
    return tree


def content_of(prepared: Prepared, digest: bytes) -> bytes:
    """Return a chunk of a prepared folder."""
    source = prepared.sources[digest]
    if source.page is not None:
        return source.page
    with open(os.path.join(prepared.found.root, source.path), "rb") as file:
        file.seek(source.place)
        return file.read(source.size)


def store(directory: Path, **rules: float) -> FolderStore:
    """Return the queue's folders in a directory."""
    return FolderStore(FolderRules(directory, **rules))  # type: ignore[arg-type]  # numbers


def upload(root: Path, folders: FolderStore, tenant: str = "lab") -> tuple[FolderRecord, int]:
    """Upload a folder as a client does; return it, and how many chunks were sent."""
    prepared, own = prepare(str(root)), folders.of(tenant)
    missing = own.missing(list(prepared.sources))
    own.write([content_of(prepared, digest) for digest in missing])
    return own.commit(prepared.pages), len(missing)


class Direct:
    """Reads chunks from a store without a queue. `cut` drops the connection before this chunk, once."""

    def __init__(self, folders: FolderStore, record: FolderRecord, tenant: str = "lab") -> None:
        self._own, self._record = folders.of(tenant), record
        self.sent = 0

    async def read(self, assignment: agent_pb2.Assignment, digests: Sequence[bytes]) -> AsyncIterator[bytes]:
        """Yield chunks, or the pages."""
        for digest in digests or self._record.page_digests:
            self.sent += 1
            try:
                yield self._own.read(digest)
            except ChunksMissing as error:
                raise CannotFetch(str(error)) from None


def assignment_of(record: FolderRecord) -> agent_pb2.Assignment:
    """Return an assignment of a job with a folder."""
    assignment = agent_pb2.Assignment(job_id="a", number=1)
    assignment.spec.upload = record.id
    return assignment


def build(folders: UploadedFolders, record: FolderRecord, work: Path) -> None:
    """Fetch and build a folder as an agent does."""
    fetched = asyncio.run(folders.fetch(assignment_of(record), asyncio.Event(), lambda done, total: None))
    work.mkdir(mode=0o700)
    with folders.released(fetched):
        folders.build(fetched, work, None, lambda: False)
    assert all(entry.kind != DIRECTORY or not entry.chunks for entry in fetched.entries)
