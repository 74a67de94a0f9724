"""Relays processes' output and files from agents to readers; placement stores none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors
from cotenant.core.model.node_capabilities import Capability
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.security.identity import check_node
from cotenant.services.placement.agents.agent_sessions import Sessions

PIECES_WAITING_MAX = 16  # per read: a slow reader slows the agents' uploads, nothing else

Piece = agent_pb2.UploadOutputRequest


class _Read:
    """One reader, fed by the agents of one or more nodes."""

    def __init__(self, read_ids: Sequence[str]) -> None:
        self.pending = set(read_ids)
        self.begun: set[str] = set()
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue(PIECES_WAITING_MAX)
        self.away: list[str] = []  # nodes whose agents disconnected before they had sent everything

    async def drain(self) -> None:
        """Empty the queue, so that blocked uploads notice that the reader is gone."""
        while not self.pieces.empty():
            self.pieces.get_nowait()
            await asyncio.sleep(0)


class OutputRelay:
    """Reads in progress, by the read id in agents' uploads."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._reads: dict[str, _Read] = {}
        self._nodes: dict[str, str] = {}  # node id by read id
        self._count = 0

    async def read(
        self, request: placement_pb2.ReadAttemptLogsRequest, node_ids: Sequence[str]
    ) -> AsyncIterator[placement_pb2.ReadAttemptLogsResponse]:
        """Request output from the agents of some nodes and yield it as it arrives, nodes interleaved.

        Raises:
            Problem: an agent is disconnected, has no such output, or keeps none.
        """
        for node_id in node_ids:
            self._sessions.require(node_id, Capability.FILES if request.HasField("files") else Capability.LOGS)
        self._count += 1
        ids = {f"{self._count}-{node_id}": node_id for node_id in node_ids}
        read = _Read(list(ids))
        order = agent_pb2.ReadOutput(
            job_id=request.job_id, number=request.number, follow=request.follow, tail_bytes=request.tail_bytes
        )
        if request.HasField("rank"):
            order.rank = request.rank
        if request.HasField("files"):
            order.files.CopyFrom(request.files)
        try:
            for read_id, node_id in ids.items():
                self._reads[read_id], self._nodes[read_id] = read, node_id
                order.read_id = read_id
                if not self._sessions.send(node_id, agent_pb2.ConnectResponse(reads=[order])):
                    raise _away(node_id)
            async for piece in self._pieces(read):
                yield placement_pb2.ReadAttemptLogsResponse(
                    rank=piece.rank,
                    data=piece.data,
                    truncated=piece.truncated,
                    file=piece.file if piece.HasField("file") else None,
                )
        finally:
            for read_id in ids:
                self._nodes.pop(read_id, None)
                if self._reads.pop(read_id, None) and read_id in read.pending:
                    order.read_id, order.cancel = read_id, True
                    self._sessions.send(ids[read_id], agent_pb2.ConnectResponse(reads=[order]))
            await read.drain()

    async def _pieces(self, read: _Read) -> AsyncIterator[Piece]:
        while read.pending or not read.pieces.empty():
            if read.away and read.pieces.empty():
                raise _away(read.away[0])
            piece = await read.pieces.get()
            if piece is None:
                continue
            if piece.error:
                raise errors.failed_precondition("NO_OUTPUT", piece.error)
            yield piece

    def node_disconnected(self, node_id: str) -> None:
        """Fail the reads that a node's agent had not begun to answer when it disconnected."""
        for read_id in [read_id for read_id, of in self._nodes.items() if of == node_id]:
            read = self._reads[read_id]
            if read_id in read.pending and read_id not in read.begun:
                read.away.append(node_id)
                if not read.pieces.full():
                    read.pieces.put_nowait(None)  # wakes the waiting reader

    async def upload(self, requests: AsyncIterator[Piece]) -> None:
        """Relay an agent's upload until it ends or its reader is gone."""
        read_id = ""
        try:
            async for piece in requests:
                named = piece.read_id or read_id
                read = self._reads.get(named)
                if read is None:
                    return
                check_node(self._nodes[named])
                read_id = named
                read.begun.add(read_id)
                await read.pieces.put(piece)
        finally:
            if (read := self._reads.get(read_id)) and read_id in read.pending:
                read.pending.discard(read_id)
                await read.pieces.put(None)


def _away(node_id: str) -> errors.Problem:
    return errors.unavailable(f"the output is on {node_id}, whose agent is disconnected", reason="NODE_AWAY")
