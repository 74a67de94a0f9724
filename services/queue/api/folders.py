"""The servicer of uploaded folders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import structlog
from google.protobuf.duration_pb2 import Duration

from cotenant.codec import errors
from cotenant.core.model.validation import Violation
from cotenant.folders.content import CHUNK_BYTES, DIGEST_BYTES, PAGES_MAX, BadFolder
from cotenant.security.identity import check_node, resolve_tenant
from cotenant.services.queue.folders.folder_store import ChunksMissing, FolderStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import folder_service_pb2 as pb
from cotenant.v1 import folder_service_pb2_grpc

log = structlog.get_logger()

READ_CHUNKS_MAX = 1_000
COLLECT_SECONDS = 3600.0
FIRST_COLLECT_SECONDS = 60.0  # after a queue starts to lead


class FolderServicer(folder_service_pb2_grpc.FolderServiceServicer):
    """Keeps folders for tenants, and hands them to the nodes that run their jobs."""

    def __init__(self, state: State, folders: FolderStore) -> None:
        self._state, self._folders = state, folders

    async def FindMissingChunks(
        self, request: pb.FindMissingChunksRequest, context: Any
    ) -> pb.FindMissingChunksResponse:
        """Return the chunks that the tenant does not have."""
        _check_digests("digests", list(request.digests))
        tenant, rules = self._tenant(request.tenant), self._folders.rules
        own = self._folders.of(tenant)
        missing, free = await asyncio.to_thread(lambda: (own.missing(request.digests), own.free_bytes))
        return pb.FindMissingChunksResponse(
            missing=missing,
            free_bytes=free,
            quota_bytes=rules.quota_bytes,
            kept=Duration(seconds=int(rules.kept_seconds)),
        )

    async def WriteChunks(self, request: pb.WriteChunksRequest, context: Any) -> pb.WriteChunksResponse:
        """Write chunks to disk."""
        wrong = [number for number, chunk in enumerate(request.chunks) if len(chunk) > CHUNK_BYTES]
        if wrong:
            raise errors.invalid([Violation(f"chunks[{wrong[0]}]", f"must have at most {CHUNK_BYTES:,} bytes")])
        own = self._folders.of(self._tenant(request.tenant))
        await asyncio.to_thread(own.write, list(request.chunks))
        return pb.WriteChunksResponse(free_bytes=await asyncio.to_thread(lambda: own.free_bytes))

    async def CommitFolder(self, request: pb.CommitFolderRequest, context: Any) -> pb.CommitFolderResponse:
        """Make a folder of chunks that are here."""
        _check_digests("pages", list(request.pages))
        if not 1 <= len(request.pages) <= PAGES_MAX:
            raise errors.invalid([Violation("pages", f"must be 1 to {PAGES_MAX}, not {len(request.pages)}")])
        tenant = self._tenant(request.tenant)
        try:
            made = await asyncio.to_thread(self._folders.of(tenant).commit, list(request.pages))
        except BadFolder as error:
            raise errors.invalid([Violation("pages", str(error))]) from None
        except ChunksMissing as error:
            raise errors.failed_precondition("CHUNKS_MISSING", f"{error}; write them first") from None
        log.info("folder_committed", tenant=tenant, folder=made.id, entries=made.entry_count, bytes=made.size_bytes)
        return pb.CommitFolderResponse(folder=made.to_wire())

    async def ReadChunks(self, request: pb.ReadChunksRequest, context: Any) -> AsyncIterator[pb.ReadChunksResponse]:
        """Yield chunks of a job's folder, or its pages."""
        check_node(request.node_id)
        if len(request.digests) > READ_CHUNKS_MAX:
            raise errors.invalid([Violation("digests", f"must be at most {READ_CHUNKS_MAX}")])
        _check_digests("digests", list(request.digests))
        record = self._state.records.get(request.job_id)
        attempt = record.job.attempt if record else None
        placed = {one.node_id for one in attempt.allocations} if attempt else set()
        if record is None or attempt is None or attempt.number != request.number or request.node_id not in placed:
            raise errors.unavailable(
                f"the queue does not know yet that {request.job_id}/{request.number} is placed on {request.node_id}",
                reason="NOT_PLACED_HERE",
            )
        own = self._folders.of(record.spec.tenant)
        found = await asyncio.to_thread(own.find, record.spec.upload)
        if found is None:
            raise _lost(request.job_id)
        for digest in list(request.digests) or found.page_digests:
            try:
                yield pb.ReadChunksResponse(data=await asyncio.to_thread(own.read, digest))
            except ChunksMissing:
                await asyncio.to_thread(own.forget, record.spec.upload)
                raise _lost(request.job_id) from None

    async def check(self, tenant: str, upload: str) -> None:
        """Check that a job's folder is here; it then counts as just used.

        Raises:
            Problem: it is not.
        """
        if upload and await asyncio.to_thread(self._folders.of(tenant).find, upload) is None:
            raise errors.failed_precondition(
                "UPLOAD_UNKNOWN", f"tenant {tenant} has no uploaded folder {upload[:12]}…", remedy="upload it again"
            )

    async def run(self) -> None:
        """Remove folders that are no longer needed, forever."""
        await asyncio.sleep(FIRST_COLLECT_SECONDS)
        while True:
            await self.collect()
            await asyncio.sleep(COLLECT_SECONDS)

    async def collect(self) -> None:
        """Remove what no unfinished job and no schedule needs, and nobody has used for long."""
        used = set(self._used())
        try:
            removed = await asyncio.to_thread(self._folders.collect, used, time.time())
        except OSError as error:
            log.warning("folder_collection_failed", error=str(error))
            return
        if removed:
            log.info("folder_chunks_removed", bytes=removed)

    def _used(self) -> Iterator[tuple[str, str]]:
        for record in self._state.records.values():
            if record.spec.upload and not record.phase.ended:
                yield record.spec.tenant, record.spec.upload
        yield from self._state.schedules.uploads()

    def _tenant(self, named: str) -> str:
        tenant = resolve_tenant(named)
        View(self._state).check_tenant(tenant)
        return tenant


def _check_digests(field: str, digests: list[bytes]) -> None:
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise errors.invalid([Violation(field, f"must be SHA-256 digests of {DIGEST_BYTES} bytes")])


def _lost(job_id: str) -> errors.Problem:
    return errors.failed_precondition(
        "UPLOAD_LOST",
        f"this queue does not have all of the folder that {job_id} was submitted with",
        remedy="submit the job again with --upload; replicas of the queue must share the directory of `uploads`",
    )
