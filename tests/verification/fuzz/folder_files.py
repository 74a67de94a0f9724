"""Input of uploads: pages from clients and nodes, what is remembered of folders, ignore files, damaged chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tests.verification.fuzz.targets import Prepared, Target, file_target

from cotenant.cli.jobs.folder_digests import digests_of, memory_of, read_chunk
from cotenant.cli.jobs.folder_download import Download
from cotenant.cli.jobs.folder_scan import scan
from cotenant.cli.outcome import CommandError
from cotenant.folders.chunk_files import ChunkDamaged, ChunkFiles
from cotenant.folders.content import DIRECTORY, FILE, LINK, BadFolder, digest_of, pages_of, read_page
from cotenant.node_agent.runtime.work_files import NoFiles, read_files
from cotenant.services.queue.folders.folder_store import ChunksMissing, FolderRules, FolderStore
from cotenant.v1.folder_service_pb2 import FolderEntry
from cotenant.v1.job_pb2 import FILE_KIND_DIRECTORY, FILE_KIND_FILE, FileEntry, FilePart, FileSelection

CHUNK = b"content"
[PAGE] = pages_of(
    [
        FolderEntry(path=b"d", kind=DIRECTORY, mode=0o755),
        FolderEntry(path=b"d/f", kind=FILE, mode=0o644, size_bytes=len(CHUNK), chunks=[digest_of(CHUNK)]),
        FolderEntry(path=b"l", kind=LINK, link_target=b"d/f"),
    ]
)
RECORD = b'{"id": "x", "entry_count": 3, "size_bytes": 7, "pages": ["%s"]}' % digest_of(PAGE).hex().encode()
IGNORED = (b"*.log\n!keep.log\n/build/\n# no\n[a-z]?\n**/x\n\\#y\n", b"!.git\n", b"[")


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("folder page", lambda directory: Prepared(_page, (PAGE,)), (BadFolder,))
    yield Target("committed page", _committed, (BadFolder, ChunksMissing))
    yield Target("folder record", _record)
    yield Target("chunk", _chunk, (ChunkDamaged,))
    yield Target(
        "ignore file", file_target("r/.gitignore", _scan, IGNORED, (b"**", b"[", b"!", b"\\")), (CommandError,)
    )
    yield Target("remembered digests", _memory)
    yield Target("path of a file of a job", _work, (NoFiles,))
    yield Target("files of a node", _download, (CommandError,))


def _page(data: bytes) -> None:
    read_page(data)


def _committed(directory: Path) -> Prepared:
    own = FolderStore(FolderRules(directory / "store")).of("lab")
    own.write([CHUNK])

    def run(data: bytes) -> None:
        own.write([data])
        own.commit([digest_of(data)])

    return Prepared(run, (PAGE,))


def _record(directory: Path) -> Prepared:
    own = FolderStore(FolderRules(directory / "store")).of("lab")
    own.write([CHUNK, PAGE])
    record = own.commit([digest_of(PAGE)])
    path = directory / "store" / "lab" / "folders" / record.id

    def run(data: bytes) -> None:
        path.write_bytes(data)
        own.find(record.id)
        own.collect({record.id}, 0.0)

    return Prepared(run, (RECORD,))


def _chunk(directory: Path) -> Prepared:
    chunks = ChunkFiles(directory / "chunks", durable=False)
    chunks.open()
    digest, _ = chunks.write(CHUNK)

    def run(data: bytes) -> None:
        chunks.path(digest).write_bytes(data)
        chunks.read(digest)

    return Prepared(run, (CHUNK,))


def _scan(path: Path) -> None:
    for name in ("a.log", "keep.log", "x/y"):
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).touch()
    scan(str(path.parent))


def _memory(directory: Path) -> Prepared:
    root = directory / "r"
    root.mkdir(exist_ok=True)
    (root / "f").write_bytes(CHUNK)
    os.utime(root / "f", (1, 1))
    found = scan(str(root))
    memory = memory_of(found, directory)
    memory.parent.mkdir(exist_ok=True)
    status = (root / "f").stat()
    key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    seed = f'{{"format": 1, "files": {{"f": {[*key, digest_of(CHUNK).hex()]}}}}}'.replace("'", '"').encode()

    def run(data: bytes) -> None:
        memory.write_bytes(data)
        digests_of(found, memory, lambda done, total: None)
        read_chunk(found.root, b"f", 0, len(CHUNK), digest_of(CHUNK))

    return Prepared(run, (seed, b'{"format": 1, "files": {}}'))


def _work(directory: Path) -> Prepared:
    work = directory / "work"
    (work / "d").mkdir(parents=True, exist_ok=True)
    (work / "d" / "f").write_bytes(CHUNK)

    def run(data: bytes) -> None:
        list(read_files(work, FileSelection(path=data)))

    return Prepared(run, (b"d/f", b"d", b""), (b"..", b"/", b"."))


def _download(directory: Path) -> Prepared:
    parts = [
        FilePart(entry=FileEntry(kind=FILE_KIND_DIRECTORY, mode=0o755)),
        FilePart(entry=FileEntry(path=b"f", kind=FILE_KIND_FILE, mode=0o644, size_bytes=len(CHUNK))),
        FilePart(data=CHUNK),
    ]
    seed = b"".join(len(one).to_bytes(1, "big") + one for one in (part.SerializeToString() for part in parts))

    def run(data: bytes) -> None:
        download = Download(str(directory / "copy" / "to"))
        try:
            while data:
                size, data = data[0], data[1:]
                download.take(_part(data[:size]))
                data = data[size:]
            download.finish()
        finally:
            download.close()

    (directory / "copy").mkdir(exist_ok=True)
    return Prepared(run, (seed,))


def _part(data: bytes) -> FilePart:
    try:
        return FilePart.FromString(data)
    except DecodeError:
        return FilePart()
