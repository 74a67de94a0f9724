"""Uploads the folders that jobs take along: only chunks that the mesh lacks are sent, so that a repeat is quick.

An upload that was cut off goes on where it was: what has arrived is no longer missing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from cotenant.cli import units
from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.folder_digests import digests_of, memory_of, read_chunk
from cotenant.cli.jobs.folder_scan import HINT_IGNORE, FoundFolder, largest_entries, scan, shown
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.outcome import CommandError, note
from cotenant.cli.progress_bar import Bar
from cotenant.cli.stream_retry import StreamRetry
from cotenant.codec.errors import from_error
from cotenant.folders.content import CHUNK_BYTES, FILE, PAGES_MAX, chunk_sizes, digest_of, pages_of
from cotenant.v1.folder_service_pb2 import (
    CommitFolderRequest,
    FindMissingChunksRequest,
    FindMissingChunksResponse,
    Folder,
    FolderEntry,
    WriteChunksRequest,
)

ASKED_AT_ONCE_MAX = 10_000  # digests
SENT_AT_ONCE_MAX = 3 * 2**20  # bytes
SENDERS = 4
TRIES_MAX = 3  # if chunks are removed between the question and the commit
QUIET_SECONDS = 1.0  # shorter work has no progress bar
MB = 1e6

Show = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a chunk is read: a page, or a place in a file."""

    size: int
    path: bytes = b""
    place: int = 0
    page: bytes | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder whose chunks are known."""

    found: FoundFolder
    pages: Sequence[bytes]  # digests
    sources: Mapping[bytes, _Source]  # by digest


class Uploads:
    """The folders of one submission: prepared without the mesh, and uploaded once each for each tenant."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        """Prepare the folders of jobs.

        Raises:
            CommandError: a folder cannot be uploaded.
        """
        self._prepared = {path: prepare(path) for path in dict.fromkeys(one.spec.upload for one in drafts) if path}
        self._uploaded: dict[tuple[str, str], Folder] = {}

    async def upload(self, mesh: Mesh, drafts: Sequence[Draft]) -> list[Draft]:
        """Upload the folders, and return the jobs with their ids.

        Raises:
            CommandError: a folder does not fit, or changed meanwhile.
            AioRpcError: the mesh refuses, or is unreachable.
        """
        return [await self._of(mesh, draft) if draft.spec.upload else draft for draft in drafts]

    async def _of(self, mesh: Mesh, draft: Draft) -> Draft:
        tenant = draft.to_wire(draft.spec).tenant
        key = tenant, draft.spec.upload
        if key not in self._uploaded:
            self._uploaded[key] = await upload(mesh, tenant, self._prepared[draft.spec.upload])
        return with_upload(draft, self._uploaded[key].id)

    def dry(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Return the jobs for a check: without folders, which were not uploaded."""
        return [with_upload(draft, "") for draft in drafts]


def with_upload(draft: Draft, upload_id: str) -> Draft:
    """Return a job with another folder. It starts nowhere else, unless it keeps its own where a node has that."""
    spec = draft.spec.without_folder() if draft.spec.upload and not draft.keeps_folder else draft.spec
    return replace(draft, spec=replace(spec, upload=upload_id))


def prepare(path: str) -> Prepared:
    """Find what is to be uploaded of a folder, and read it.

    Raises:
        CommandError: the folder cannot be uploaded.
    """
    found = scan(str(Path(path).expanduser()))
    if found.skipped:
        note(f"--upload leaves out {len(found.skipped)} sockets, pipes or devices, such as {found.skipped[0]}")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with Bar(f"reading {shown(found.root)}, MB") as bar:
        digests = digests_of(found, memory_of(found, home), _slow(bar))
    entries, sources = [], dict[bytes, _Source]()
    for entry, chunks in zip(found.entries, digests, strict=True):
        made = FolderEntry(path=entry.path, kind=entry.kind, mode=entry.mode, link_target=entry.link_target)  # type: ignore[arg-type]  # an enum's number
        if entry.kind == FILE:
            made.size_bytes = entry.size_bytes
            made.chunks.extend(chunks)
            for number, (digest, size) in enumerate(zip(chunks, chunk_sizes(entry.size_bytes), strict=True)):
                sources.setdefault(digest, _Source(size, entry.path, number * CHUNK_BYTES))
        entries.append(made)
    pages = list(pages_of(entries))
    if len(pages) > PAGES_MAX:
        raise CommandError(f"--upload: the list of entries of {shown(found.root)} is too long", hint=HINT_IGNORE)
    named = {digest_of(page): page for page in pages}
    sources.update({digest: _Source(len(page), page=page) for digest, page in named.items()})
    return Prepared(found, [digest_of(page) for page in pages], sources)


