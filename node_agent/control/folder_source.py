"""Fetches chunks of uploaded folders from the queue, over the connection to placement, which routes the calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors
from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.control.output_upload import NotConnected
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch
from cotenant.v1.folder_service_pb2 import ReadChunksRequest

if TYPE_CHECKING:
    from cotenant.v1.folder_service_pb2_grpc import FolderServiceAsyncStub

log = structlog.get_logger()

PATIENCE_SECONDS = 120.0  # without a single chunk
FINAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class FolderSource:
    """Reads chunks, and tries again while the queue is out of reach; `stub` raises `NotConnected`."""

    def __init__(
        self,
        node_id: str,
        stub: Callable[[], FolderServiceAsyncStub],
        rng: Random,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._node_id, self._stub, self._rng = node_id, stub, rng
        self._patience_seconds = patience_seconds

    async def read(self, assignment: agent_pb2.Assignment, digests: Sequence[bytes]) -> AsyncIterator[bytes]:
        """Yield these chunks of the job's folder, in order; without digests, its pages.

        Raises:
            CannotFetch: the queue does not have them, or is out of reach for too long.
        """
        received, heard = 0, time.monotonic()
        backoff = Backoff(first_seconds=0.1, longest_seconds=5.0, rng=self._rng)
        while True:
            request = ReadChunksRequest(
                job_id=assignment.job_id,
                number=assignment.number,
                node_id=self._node_id,
                digests=digests[received:] if digests else (),
            )
            skipped = 0 if digests else received
            try:
                async for answer in self._stub().ReadChunks(request):
                    heard = time.monotonic()
                    backoff.reset()
                    if skipped:
                        skipped -= 1
                        continue
                    received += 1
                    yield answer.data
                return
            except (grpc.aio.AioRpcError, NotConnected) as error:
                reason = reason_of(error)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in FINAL:
                    raise CannotFetch(f"the uploaded folder cannot be fetched: {reason}") from None
                if time.monotonic() - heard > self._patience_seconds:
                    raise CannotFetch(
                        f"the uploaded folder could not be fetched for {self._patience_seconds:.0f} s: {reason}"
                    ) from None
                log.info("folder_fetch_retried", job=assignment.job_id, why=reason)
                await asyncio.sleep(backoff.next_seconds())


def reason_of(error: Exception) -> str:
    """Return why a call failed, in words."""
    return errors.from_error(error).message if isinstance(error, grpc.aio.AioRpcError) else str(error)
