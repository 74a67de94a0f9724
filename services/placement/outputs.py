"""Output of processes, from agents to whoever reads: placement only passes it on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cotenant.rpc import errors
from cotenant.services.placement.agents import Sessions
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

PIECES_WAITING_MAX = 16  # per read: a slow reader slows the agents' uploads, nothing else

Piece = node_pb2.UploadOutputRequest


class _Read:
    """One reader, fed by the agents of one or more nodes."""

    def __init__(self, node_ids: Sequence[str]) -> None:
        self.pending = set(node_ids)
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue(PIECES_WAITING_MAX)


class Outputs:
    """Reads under way, by the id that agents name in their uploads."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._reads: dict[str, _Read] = {}
        self._count = 0

    async def read(
        self, request: placement_pb2.ReadAttemptLogsRequest, node_ids: Sequence[str]
    ) -> AsyncIterator[placement_pb2.ReadAttemptLogsResponse]:
        """Ask the agents of some nodes for output and yield it as it comes, nodes interleaved.

        Raises:
            Problem: an agent is away, or has no such output.
        """
        self._count += 1
        ids = {f"{self._count}-{node_id}": node_id for node_id in node_ids}
        read = _Read(list(ids))
        order = node_pb2.ReadOutput(
            job_id=request.job_id, number=request.number, follow=request.follow, tail_bytes=request.tail_bytes
        )
        if request.HasField("rank"):
            order.rank = request.rank
        try:
            for read_id, node_id in ids.items():
                self._reads[read_id] = read
                order.read_id = read_id
                if not self._sessions.send(node_id, node_pb2.ConnectResponse(reads=[order])):
                    raise errors.unavailable(f"the output is on {node_id}, whose agent is away", reason="NODE_AWAY")
            async for piece in self._pieces(read):
                yield placement_pb2.ReadAttemptLogsResponse(rank=piece.rank, data=piece.data, truncated=piece.truncated)
        finally:
            for read_id in ids:
                if self._reads.pop(read_id, None) and read_id in read.pending:
                    order.read_id, order.cancel = read_id, True
                    self._sessions.send(ids[read_id], node_pb2.ConnectResponse(reads=[order]))

    async def _pieces(self, read: _Read) -> AsyncIterator[Piece]:
        while read.pending or not read.pieces.empty():
            piece = await read.pieces.get()
            if piece is None:
                continue
            if piece.error:
                raise errors.failed_precondition("NO_OUTPUT", piece.error)
            yield piece

    async def upload(self, requests: AsyncIterator[Piece]) -> None:
        """Take an agent's upload in, until it ends or nobody reads any more."""
        read_id = ""
        try:
            async for piece in requests:
                read_id = piece.read_id or read_id
                read = self._reads.get(read_id)
                if read is None:
                    return
                await read.pieces.put(piece)
        finally:
            if (read := self._reads.get(read_id)) and read_id in read.pending:
                read.pending.discard(read_id)
                await read.pieces.put(None)