def _slow(bar: Bar) -> Show:
    """Return what shows bytes on a bar, once that takes more than a moment."""
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - began > QUIET_SECONDS:
            bar.show(done / MB, total / MB)

    return show


async def upload(mesh: Mesh, tenant: str, prepared: Prepared) -> Folder:
    """Upload what the mesh lacks of a folder, and return the folder.

    Raises:
        CommandError: it does not fit, or changed meanwhile.
        AioRpcError: the mesh refuses, or is unreachable.
    """
    upload = _Upload(mesh, tenant, prepared)
    for _ in range(TRIES_MAX):
        if await upload.missing(prepared.pages):  # else it was committed, most likely
            await upload.send(await upload.missing(list(prepared.sources)))
        try:
            return await upload.commit()
        except grpc.aio.AioRpcError as error:
            if from_error(error).reason != "CHUNKS_MISSING":
                raise
            await upload.send(await upload.missing(list(prepared.sources)))
    raise CommandError("the mesh has removed parts of the upload again and again", hint="submit again")


class _Upload:
    """One folder, one tenant."""

    def __init__(self, mesh: Mesh, tenant: str, prepared: Prepared) -> None:
        self._mesh, self._tenant, self._prepared = mesh, tenant, prepared
        self._retry = StreamRetry(mesh, "lost the connection during the upload")
        self._free_bytes, self._quota_bytes, self._kept_days = 0, 0, 0.0

    async def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the chunks that the mesh lacks."""
        found: list[bytes] = []
        for start in range(0, len(digests), ASKED_AT_ONCE_MAX):
            request = FindMissingChunksRequest(tenant=self._tenant, digests=digests[start : start + ASKED_AT_ONCE_MAX])
            answer: FindMissingChunksResponse = await self._call("FindMissingChunks", request)
            found += answer.missing
            self._free_bytes, self._quota_bytes = answer.free_bytes, answer.quota_bytes
            self._kept_days = answer.kept.seconds / 86_400
        return found

    async def send(self, missing: Sequence[bytes]) -> None:
        """Send chunks, several messages at a time."""
        sources = self._prepared.sources
        total, done = sum(sources[digest].size for digest in missing), 0
        if total > self._free_bytes:
            raise self._too_large(total)
        batches = self._batches(missing)
        with Bar(f"uploading {shown(self._prepared.found.root)}, MB") as bar:
            show = _slow(bar)

            async def work() -> None:
                nonlocal done
                for batch in batches:
                    chunks = await asyncio.to_thread(lambda batch=batch: [self._read(digest) for digest in batch])  # type: ignore[misc]  # bound now
                    await self._call("WriteChunks", WriteChunksRequest(tenant=self._tenant, chunks=chunks))
                    show(done := done + sum(map(len, chunks)), total)

            async with asyncio.TaskGroup() as senders:
                for _ in range(SENDERS):
                    senders.create_task(work())

    def _batches(self, missing: Sequence[bytes]) -> Iterator[list[bytes]]:
        batch, size = list[bytes](), 0
        for digest in missing:
            added = self._prepared.sources[digest].size + 8
            if batch and size + added > SENT_AT_ONCE_MAX:
                yield batch
                batch, size = [], 0
            batch.append(digest)
            size += added
        if batch:
            yield batch

    def _read(self, digest: bytes) -> bytes:
        source = self._prepared.sources[digest]
        if source.page is not None:
            return source.page
        return read_chunk(self._prepared.found.root, source.path, source.place, source.size, digest)

    def _too_large(self, total: int) -> CommandError:
        return CommandError(
            f"--upload: {units.short_bytes(total)} are to be sent, and the tenant may upload "
            f"{units.short_bytes(self._free_bytes)} more (quota {units.short_bytes(self._quota_bytes)})",
            details=["the largest entries:", *largest_entries(self._prepared.found)],
            hint=f"{HINT_IGNORE}, or wait: uploads are removed {self._kept_days:g} days after their last job has ended",
        )

    async def commit(self) -> Folder:
        """Make the folder."""
        request = CommitFolderRequest(tenant=self._tenant, pages=self._prepared.pages)
        answer = await self._call("CommitFolder", request)
        folder: Folder = answer.folder
        return folder

    async def _call(self, method: str, request: Message) -> Any:
        """Make a call, and repeat it while the mesh is out of reach for a moment."""
        while True:
            try:
                answer = await getattr(self._mesh.folders, method)(request)
                self._retry.reset()
                return answer
            except grpc.aio.AioRpcError as error:
                await self._retry.wait(error)
