"""Uploads processes' output, and files of their working directories, to placement on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import grpc.aio
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.attempt import Attempts
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.output_reader import OutputReader, ranks_in
from cotenant.node_agent.runtime.work_files import NoFiles, read_files
from cotenant.rpc.task_group import BackgroundTasks

log = structlog.get_logger()

FOLLOW_SECONDS = 0.2
READS_MAX = 64
PARTS_AT_ONCE = 8  # of files: at most 2 MiB

Pieces = AsyncIterator[agent_pb2.UploadOutputRequest]
Upload = Callable[[Pieces], Awaitable[None]]


class NotConnected(Exception):
    """There is no connection to placement."""


class OutputUploads:
    """The running reads, each with an upload of its own."""

    def __init__(
        self,
        directory: Callable[[AttemptKey], Path | None],
        attempts: Attempts,
    ) -> None:
        self._directory, self._attempts = directory, attempts
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._background = BackgroundTasks()

    def order(self, order: agent_pb2.ReadOutput, upload: Upload) -> None:
        """Start a read that sends the output through `upload`, or cancel one."""
        running = self._reads.get(order.read_id)
        if order.cancel:
            if running:
                running.cancel()
        elif running is None:
            self._reads[order.read_id] = self._background.start(self._send(order, upload))

    async def _send(self, order: agent_pb2.ReadOutput, upload: Upload) -> None:
        try:
            await upload(self._pieces(order))
        except (grpc.aio.AioRpcError, NotConnected, OSError) as error:  # OSError: the output was pruned in the meantime
            log.info("output_upload_failed", read=order.read_id, error=type(error).__name__)
        finally:
            del self._reads[order.read_id]

    async def _pieces(self, order: agent_pb2.ReadOutput) -> Pieces:
        """Yield the output piece by piece. The first message names the read even if there is nothing to send."""
        key = AttemptKey(order.job_id, order.number)
        if len(self._reads) > READS_MAX:
            yield _error(order, f"this node already serves {READS_MAX} output reads")
            return
        directory = self._directory(key)
        if directory is None:
            yield _error(order, f"no output of {key} on this node")
            return
        yield agent_pb2.UploadOutputRequest(read_id=order.read_id, rank=order.rank)
        if order.HasField("files"):
            async for one in _file_pieces(order, directory / "work"):
                yield one
            return
        readers: dict[int, OutputReader] = {}
        try:
            while True:
                last_round = not (order.follow and self._is_running(key))
                directory = self._directory(key) or directory  # it moves when the attempt's end is acknowledged
                for rank in [order.rank] if order.HasField("rank") else ranks_in(directory):
                    if rank not in readers:
                        readers[rank] = OutputReader(directory, rank, tail_bytes=order.tail_bytes)
                for rank, reader in sorted(readers.items()):
                    while (piece := reader.read()).data:
                        yield agent_pb2.UploadOutputRequest(
                            read_id=order.read_id, rank=rank, data=piece.data, truncated=piece.truncated
                        )
                if last_round:
                    return
                await asyncio.sleep(FOLLOW_SECONDS)
        finally:
            for reader in readers.values():
                reader.close()

    def _is_running(self, key: AttemptKey) -> bool:
        attempt = self._attempts.get(key)
        return attempt is not None and not attempt.status.ended

    async def close(self) -> None:
        """Cancel all reads."""
        await self._background.close()


async def _file_pieces(order: agent_pb2.ReadOutput, work: Path) -> Pieces:
    """Yield files of a working directory, read by threads."""
    parts = read_files(work, order.files)
    try:
        while batch := await asyncio.to_thread(lambda: list(islice(parts, PARTS_AT_ONCE))):
            for part in batch:
                yield agent_pb2.UploadOutputRequest(read_id=order.read_id, rank=order.rank, file=part)
    except NoFiles as error:
        yield _error(order, str(error))
    finally:
        with suppress(ValueError):  # a thread still reads, and drops the files soon
            parts.close()


def _error(order: agent_pb2.ReadOutput, why: str) -> agent_pb2.UploadOutputRequest:
    return agent_pb2.UploadOutputRequest(read_id=order.read_id, rank=order.rank, error=why)
